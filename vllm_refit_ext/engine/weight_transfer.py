"""The seam to vLLM's weight-transfer calls: `init_weight_transfer_engine`, `start_weight_update`, `update_weights`,
`finish_weight_update`.

vLLM's worker has these methods and hands them to `worker.weight_transfer_engine`, which it makes from
`--weight-transfer-config`. A worker extension can't define a method of the same name, so `install` puts this module's
versions on the worker *object*, where every executor looks first. They answer what is ours and pass the rest to vLLM's own:

- `update_weights(update_info)` is ours if `update_info` has the key `wire`. It needs no start and no finish; inside a started
  session it works too.
- `start_weight_update` with another backend configured (nccl, ipc, ...) waits until that backend's first update: vLLM's start
  takes the weights away from the model, which an update of ours in between would not survive.
- `init_weight_transfer_engine(init_info)` is ours if `init_info` has the key `state_dict_info` or if no other backend is
  there; it prepares.

The same class is the backend `refit` (`--weight-transfer-config '{"backend": "refit"}'`), which works without the extension.
It finds its worker in the call that makes it, because vLLM hands a backend the model but neither the worker nor, in 0.24, the
configuration.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError
from vllm_refit_ext.core.messages import Message
from vllm_refit_ext.engine import guard, versions
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.receiver import agree
from vllm_refit_ext.receiver.engine import Engine
from vllm_refit_ext.wires.answers import ANSWER_TO, answer

OURS = "wire"
PREPARE = "state_dict_info"
CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class Handler(Protocol):
    """What stands behind the seam on one rank; `receiver.session.Receiver` is it. Its methods agree with the other ranks by
    themselves: they end alike on all of them."""

    view: Engine
    refused: RefitError | None
    """Why the last prepare failed."""

    def prepare(self, state_dict_info: Any) -> Any:
        """Prepare. Problems are in `refused`."""

    def update(self, update_info: Any, /) -> Any:
        """Receive, write and commit one refit, with `guard.commit` as part of it. Raises `RefitError`."""

    def status(self) -> Any:
        """State and version of this rank."""

    def abort(self) -> Any:
        """Give up what is prepared."""


def open_handler(view: Engine) -> Handler:
    """The receiver of a rank, made at its first call."""
    from vllm_refit_ext.receiver.session import Receiver

    return Receiver(view)


class RefitEngine:
    """A weight-transfer engine for both generations of vLLM, and the holder of one rank's seam.

    vLLM constructs it as a backend with the parameters of its generation (`versions`); `install` makes it from a worker.
    """

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, *parts: Any) -> None:
        found = versions.version()
        worker = _making_worker()
        if worker is None:
            do = "load the extension instead: --worker-extension-cls vllm_refit_ext.RefitWorkerExtension"
            raise ConfigError(
                "the backend `refit` was made outside of a vLLM worker",
                where="weight_transfer_config",
                got=f"vLLM {found}",
                do=do,
            )
        self.config = config
        self._bind(worker)

    @classmethod
    def of_worker(cls, worker: Any) -> RefitEngine:
        """The engine of a worker that was started without this backend."""
        versions.version()
        engine = cls.__new__(cls)
        engine.config = None
        engine._bind(worker)
        return engine

    def _bind(self, worker: Any) -> None:
        from vllm_refit_ext.engine.extension import missing_rpcs

        added = missing_rpcs(type(worker))
        self.worker = worker
        worker._refit_engine = self
        self._handler: Handler | None = None
        self.started = False
        self.postponed: Callable[[], None] | None = None
        self._committed: tuple[object, str] = (None, "")
        self.native = {name: getattr(type(worker), name).__get__(worker) for name in CALLS}
        for name in CALLS:
            setattr(worker, name, getattr(self, f"worker_{name}"))
        for name, rpc in added.items():
            setattr(worker, name, rpc.__get__(worker))

    @property
    def handler(self) -> Handler:
        """The receiver of this rank, with the model as it is now."""
        if self._handler is None:
            self._handler = open_handler(self.view)
        self._handler.view = self.view
        return self._handler

    # -- what the worker object answers with ---------------------------------------------------------------------------------

    @property
    def other(self) -> bool:
        """Whether another weight-transfer backend is configured."""
        return self.worker.weight_transfer_engine is not None and self.worker.weight_transfer_engine is not self

    def worker_init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare, or initialise the other backend."""
        if self.other and PREPARE not in init_info:
            self.native["init_weight_transfer_engine"](init_info)
            return
        self.init_transfer_engine(self.parse_init_info(init_info))

    def worker_start_weight_update(self, *arguments: Any, **named: Any) -> None:
        """Open a session. The other backend's start is kept until its first update."""
        start = self.native["start_weight_update"]
        inspect.signature(start).bind(*arguments, **named)
        if self.started or self.worker._weight_update_active:
            self._answer(
                _refusal("start_weight_update was called while a weight update is active", "call finish_weight_update first")
            )
            return
        self.started = True
        self.postponed = functools.partial(start, *arguments, **named) if self.other else None

    def worker_update_weights(self, update_info: Any) -> Any:
        """One refit if it is ours, else one update of the other backend. After ours it returns what `refit_status` would, which
        saves a caller a second call; None where a front end would show the replies of one data parallel replica only."""
        from vllm_refit_ext.engine.extension import RPCS

        if self.other and not self._is_ours(update_info):
            if self.postponed is not None:
                postponed, self.postponed = self.postponed, None
                self.started = False
                postponed()
            self.native["update_weights"](update_info)
            return None
        self.update_weights(update_info)
        alone = self.view.vllm_config.parallel_config.data_parallel_size == 1
        return RPCS["refit_status"](self.worker) if alone else None

    def worker_finish_weight_update(self) -> None:
        """Close the session, ours or the other backend's."""
        if self.worker._weight_update_active:
            self.native["finish_weight_update"]()
        elif not self.started:
            self._answer(
                _refusal(
                    "finish_weight_update was called without start_weight_update, or after an update that failed", "start again"
                )
            )
        self.started, self.postponed = False, None
        (to, policy), self._committed = self._committed, (None, "")
        if to is not None:
            # The engine process asked for this worker's mark after the commit; had it failed to reset the caches then, the update
            # would have raised, and nobody would finish it.
            caches = policy if guard.asked(self.worker) else ""
            self._reply(to, msgspec.structs.replace(self.handler.status(), caches=caches))

    # -- vLLM's weight-transfer engine ---------------------------------------------------------------------------------------

    def parse_init_info(self, init_info: Any) -> dict[str, Any]:
        """Check the arguments of prepare: `state_dict_info` and whatever else the receiver's `prepare` takes."""
        if not isinstance(init_info, dict) or PREPARE not in init_info:
            got = ", ".join(map(str, init_info)) if isinstance(init_info, dict) else type(init_info).__name__
            raise ConfigError(
                "init_info lacks the manifest", where="init_weight_transfer_engine", got=got, wanted=f"the key {PREPARE}"
            )
        return init_info

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare this rank, as the RPC `prepare_refit_info` does. Raises every rank's problems on the rank that speaks."""
        handler = self.handler
        init_info, to = _without_answer_to(init_info)
        try:
            inspect.signature(handler.prepare).bind(**init_info)
        except TypeError as error:
            wanted = ", ".join(inspect.signature(handler.prepare).parameters)
            self._answer(
                ConfigError(
                    f"init_info does not fit: {error}",
                    where="init_weight_transfer_engine",
                    got=", ".join(init_info),
                    wanted=wanted,
                )
            )
            return
        self._reply(to, handler.prepare(**init_info))
        if handler.refused is not None:
            agree.surface(self.view, handler.refused)

    def start_weight_update(self) -> None:
        """Nothing to do: a refit is one call."""

    def finish_weight_update(self) -> None:
        """Nothing to do: a refit is committed when `update_weights` returns."""

    def parse_update_info(self, update_info: Any) -> Any:
        """As it is: the receiver reads it, so that all ranks learn what one can't read."""
        return update_info

    def update_weights(self, update_info: Any) -> None:
        """One refit. Returns when every rank has committed; otherwise the rank that speaks raises what all ranks found."""
        update_info, to = _without_answer_to(update_info)
        try:
            with torch.no_grad():
                self.handler.update(update_info)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is said like the rest
            self.started = False
            known = agree.as_refit_error(error, "update_weights")
            if to is not None:
                self._reply(to, msgspec.structs.replace(self.handler.status(), problems=known.problems))
            agree.surface(self.view, known)
        else:
            self._committed = (to, str(update_info.get("caches", "reset")) if to is not None else "")

    def receive_weights(self, update_info: Any, load_weights: object = None) -> None:
        """One refit, by the name that vLLM's own worker methods use. `load_weights` is not needed: routes write to the
        parameters.
        """
        self.update_weights(update_info)

    def shutdown(self) -> None:
        """Give up what is prepared. Never raises: vLLM calls it while it stops."""
        if self._handler is not None:
            with contextlib.suppress(Exception):
                self._handler.abort()

    def set_weight_update_target(self, model: object, model_config: object) -> None:
        """Draft models are not supported, and vLLM asks `supports_draft_weight_update` first."""
        raise ConfigError("a refit of the draft model is not supported", where="start_draft_weight_update")

    def reset_weight_update_target(self) -> None:
        """There is one target."""

    # -- inside --------------------------------------------------------------------------------------------------------------

    @property
    def view(self) -> EngineRank:
        """This rank, with the model as it is now."""
        return EngineRank.of_worker(self.worker)

    def _is_ours(self, update_info: Any) -> bool:
        entries = update_info if isinstance(update_info, list) else [update_info]
        return any(isinstance(entry, dict) and OURS in entry for entry in entries)

    def _reply(self, to: object, reply: Message) -> None:
        """Leave this rank's reply where the caller waits for it, if it does."""
        answer(to, self.view.rank, self.view.world_size, reply)

    def _answer(self, error: RefitError) -> None:
        """Raise an error that every rank finds by itself, because it depends on the calls so far alone."""
        error.agreed = True  # type: ignore[attr-defined]
        agree.surface(self.view, error)


