"""A user's worker extension that knows nothing of refits."""


class OwnExtension:
    """Pass as `worker_extension_cls`."""

    def own(self) -> str:
        """An RPC of the user's."""
        return "mine"
