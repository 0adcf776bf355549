"""Leases that are held for as long as something is read."""

from __future__ import annotations

import contextlib
import threading
import time

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.wires import registry
from vllm_refit_ext.wires.registry import StoreRegistry

CALL_S = 5.0
"""Seconds that a registry has to answer one call."""


class Leases:
    """The leases of one reader, renewed by a thread until they are given back."""

    def __init__(self, address: str, holder: str) -> None:
        self._registry, self.holder = StoreRegistry(address), holder
        self._held: set[str] = set()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, epoch: str, deadline: float) -> None:
        """Take a lease, unless it is held. Raises SessionError where the version can't be leased, WireError, DeadlineError."""
        with self._lock:
            if epoch not in self._held:
                self._registry.lease(epoch, self.holder, deadline)
                self._held.add(epoch)
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="refit-leases", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        while not self._stop.wait(registry.LEASE_S / 3):
            with self._lock:
                for epoch in sorted(self._held):
                    with contextlib.suppress(RefitError):  # one that ended is found out before the commit
                        self._registry.lease(epoch, self.holder, time.monotonic() + CALL_S)

    def give_back(self) -> None:
        """Give all back. Never raises: a lease that is left ends by itself."""
        self._stop.set()
        with self._lock:
            for epoch in sorted(self._held):
                with contextlib.suppress(RefitError):
                    self._registry.lease(epoch, self.holder, time.monotonic() + CALL_S, held=False)
            self._held.clear()
