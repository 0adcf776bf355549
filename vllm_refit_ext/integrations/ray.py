"""Driving an engine that lives in a Ray actor: `RayClient(actor)`. Needs the extra `ray`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_refit_ext.client import EngineClient, FunctionClient


class RayClient(EngineClient):
    """An engine in an actor whose method `collective_rpc(method, timeout, args)` is that of `vllm.LLM` or `AsyncLLM`.

    Several actors are data parallel replicas of one engine: all are called at once, and one that fails fails the call. Engines
    that commit each for itself take a client each: `RefitSender(source, [RayClient(a) for a in actors])`.
    """

    def __init__(self, actors: Any) -> None:
        """actors: a handle, or several. They need not be up yet: a call waits for them, until its deadline."""
        self.actors = list(actors) if isinstance(actors, Sequence) else [actors]
        self._client = FunctionClient(self._replies)

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        return self._client.call(method, args, timeout_s)

    def _replies(self, method: str, args: tuple[Any, ...], timeout_s: float | None) -> list[Any]:
        import ray

        calls = [actor.collective_rpc.remote(method, timeout=timeout_s, args=args) for actor in self.actors]
        return [reply for replies in ray.get(calls, timeout=timeout_s) for reply in replies or []]
