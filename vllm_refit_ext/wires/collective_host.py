"""Trainer rank 0's part in meetings: it serves the store, tells of refusals, and clears up behind old refits."""

from __future__ import annotations

import contextlib
from typing import Any

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.wires.collective_meet import Store

GOING = "going"
"""The meeting that nobody comes to: it can only be stopped, by a rank that gives up a refit which is under way."""
STEPS = ("ready", "joined", GOING)
"""The meetings of a refit, as keys behind its session's name."""


class Host:
    """The store of one refit sender. Its port is held from now on, by rank 0 alone."""

    def __init__(self, served: tuple[str, int, Any], wire: str = "collective") -> None:
        """served: what `open_store` returned, address, port and torch's store. wire: named in errors."""
        self.served, self._wire = served, wire
        self._met: list[str] = []

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return self.served[:2]

    def refuse(self, session: str, error: RefitError, deadline: float) -> None:
        """End the meetings of `session` with `error`, where they are not over. Never raises."""
        with contextlib.suppress(RefitError):
            store = Store(*self.address, deadline, self._wire)
            for step in STEPS:
                store.stop(f"{session}/{step}", error, deadline)

    def forget(self, store: Store, session: str, size: int, deadline: float) -> None:
        """Begin `session` of `size` ranks: remove the keys of the refit before last, which nobody can still be reading."""
        self._met.append(session)
        if len(self._met) > 2:
            old = self._met.pop(0)
            for step in STEPS:
                store.forget(f"{old}/{step}", 0 if step == GOING else size, deadline)
