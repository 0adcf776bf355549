"""The engine process's side of a refit: torn engines refuse, caches are reset, replies stay in step.

The plugin wraps two methods of vLLM's `EngineCore`, in whatever process it lives (its own, or the caller's with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`):

- `collective_rpc`: after every call that may be a refit the workers are asked for their marks (`guard.report`). If one is
  torn, all running and waiting requests are ended with an error, and the engine stays up. If a refit was committed, the cache
  policy is applied. `refit_status` replies get the result.
- `add_request`: while torn, a request is answered at once with an error that says why and what to do.

vLLM has no field for such a text in 0.24 and 0.32, so it travels as the `stop_reason` of an output with finish reason
"error", behind `MARK`; the front's half (`front`) turns it into an exception. A front without the plugin shows vLLM's own
"Internal server error".

Limits. Only calls through this engine's `collective_rpc` are seen. With data parallel replicas each engine process guards its
own workers; a torn replica refuses the requests that are routed to it. When a caller's own timeout ends a call, the workers
go on with it: the engine waits `REALIGN_S` for them and, if they do not answer, refuses generation until a later refit call
finds them in order.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from typing import Any

import msgspec

from vllm_refit_ext.core.errors import ConfigError, RefitError
from vllm_refit_ext.receiver import caches, guard

MARK = "refit-torn: "
REALIGN_S = 60.0
WATCHED = (
    "prepare_refit_info",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
)
NEEDED = ("collective_rpc", "add_request", "reset_prefix_cache", "reset_encoder_cache")


class CoreGuard:
    """What one engine process knows about its workers' weights."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.torn = ""
        self.commits = 0
        self.committed = False
        self.caches = ""
        self.pending: dict[int, list[Any]] = defaultdict(list)

    def call(
        self, native: Any, method: Any, timeout: float | None, arguments: tuple[Any, ...], named: dict[str, Any] | None
    ) -> Any:
        """One watched `collective_rpc`."""
        policy = None
        if method == "update_weights":
            given = arguments[0] if arguments else (named or {}).get("update_info")
            policy = caches.policy_of(given)
            if policy is not None and not self.torn:
                caches.check(self.core, policy)
        try:
            replies = native(self.core, method, timeout, arguments, named)
        except BaseException as error:
            self.learn(realign=True, blame=f"{method} failed: {error}")
            raise
        self.learn()
        if self.committed:
            self.settle(policy or caches.POLICIES[0])
        if method == "refit_status":
            for reply in replies:
                if isinstance(reply, dict):
                    reply["caches"] = self.caches
        return replies

    def learn(self, realign: bool = False, blame: str = "") -> None:
        """Ask every worker whether it is torn, and act on the answer."""
        try:
            marks = ask_workers(self.core.model_executor, realign)
            torn = next((mark.torn for mark in marks if mark.torn), "")
        except Exception as error:  # noqa: BLE001
            # a worker that can't say what it holds must not generate
            marks = []
            torn = f"the workers do not say what weights they hold ({error}){'; ' + blame if blame else ''}"
        fresh = bool(torn) and not self.torn
        self.torn = torn
        if fresh:
            self.end_requests()
        commits = min((mark.commits for mark in marks), default=self.commits)
        self.committed = commits > self.commits
        self.commits = commits

    def settle(self, policy: str) -> None:
        """After a commit: reset what older weights computed. Raises when that failed."""
        try:
            self.caches = caches.reset(self.core, policy)
        except RefitError as error:
            self.caches = f"failed: {error}"
            raise

    def end_requests(self) -> None:
        """End every request of the scheduler with an error."""
        from vllm.v1.request import RequestStatus

        ended = self.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
        by_client: dict[int, list[str]] = defaultdict(list)
        for request in ended:
            # 0.24 returns pairs, later versions the requests
            name, client = request if isinstance(request, tuple) else (request.request_id, request.client_index)
            by_client[client].append(name)
        for client, names in by_client.items():
            self.refuse(names, client)

    def refuse(self, names: list[str], client: int) -> None:
        """Answer these requests with an error that carries the reason."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        text = f"{MARK}{self.torn}"
        outputs = [EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=text) for name in names]
        if hasattr(self.core, "output_queue"):
            self.core.output_queue.put_nowait((client, EngineCoreOutputs(outputs=outputs, finished_requests=set(names))))
            return
        # in the caller's own process nothing reads a queue: the next step hands them over
        self.pending[client] += outputs
        if "_refit_step" not in self.core.__dict__:
            self.core._refit_step = self.core.step_fn
            self.core.step_fn = self.step

    def step(self) -> tuple[dict[int, Any], bool]:
        """In place of the engine's step while refusals wait."""
        from vllm.v1.engine import EngineCoreOutputs

        self.core.step_fn = self.core.__dict__.pop("_refit_step")
        outputs = {client: EngineCoreOutputs(outputs=list(each)) for client, each in self.pending.items()}
        self.pending.clear()
        return outputs, False


def guard_of(core: Any) -> CoreGuard:
    """The guard of this engine; made on first use."""
    found = core.__dict__.get("_refit_guard")
    if not isinstance(found, CoreGuard):
        found = core._refit_guard = CoreGuard(core)
    return found


def ask_workers(executor: Any, realign: bool) -> list[guard.WorkerMark]:
    """Every worker's mark.

    After a failed call, `realign`: vLLM's multiprocess executor stops reading at the first failure and would take what is
    left for the answers to the next call. So the question carries a nonce, and older replies are dropped until it comes back.
    """
    queues = getattr(executor, "response_mqs", None)
    if not realign or not queues or getattr(executor, "rpc_broadcast_mq", None) is None:
        return msgspec.convert(executor.collective_rpc(guard.report), list[guard.WorkerMark])
    import cloudpickle

    nonce = os.urandom(8).hex()
    executor.rpc_broadcast_mq.enqueue((cloudpickle.dumps(guard.report), (nonce,), {}, None))
    deadline = time.monotonic() + REALIGN_S
    marks = []
    for queue in queues:
        while True:
            _, reply = queue.dequeue(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(reply, dict) and reply.pop("nonce", "") == nonce:
                marks.append(msgspec.convert(reply, guard.WorkerMark))
                break
    return marks


def wrap(module: Any) -> None:
    """Wrap `EngineCore` of vLLM's `v1.engine.core` module. Idempotent. Raises `ConfigError` if it is not the class that we
    know.
    """
    core_class = module.EngineCore
    if hasattr(core_class, "_refit_wrapped"):
        return
    missing = [name for name in NEEDED if not callable(getattr(core_class, name, None))]
    if missing:
        raise ConfigError("vLLM's engine lacks methods that guard a refit", where="EngineCore", got="no " + ", ".join(missing))
    native_rpc, native_add = core_class.collective_rpc, core_class.add_request

    @functools.wraps(native_rpc)
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(method, str) and not method.startswith("refit_") and method not in WATCHED:
            return native_rpc(self, method, timeout, args, kwargs)
        return guard_of(self).call(native_rpc, method, timeout, args, kwargs)

    @functools.wraps(native_add)
    def add_request(self: Any, request: Any, request_wave: int = 0) -> Any:
        state = guard_of(self)
        if state.torn:
            return state.refuse([request.request_id], request.client_index)
        return native_add(self, request, request_wave)

    core_class.collective_rpc = collective_rpc
    core_class.add_request = add_request
    core_class._refit_wrapped = True