def install(worker: Any, handler: Handler | None = None) -> RefitEngine:
    """Route vLLM's weight-transfer calls on `worker` to its receiver, or to `handler`. Idempotent.

    Works with and without `--weight-transfer-config`; an engine of another backend stays `worker.weight_transfer_engine` and
    keeps its updates. Raises `ConfigError` for an unsupported vLLM.
    """
    engine = seam_of(worker)
    if engine is None:
        engine = RefitEngine.of_worker(worker)
        if worker.weight_transfer_engine is None:
            worker.weight_transfer_engine = engine
    if handler is not None:
        engine._handler = handler
    return engine


def seam_of(worker: Any) -> RefitEngine | None:
    """The seam that `install` or the backend put on this worker, or None."""
    engine = worker.__dict__.get("_refit_engine")
    return engine if isinstance(engine, RefitEngine) else None


def answer_early(worker_class: Any) -> None:
    """Let workers of `worker_class` that carry the extension answer vLLM's calls before anything was prepared.

    The extension's module calls this when it is imported; it has no other moment, as vLLM never runs an extension's
    constructor. Without it vLLM says that weight transfer is not configured, which sends the reader the wrong way.
    Idempotent.
    """
    for name in CALLS:
        native = getattr(worker_class, name)
        if hasattr(native, "_refit_native"):
            continue

        @functools.wraps(native)
        def first(self: Any, *arguments: Any, _native: Any = native, _name: str = name, **named: Any) -> Any:
            if self.weight_transfer_engine is None and hasattr(type(self), "refit_status"):
                install(self)
                return getattr(self, _name)(*arguments, **named)
            return _native(self, *arguments, **named)

        first._refit_native = native  # type: ignore[attr-defined]
        setattr(worker_class, name, first)


def _without_answer_to(message: Any) -> tuple[Any, object]:
    """A call's argument without the address that its replies go to, and that address; None where there is none."""
    if not isinstance(message, dict) or ANSWER_TO not in message:
        return message, None
    return {key: value for key, value in message.items() if key != ANSWER_TO}, message[ANSWER_TO]


def _refusal(what: str, do: str) -> SessionError:
    return SessionError(what, where="weight transfer", do=do)


def _making_worker() -> Any:
    """The worker whose `load_model` is making this backend, found among the callers; None elsewhere."""
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if (
            hasattr(candidate, "model_runner")
            and hasattr(candidate, "weight_transfer_engine")
            and hasattr(candidate, "vllm_config")
        ):
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    return None
