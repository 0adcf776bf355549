"""A user's worker extensions: one that knows nothing of refits, and the same mixed with ours."""

from vllm_refit_ext import RefitWorkerExtension


class OwnExtension:
    """Pass as `worker_extension_cls`, with the backend `refit`."""

    def own(self) -> str:
        """An RPC of the user's."""
        return "mine"


class MixedExtension(RefitWorkerExtension, OwnExtension):
    """Pass as `worker_extension_cls`."""
