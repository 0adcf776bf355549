"""Following: the engine looks for new versions and takes them by itself, between two steps. Runs in vLLM's engine process.

A thread reads the registry's list of entries every `interval_s` seconds; nothing of a step waits for it. When the newest READY
version is another one than what was taken last, the engine's own loop takes it when it is next between two steps: it is woken for
that where it is idle. The take is the RPC `refit_take`, with the policy for caches that it would have from outside. While that
policy does not let it begin (`reset`, and requests run), it is tried again before each step, and other versions may pass: those
that were seen and not taken are listed as skipped.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from typing import Any

from vllm_refit_ext.core.errors import ConfigError, RefitError
from vllm_refit_ext.core.messages import DEADLINE_S
from vllm_refit_ext.engine import caches as policies
from vllm_refit_ext.receiver.take import check_request
from vllm_refit_ext.wires.registry import StoreRegistry, find

WAKE = "refit-follow"
"""Type of the message in the engine's input queue that wakes its loop."""
RETRY_S = 10.0
"""A version that could not be taken is tried again after so long: what was wrong may have been the network."""
SKIPPED_KEPT = 32
LATE_S = 30.0


class Follower:
    """One engine that follows one registry."""

    def __init__(
        self,
        core: Any,
        registry: object,
        interval_s: object = 1.0,
        caches: object = policies.POLICIES[0],
        deadline_s: object = DEADLINE_S,
        serve: object = "",
    ) -> None:
        """Begin; arguments as the RPC `refit_follow` takes them. Raises ConfigError for those that can't work, and for an engine
        whose replicas would part."""
        self.core = core
        self.registry, self.interval_s = _text(registry), _seconds("interval_s", interval_s)
        self.policy, self.deadline_s = policies.known(caches, "refit_follow, caches"), _seconds("deadline_s", deadline_s)
        check_request("latest", "", DEADLINE_S, serve)
        self.serve = serve
        if core.vllm_config.parallel_config.data_parallel_size > 1:
            do = "pause generation and call refit_take, which reaches all replicas"
            raise ConfigError("data parallel replicas would change their weights at different steps", where="refit_follow", do=do)
        self.due, self._woken = False, False
        self.problem = ""
        self.skipped: list[str] = []
        self._seen: dict[str, str] = {}
        self._done, self._not_before = "", 0.0
        self._entries = StoreRegistry(self.registry)
        self._stop = threading.Event()
        threading.Thread(target=self._look, name="refit-follow", daemon=True).start()

    def stop(self) -> None:
        """Look no more. A take that runs goes on."""
        self._stop.set()
        self.due = False

    def said(self) -> str:
        """For `refit_status`."""
        return f"{self.registry}, every {self.interval_s:g} s" + (f"; {self.problem}" if self.problem else "")

    def _look(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                entry = find(self._entries.entries(time.monotonic() + max(1.0, self.interval_s)), "", latest=True)
            except RefitError as error:
                self.problem = str(error)
                continue
            if self.problem.startswith("registry"):
                self.problem = ""
            if entry is None or entry.of == self._done:
                continue
            if entry.of not in self._seen:
                self._not_before = 0.0  # what kept another version from being taken need not keep this one
            self._seen[entry.of] = entry.version
            if len(self._seen) > SKIPPED_KEPT:
                del self._seen[next(iter(self._seen))]
            self.due = not self._stop.is_set()
            if self.due and not self._woken and hasattr(self.core, "input_queue"):
                self._woken = True
                self.core.input_queue.put_nowait((WAKE, None))

    def take(self) -> None:
        """In the engine's own loop, between two steps. Never raises: what failed is in the status, and the old weights serve."""
        self._woken = False
        if not self.due or time.monotonic() < self._not_before:
            return
        try:
            policies.check(self.core, self.policy)
        except RefitError as error:
            self.problem = str(error)
            return
        self.due = False
        arguments = ("latest", self.registry, self.deadline_s, self.policy, secrets.token_hex(8), self.serve)
        try:
            replies = self.core.collective_rpc("refit_take", self.deadline_s + LATE_S, arguments)
            problems = [str(p) for reply in replies for p in _of(reply, "problems", [])]
            self.problem = "; ".join(dict.fromkeys(problems))
            if not problems:
                self._taken(_of(replies[0], "epoch", ""))
        except Exception as error:  # noqa: BLE001 - the engine's loop must go on whatever a take met
            self.problem = f"{type(error).__name__}: {error}"
        if self.problem:
            self._not_before = time.monotonic() + RETRY_S

    def _taken(self, epoch: str) -> None:
        self._done = epoch or self._done
        passed = [name for seen, name in self._seen.items() if seen != epoch]
        self.skipped = [*self.skipped, *passed][-SKIPPED_KEPT:]
        self._seen.clear()


def _of(reply: Any, field: str, default: Any) -> Any:
    return reply.get(field, default) if isinstance(reply, dict) else default


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError("no address of a registry", where="refit_follow, registry", got=repr(value)[:80], wanted="host:port")
    return value


def _seconds(name: str, value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= 1e6
    if not good:
        wanted = "seconds, more than 0 and at most 1e6"
        raise ConfigError("not a time", where=f"refit_follow, {name}", got=repr(value)[:80], wanted=wanted)
    return float(value)  # type: ignore[arg-type]
