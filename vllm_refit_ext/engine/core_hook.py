"""The engine process's side of a refit: torn engines refuse, caches are reset, replies stay in step.

The plugin wraps methods of vLLM's `EngineCore`, in whatever process it lives (its own, or the caller's with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`):

- `collective_rpc`: after every call that may be a refit, however it ended, the workers are asked for their marks
  (`guard.report`). If one is torn, all running and waiting requests are ended with an error, and the engine stays up. If a
  refit was committed since they were last asked, its cache policy is applied, once. Replies that are a status get the result.
- `preprocess_add_request` and `add_request`: after a refit that let requests go on, a new one gets a salt that keeps it from
  their blocks (`caches`). While torn, a request is answered at once with an error that says why and what to do.
- `_handle_client_request`: the message that wakes an idle engine which follows a registry (`follow`) is ours.
- `step`, `step_with_batch_queue`: takes what the engine follows, hands those answers over, and runs nothing while a worker can't
  be asked what it holds.

vLLM has no field for such a text in 0.24 and 0.32, so it is sent as the `stop_reason` of an output with finish reason
"error", behind `MARK`; the hook of the front end (`frontend`) turns it into an exception. A front end without the
plugin shows vLLM's own "Internal server error".

Limits. Only calls through this engine's `collective_rpc` are seen. With data parallel replicas each engine process guards its
own workers; a torn replica refuses the requests that are routed to it. When a caller's own timeout ends a call, the workers
go on with it: the engine waits `REALIGN_S` for them and, if they do not answer, refuses generation and runs nothing until a
later refit call finds them in order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import defaultdict
from typing import Any

import msgspec

from vllm_refit_ext.core.errors import DeadlineError, RefitError, SessionError
from vllm_refit_ext.engine import caches, guard, needed
from vllm_refit_ext.engine.follow import WAKE, Follower

MARK = "refit-torn: "
REALIGN_S = 60.0
"""Seconds that workers have to say what they hold, when a call was ended before they answered it."""
ASTRAY_STEP_S = 0.05
WATCHED = (
    "prepare_refit_info",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reload_weights",
)
PARAMETERS = {
    "update_weights": ("update_info",),
    "refit_take": ("version", "registry", "deadline_s", "caches", "session", "serve"),
    "refit_follow": ("registry", "interval_s", "caches", "deadline_s", "serve"),
}
"""Of the calls whose arguments are read here; they may come by position."""
STEPS = ("step", "step_with_batch_queue")


class CoreGuard:
    """What one engine process knows about its workers' weights."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.torn = ""
        self.commits: list[int] = []
        self.refit = caches.Refit()
        self.caches = ""
        self.astray = False
        self.follower: Follower | None = None
        self.pending: dict[int, list[Any]] = defaultdict(list)

    def call(
        self, native: Any, method: Any, timeout: float | None, arguments: tuple[Any, ...], named: dict[str, Any] | None
    ) -> Any:
        """One watched `collective_rpc`."""
        if self.astray:
            self.learn()
            if self.astray:
                do = "see whether a worker is stopped or dead; call again when it goes on"
                raise DeadlineError("this engine's workers can't be called", where=str(method), got=self.torn, do=do)
        named_all = dict(zip(PARAMETERS.get(str(method), ()), arguments, strict=False)) | (named or {})
        if method == "refit_follow":
            self.follow(named_all)
        if method in ("update_weights", "refit_take"):
            take = method == "refit_take"
            refit = caches.refit_of_take(**named_all) if take else caches.refit_of(named_all.get("update_info"))
            if refit is not None:
                if not self.torn:
                    caches.check(self.core, refit.policy)
                self.refit = refit
        try:
            replies = native(self.core, method, timeout, arguments, named)
        except BaseException as error:
            with contextlib.suppress(RefitError):  # the status says it; the caller gets what ended the call
                self.learn(realign=True, blame=f"{method} failed: {error}")
            raise
        self.learn()
        if method in ("update_weights", "refit_status", "refit_follow"):
            for reply in replies:
                if isinstance(reply, dict):
                    reply["caches"] = self.caches
                    if self.follower is not None:
                        reply |= {"following": self.follower.said(), "skipped": self.follower.skipped}
        return replies

    def follow(self, arguments: dict[str, Any]) -> None:
        """Follow a registry from now on, or none. arguments: of `refit_follow`. Raises `ConfigError`."""
        known = {name: value for name, value in arguments.items() if name in PARAMETERS["refit_follow"]}
        follower = Follower(self.core, **known) if known.get("registry") else None
        if self.follower is not None:
            self.follower.stop()
        self.follower = follower

    def learn(self, realign: bool = False, blame: str = "") -> None:
        """Ask every worker for its mark, and act on the answers: end requests where one is torn, reset caches after a commit.

        Raises `SessionError` when caches of older weights could not be reset.
        """
        try:
            marks = ask_workers(self.core.model_executor, realign or self.astray)
            torn, self.astray = next((mark.torn for mark in marks if mark.torn), ""), False
        except Exception as error:  # noqa: BLE001
            # a worker that can't say what it holds must not generate
            marks, self.astray = [], True
            torn = f"the workers do not say what weights they hold ({error}){'; ' + blame if blame else ''}"
        fresh = bool(torn) and not self.torn
        self.torn = torn
        if fresh:
            self.end_requests()
        commits = [mark.commits for mark in marks]
        if marks and commits != self.commits:
            committed, self.commits = any(commits), commits
            if committed:
                self.settle()

    def settle(self) -> None:
        """After a commit: reset what older weights computed. Raises `SessionError` when that failed."""
        try:
            self.caches = caches.reset(self.core, self.refit.policy, f"{self.refit.session} {self.commits}")
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

    def step(self, native: Any) -> tuple[dict[int, Any], bool]:
        """In place of the engine's step: hand refusals over, and run nothing while the workers' replies are out of order."""
        from vllm.v1.engine import EngineCoreOutputs

        if self.follower is not None:
            self.follower.take()
        if not self.pending:
            if not self.astray:
                return native(self.core)  # type: ignore[no-any-return]
            time.sleep(ASTRAY_STEP_S)  # the engine's loop asks for a step at once again
            return {}, False
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
    """Every worker's mark, at most `REALIGN_S` seconds from now. Raises what kept a worker from answering, with its rank.

    After a failed call, `realign`: vLLM's multiprocess executor stops reading at the first failure and would take what is
    left for the answers to the next call. So the question carries a nonce, and older replies are dropped until it comes back.
    """
    nonce = os.urandom(8).hex()
    queues = getattr(executor, "response_mqs", None)
    if not realign or not queues or getattr(executor, "rpc_broadcast_mq", None) is None:
        replies = executor.collective_rpc(guard.report, timeout=REALIGN_S, args=(nonce,))
        if all(isinstance(reply, dict) and reply.get("nonce") == nonce for reply in replies):
            return msgspec.convert(replies, list[guard.WorkerMark])
        if not queues:
            raise SessionError("the workers' replies are out of order", where="collective_rpc")
    import cloudpickle

    executor.rpc_broadcast_mq.enqueue((cloudpickle.dumps(guard.report), (nonce,), {}, None))
    deadline = time.monotonic() + REALIGN_S
    marks = []
    for rank, queue in enumerate(queues):
        while True:
            try:
                _, reply = queue.dequeue(timeout=max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                do = "see whether that worker is stopped or dead"
                raise DeadlineError(f"no answer within {REALIGN_S:g} s", where=f"rank {rank}", do=do) from None
            if isinstance(reply, dict) and reply.get("nonce") == nonce:
                marks.append(msgspec.convert(reply, guard.WorkerMark))
                break
    return marks


def wrap(module: Any) -> None:
    """Wrap `EngineCore` of vLLM's `v1.engine.core` module. Idempotent. Raises `ConfigError` if it is not the class that we
    know; every prepare does so too (`needed`).
    """
    core_class = module.EngineCore
    if hasattr(core_class, "_refit_wrapped"):
        return
    needed.require(needed.CORE, module)
    native_rpc, native_add, native_make = core_class.collective_rpc, core_class.add_request, core_class.preprocess_add_request

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
        caches.resalt(self, request)  # it may have been made before the last commit
        return native_add(self, request, request_wave)

    @functools.wraps(native_make)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        request.cache_salt = caches.salted(self, request.cache_salt)
        return native_make(self, request)

    native_handle = module.EngineCoreProc._handle_client_request

    @functools.wraps(native_handle)
    def handle_client_request(self: Any, request_type: Any, request: Any) -> Any:
        if request_type != WAKE:
            return native_handle(self, request_type, request)
        if (follower := guard_of(self).follower) is not None:
            follower.take()
        return None

    module.EngineCoreProc._handle_client_request = handle_client_request
    for name in STEPS:
        setattr(core_class, name, _watched(getattr(core_class, name)))
    core_class.preprocess_add_request = preprocess_add_request
    core_class.collective_rpc = collective_rpc
    core_class.add_request = add_request
    core_class._refit_wrapped = True


def _watched(native: Any) -> Any:
    @functools.wraps(native)
    def step(self: Any) -> Any:
        state = self.__dict__.get("_refit_guard")
        return native(self) if state is None else state.step(native)

    return step
