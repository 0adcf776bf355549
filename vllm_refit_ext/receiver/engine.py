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

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, SessionError, TornError
from vllm_refit_ext.receiver import agree, guard, versions
from vllm_refit_ext.receiver.worker_view import WorkerView

OURS = "wire"
PREPARE = "state_dict_info"
OUTCOME_DEADLINE_S = 300.0
CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class Handler(Protocol):
    """What stands behind the seam on one rank; `receiver.session.Receiver` is it."""

    def update(self, update_info: dict[str, Any], /) -> Any:
        """Receive, write and commit one refit. Raises `RefitError`."""

    def status(self) -> Any:
        """State and version of this rank."""


class Unprepared:
    """Stands in until something was prepared: every refit is refused by name."""

    def update(self, update_info: dict[str, Any], /) -> Any:
        """Refuse."""
        raise SessionError(
            "update_weights was called before prepare_refit_info", where="update_weights", do="call prepare_refit_info first"
        )

    def status(self) -> Any:
        """Nothing is prepared."""
        return {"state": "unprepared"}


def open_handler(view: WorkerView) -> Any:
    """The receiver of this rank, for the backend `refit`; the extension brings its own."""
    from vllm_refit_ext.receiver.session import Receiver

    return Receiver(view)


class RefitEngine:
    """A weight-transfer engine for both generations of vLLM, and the holder of one rank's seam.

    vLLM constructs it as a backend with the parameters of its generation (`versions.adapter`); `install` makes it from a worker.
    """

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, *parts: Any) -> None:
        found = versions.adapter()
        worker = _making_worker()
        if worker is None:
            do = "load the extension instead: --worker-extension-cls vllm_refit_ext.RefitWorkerExtension"
            raise ConfigError(
                "the backend `refit` was made outside of a vLLM worker",
                where="weight_transfer_config",
                got=f"vLLM {found.version}",
                do=do,
            )
        self.config = config
        self._bind(worker, Unprepared())

    @classmethod
    def of_worker(cls, worker: Any, handler: Handler) -> RefitEngine:
        """The engine of a worker that was started without this backend."""
        versions.adapter()
        engine = cls.__new__(cls)
        engine.config = None
        engine._bind(worker, handler)
        return engine

    def _bind(self, worker: Any, handler: Handler) -> None:
        self.worker = worker
        worker._refit_engine = self
        self.handler = handler
        self.started = False
        self.postponed: Callable[[], None] | None = None
        self.native = {name: getattr(type(worker), name).__get__(worker) for name in CALLS}
        for name in CALLS:
            setattr(worker, name, getattr(self, f"worker_{name}"))

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

    def worker_update_weights(self, update_info: Any) -> None:
        """One refit if it is ours, else one update of the other backend."""
        if self.other and not self._is_ours(update_info):
            if self.postponed is not None:
                postponed, self.postponed = self.postponed, None
                self.started = False
                postponed()
            self.native["update_weights"](update_info)
            return
        self.update_weights(update_info)

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

        def prepare() -> None:
            if not hasattr(self.handler, "prepare"):
                self.handler = open_handler(self.view)
            prepare = self.handler.prepare  # type: ignore[attr-defined]
            try:
                inspect.signature(prepare).bind(**init_info)
            except TypeError as error:
                wanted = ", ".join(inspect.signature(prepare).parameters)
                raise ConfigError(
                    f"init_info does not fit: {error}",
                    where="init_weight_transfer_engine",
                    got=", ".join(init_info),
                    wanted=wanted,
                ) from None
            reply = prepare(**init_info)
            if problems := getattr(reply, "problems", None):
                raise ConfigError.of(problems)

        self._together("prepare", prepare, OUTCOME_DEADLINE_S)

    def start_weight_update(self) -> None:
        """Nothing to do: a refit is one call."""

    def finish_weight_update(self) -> None:
        """Nothing to do: a refit is committed when `update_weights` returns."""

    def parse_update_info(self, update_info: Any) -> dict[str, Any]:
        """This rank's part of `update_info`: the dict itself, or its entry in a list by global worker rank (as 0.32 allows)."""
        if isinstance(update_info, list):
            index = self.view.replica * self.view.world_size + self.view.rank
            if index >= len(update_info):
                raise ConfigError(
                    "update_info has too few entries",
                    where="update_weights",
                    got=len(update_info),
                    wanted=f"at least {index + 1}",
                )
            update_info = update_info[index]
        if not isinstance(update_info, dict) or OURS not in update_info:
            got = ", ".join(map(str, update_info)) if isinstance(update_info, dict) else type(update_info).__name__
            raise ConfigError(
                "update_info is not a refit", where="update_weights", got=got, wanted=f"the key {OURS!r}", do="see docs/wire.md"
            )
        return update_info

    def update_weights(self, update_info: Any) -> None:
        """One refit. Returns when every rank has committed; otherwise the rank that speaks raises what all ranks found."""

        def update() -> None:
            with torch.no_grad():
                self.handler.update(self.parse_update_info(update_info))

        if self._together("update", update, _deadline(update_info)):
            guard.clear(self.worker)
            guard.note_commit(self.worker)

    def receive_weights(self, update_info: Any, load_weights: object = None) -> None:
        """One refit, by the name that vLLM's own worker methods use. `load_weights` is not needed: routes write to the
        parameters.
        """
        self.update_weights(update_info)

    def shutdown(self) -> None:
        """Give up what is prepared. Never raises: vLLM calls it while it stops."""
        if hasattr(self.handler, "abort") and not isinstance(self.handler, Unprepared):
            try:
                self.handler.abort()
            except RefitError:
                return

    def set_weight_update_target(self, model: object, model_config: object) -> None:
        """Draft models are not supported, and vLLM asks `supports_draft_weight_update` first."""
        raise ConfigError("a refit of the draft model is not supported", where="start_draft_weight_update")

    def reset_weight_update_target(self) -> None:
        """There is one target."""

    # -- inside --------------------------------------------------------------------------------------------------------------

    @property
    def view(self) -> WorkerView:
        """This rank, with the model as it is now."""
        return WorkerView.of_worker(self.worker)

    def _is_ours(self, update_info: Any) -> bool:
        entries = update_info if isinstance(update_info, list) else [update_info]
        return any(isinstance(entry, dict) and OURS in entry for entry in entries)

    def _together(self, phase: str, work: Callable[[], None], deadline_s: float) -> bool:
        """Run `work` on this rank and agree on how it ended everywhere. True if every rank succeeded."""
        view = self.view
        agree.begin(view)
        error: RefitError | None = None
        try:
            work()
        except RefitError as refused:
            error = refused
        except Exception as broken:  # noqa: BLE001
            # every rank must learn of it, also of what nobody foresaw
            error = RefitError.of(
                [Problem(f"{type(broken).__name__}: {broken}", phase, do="this is a defect: report it with the engine's log")]
            )
            error.__cause__ = broken
        # also after an error that the ranks agreed on before: one of them may have failed elsewhere and wait here
        try:
            agree.agree(view, f"{phase} outcome", None, error, deadline_s)
        except RefitError as agreed:
            agreed.__cause__ = error
            error = agreed
        if error is None:
            return True
        self.started = False
        if isinstance(error, TornError):
            guard.mark_torn(self.worker, str(error))
        agree.surface(view, error)
        return False

    def _answer(self, error: RefitError) -> None:
        """Raise an error that every rank finds by itself, because it depends on the calls so far alone."""
        error.agreed = True  # type: ignore[attr-defined]
        agree.surface(self.view, error)


def install(worker: Any, handler: Handler) -> RefitEngine:
    """Route vLLM's weight-transfer calls on `worker` to `handler`; call again to replace the handler.

    Works with and without `--weight-transfer-config`; an engine of another backend stays `worker.weight_transfer_engine` and
    keeps its updates. Raises `ConfigError` for an unsupported vLLM.
    """
    engine = seam_of(worker)
    if engine is not None:
        engine.handler = handler
        return engine
    engine = RefitEngine.of_worker(worker, handler)
    if worker.weight_transfer_engine is None:
        worker.weight_transfer_engine = engine
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
                install(self, Unprepared())
                return getattr(self, _name)(*arguments, **named)
            return _native(self, *arguments, **named)

        first._refit_native = native  # type: ignore[attr-defined]
        setattr(worker_class, name, first)


def _refusal(what: str, do: str) -> SessionError:
    return SessionError(what, where="weight transfer", do=do)


def _deadline(update_info: Any) -> float:
    """Seconds that the ranks may be apart at the end of an update; the sender's own deadline if it gave one."""
    given = update_info.get("deadline_s") if isinstance(update_info, dict) else None
    return float(given) if isinstance(given, int | float) and given > 0 else OUTCOME_DEADLINE_S


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
