"""The worker extension: the RPCs that `collective_rpc` reaches inside a vLLM worker.

vLLM adds this class to the bases of its worker and never runs its constructor, so all state is made on first use and kept on the
worker under one name. `update_weights` is not here: vLLM's worker has a method of that name, which reaches this project through
the weight-transfer engine that `prepare_refit_info` installs.

No RPC here raises for bad input. Under tensor parallelism vLLM's executor stops reading at the first rank that raises and takes
the other ranks' answers for those to the next call. So problems are returned inside the reply, from every rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
from vllm.v1.worker.gpu_worker import Worker

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.messages import DEADLINE_S, Message, PrepareReply, Status, TakeReply, VerifyReply, to_rpc
from vllm_refit_ext.engine import weight_transfer
from vllm_refit_ext.receiver import agree
from vllm_refit_ext.receiver.session import Receiver
from vllm_refit_ext.receiver.taker import Taker

RpcMethod = Callable[..., dict[str, Any]]


def rpc(reply: Callable[..., Message]) -> Callable[[Callable[..., Message]], RpcMethod]:
    """Make a method answer with plain data, and with `reply(rank=..., problems=...)` where its arguments or its work fail."""

    def decorate(method: Callable[..., Message]) -> RpcMethod:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            rank = int(getattr(self, "rank", 0))
            try:
                signature.bind(self, *args, **kwargs)
            except TypeError as error:
                wanted = f"{method.__name__}{str(signature).replace('(self, ', '(').replace('(self)', '()')}".partition(" ->")[0]
                return to_rpc(reply(rank=rank, problems=[Problem(f"wrong arguments: {error}", method.__name__, wanted=wanted)]))
            try:
                return to_rpc(method(self, *args, **kwargs))
            except Exception as error:  # noqa: BLE001 - every rank answers, whatever it met
                return to_rpc(reply(rank=rank, problems=agree.as_refit_error(error, method.__name__).problems))

        return call

    return decorate


class RefitWorkerExtension:
    """Pass as `--worker-extension-cls vllm_refit_ext.RefitWorkerExtension`. See `docs/wires.md` for the messages."""

    @rpc(PrepareReply)
    def prepare_refit_info(self, state_dict_info: Any, fp8_config: Any = None, keep: Any = None) -> Message:
        """Learn what will be sent, find where it goes on this rank, build and prove the plan.

        state_dict_info: name -> (shape, dtype), or the packed form of `core.manifest.offer`. fp8_config: None or
        {"prequantize": bool}. keep: names or globs of engine parameters or checkpoint tensors that stay as they are.
        Returns a `PrepareReply` as plain data; `problems` is empty when the rank is ready.
        """
        return receiver_of(self).prepare(state_dict_info, fp8_config, keep)

    @rpc(Status)
    def refit_status(self) -> Message:
        """State, version and last report of this rank, as a `Status`."""
        taker = taker_of(self)
        return msgspec.structs.replace(receiver_of(self).status(), epoch=taker.epoch, replica=taker.replica)

    @rpc(TakeReply)
    def refit_take(
        self,
        version: Any = "latest",
        registry: Any = "",
        deadline_s: Any = DEADLINE_S,
        caches: Any = "reset",
        session: Any = "",
        serve: Any = "",
    ) -> Message:
        """Take a published version: the newest, or one by name. registry: host:port, empty for the last one. deadline_s: for all
        of it. caches: see `core.messages.CachePolicy`. session: a name for this attempt, the same on all ranks. serve: the wire
        by which other engines may copy what this one has of it, or empty. Returns a `TakeReply`.
        """
        return taker_of(self).take(version, registry, deadline_s, caches, str(session), serve)

    @rpc(Status)
    def refit_follow(
        self,
        registry: Any = "",
        interval_s: Any = 1.0,
        caches: Any = "reset",
        deadline_s: Any = DEADLINE_S,
        serve: Any = "",
    ) -> Message:
        """Take what is new in a registry from now on, between two steps; an empty registry ends it. The engine's process does
        that (`engine.follow`), and says so in `following` of the `Status` that this returns.
        """
        return receiver_of(self).status()

    @rpc(Status)
    def refit_abort(self) -> Message:
        """Give up what is prepared and release the wire. Idempotent; returns a `Status`."""
        return receiver_of(self).abort()

    @rpc(VerifyReply)
    def refit_verify(self, digests: Any = None) -> Message:
        """Compare this rank's digests with the sender's: rank as text -> tensor -> hexadecimal. Returns a `VerifyReply`."""
        return receiver_of(self).verify(digests)


RPCS: dict[str, RpcMethod] = {name: rpc for name, rpc in vars(RefitWorkerExtension).items() if not name.startswith("_")}
"""By name."""


def missing_rpcs(worker: type) -> dict[str, RpcMethod]:
    """What the backend `refit` puts on a worker of this class: all RPCs, or none where the extension is among its bases.

    Raises ConfigError where a user's own extension has methods of the same names.
    """
    if issubclass(worker, RefitWorkerExtension):
        return {}
    taken = {name: base.__qualname__ for name in RPCS for base in worker.__mro__ if name in vars(base)}
    if taken:
        raise ConfigError(
            "the worker's own extension has methods with the names of RPCs of this project",
            where="worker_extension_cls",
            got=", ".join(f"{base}.{name}" for name, base in taken.items()),
            wanted="other names",
            do="rename them, or derive that class from vllm_refit_ext.RefitWorkerExtension and call super() in them",
        )
    return RPCS


def receiver_of(worker: Any) -> Receiver:
    """The receiver of a vLLM worker, made on first use, with vLLM's own weight-transfer calls directed to it."""
    receiver: Any = weight_transfer.install(worker).handler
    return receiver  # type: ignore[no-any-return]


def taker_of(worker: Any) -> Taker:
    """What a vLLM worker knows of the versions that it takes, made on first use."""
    receiver = receiver_of(worker)
    taker = worker.__dict__.get("_refit_taker")
    if not isinstance(taker, Taker):
        taker = worker._refit_taker = Taker(receiver)
    return taker


weight_transfer.answer_early(Worker)
