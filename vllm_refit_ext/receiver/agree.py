"""All ranks of one engine agree: everyone's value, or the same named error on every rank, before a deadline.

The exchange goes through the key-value store that torch.distributed already keeps for the process group, not through a
collective. A collective that one rank never joins can't be abandoned: its group is unusable afterwards. Keys can: each round
has its own, with the name of its attempt in it, so a round that failed leaves nothing that a later one could trip over. An
attempt's keys are deleted in the next one, once every rank has come to it.

One round: every rank writes its value or its problems, waits for the others', then tries to set the verdict. Setting is atomic
in the store and the first to set it decides for all: "go" by a rank that has seen every answer in time, "stop" with the list
of the missing by a rank whose deadline passed. So a rank that arrives late learns that it was late, and no rank commits what
another gave up. The one gap left: if the process that hosts the store (rank 0) is itself stopped or dead, the others
can't reach it, and each raises `DeadlineError` for itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError, TornError, class_of
from vllm_refit_ext.core.errors import as_refit_error as named
from vllm_refit_ext.receiver.engine import Engine
from vllm_refit_ext.wires.rendezvous import run_until

T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True):
    """What one rank writes: `value`, or `kind` (an error class of `core.errors`) with its `problems`.

    `known`: the problems come from an earlier agreement, so they name their ranks already. `after_s`: seconds from the begin of
    the call to this answer.
    """

    value: bytes | None = None
    kind: str = ""
    problems: list[Problem] = []
    known: bool = False
    after_s: float = 0.0


class Verdict(msgspec.Struct, frozen=True):
    """How a round ended: `go`, or rank `by` gave up after `waited_s` seconds while `missing` had not answered."""

    go: bool
    by: int = 0
    missing: list[int] = []
    waited_s: float = 0.0


class Exchange:
    """One rank's connection to the store, with a deadline on every call.

    A store call can't be interrupted, so it runs in a thread that is left behind when the deadline passes; the connection
    is dropped with it and the next round opens a new one.
    """

    def __init__(self, view: Engine, store: Any = None) -> None:
        self.view = view
        self.given = store
        self.store: Any = None
        self.attempt, self.tries = "", 0
        self.uses: dict[str, int] = {}
        self.begun = time.monotonic()
        self.mine: list[str] = []
        self.old: list[str] = []

    def begin(self, attempt: str) -> None:
        """Forget which phases the last RPC used. attempt: see `begin`."""
        self.tries = self.tries + 1 if attempt == self.attempt else 0
        self.attempt, self.begun = attempt, time.monotonic()
        self.uses.clear()
        self.old += self.mine
        self.mine = []

    def key(self, phase: str) -> str:
        """The store key of this use of `phase`; the same on every rank, and used by no other attempt."""
        use = self.uses[phase] = self.uses.get(phase, 0) + 1
        return f"refit/{self.view.replica}/{self.view.serial}/{self.attempt}/{self.tries}/{phase}/{use}"

    def spend(self, store: Any, go: bool, keys: list[str]) -> None:
        """Note keys that this rank has to delete, and delete those of earlier attempts after a round that all ranks came to."""
        self.mine += keys
        while go and self.old:
            store.delete_key(self.old.pop())

    def call(self, what: Callable[[Any], T], deadline: float) -> T:
        """`what(store)`, at most until `deadline` (time.monotonic seconds)."""

        def work() -> T:
            if self.store is None:
                self.store = (self.given or _default_store()).clone()
            return what(self.store)

        try:
            return run_until(deadline, "the store that rank 0 hosts did not answer", f"rank {self.view.rank}", work)
        except Exception:
            self.store = None
            raise


def begin(view: Engine, attempt: str) -> None:
    """Call first in every RPC that may agree. attempt: the same text on every rank, for each attempt another one.

    It stands in all keys of the attempt, so that ranks of which one missed a call come together in the next. The same text in two
    calls one after the other makes two attempts of it.
    """
    if view.exchange is None:
        view.exchange = Exchange(view)
    view.exchange.begin(attempt)


def as_refit_error(error: BaseException, where: str) -> RefitError:
    """`error`, or what nobody foresaw as an error that can be agreed upon."""
    return named(error, where, "this is a defect: report it with the engine's log")


@contextlib.contextmanager
def collect(errors: list[RefitError], where: str) -> Iterator[None]:
    """Put whatever the block raises into `errors`, so that the ranks can agree on it. What ends the process goes on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the other ranks must learn of it, whatever it is
        errors.append(as_refit_error(error, where))


def agree(view: Engine, phase: str, value: bytes | None, error: RefitError | None, deadline_s: float) -> list[bytes | None]:
    """Exchange `value` or `error` with all ranks of the engine; every rank gets the same outcome.

    Arguments: `phase`, a name that all ranks use at this point; `deadline_s`, seconds from now. Returns every rank's value,
    in rank order. Raises the same error on every rank: the problems of all failing ranks, each with its ranks, in the
    class of the gravest (`TornError`, else that of the lowest failing rank); or `DeadlineError` with the missing ranks. The error
    has `agreed = True` unless the store could not be reached. Raise it to vLLM with `surface`.
    """
    exchange: Exchange | None = view.exchange
    answer = Answer(value)
    if error is not None:
        answer = Answer(None, type(error).__name__, error.problems, getattr(error, "agreed", False))
    if view.world_size == 1:
        return _settle([answer])
    assert exchange is not None, "begin comes first"
    answer = msgspec.structs.replace(answer, after_s=time.monotonic() - exchange.begun)
    key = exchange.key(phase)
    deadline = time.monotonic() + deadline_s
    ranks = range(view.world_size)
    keys = [f"{key}/{rank}" for rank in ranks]

    def play(store: Any) -> tuple[Verdict, list[bytes]]:
        store.set(keys[view.rank], msgspec.msgpack.encode(answer))
        complete = _wait(store, keys, deadline) and time.monotonic() <= deadline
        missing = [] if complete else [rank for rank in ranks if not store.check([keys[rank]])]
        mine = msgspec.msgpack.encode(Verdict(complete, view.rank, missing, deadline_s))
        verdict = msgspec.msgpack.decode(store.compare_set(f"{key}/verdict", "", mine), type=Verdict)
        found = [store.get(keys[rank]) for rank in ranks if rank not in verdict.missing]
        exchange.spend(store, verdict.go, [keys[view.rank], *([f"{key}/verdict"] if view.rank == 0 else [])])
        return verdict, found

    try:
        # the round may be at its deadline when it has to say so; the second more lets it write the verdict
        verdict, raw = exchange.call(play, deadline + max(1.0, 0.1 * deadline_s))
        present = [rank for rank in ranks if rank not in verdict.missing]
    except RefitError as unreachable:
        raise _both(error, unreachable) from error
    except Exception as broken:
        lost = DeadlineError(
            f"the store that the ranks agree through is gone: {broken}",
            where=f"rank {view.rank}",
            do="a worker has died: restart the engine",
        )
        raise _both(error, lost) from broken
    answers = [msgspec.msgpack.decode(text, type=Answer) for text in raw]
    if verdict.go:
        return _settle(answers)
    if verdict.missing:
        who, got = verdict.missing, "nothing"
    else:
        last = max(range(len(answers)), key=lambda index: answers[index].after_s)
        who, got = [last], f"its answer {answers[last].after_s:.1f} s after the call began, as the last one"
    late = Problem(
        f"no answer in phase {phase!r} within {verdict.waited_s:g} s",
        "rank " + ", ".join(map(str, who)),
        got,
        "an answer of every rank",
        "see whether that worker is stopped, dead or slow; the next call starts afresh",
    )
    return _settle([*answers, Answer(kind="DeadlineError", problems=[late])], present)


def surface(view: Engine, error: RefitError) -> None:
    """Raise `error` to vLLM where this rank must; return where another rank raises it for all (see `Engine.speaks`)."""
    if view.speaks or not getattr(error, "agreed", False):
        raise error


def _wait(store: Any, keys: list[str], deadline: float) -> bool:
    """Whether all keys exist before `deadline`."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError:
        # each kind of store has its own error for a timeout, down to a bare RuntimeError (FileStore): the clock tells
        if time.monotonic() < deadline - 0.05:
            raise
        return False
    return True


def _default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _settle(answers: list[Answer], ranks: list[int] | None = None) -> list[bytes | None]:
    """The values, or the one error that `answers` add up to."""
    failed = [(index, answer) for index, answer in enumerate(answers) if answer.kind]
    if not failed:
        return [answer.value for answer in answers]
    single = len(answers) == 1
    grouped: dict[Problem, list[str]] = {}
    for index, answer in failed:
        known = index if ranks is None else (ranks[index] if index < len(ranks) else None)
        for problem in answer.problems:
            grouped.setdefault(problem, []).append("" if known is None or single or answer.known else str(known))
    problems = []
    for problem, names in grouped.items():
        which = ", ".join(name for name in dict.fromkeys(names) if name)
        where = " · ".join(part for part in (f"rank {which}" if which else "", problem.where) if part)
        problems.append(msgspec.structs.replace(problem, where=where))
    raise _agreed(_gravest([answer.kind for _, answer in failed]), problems)


def _agreed(kind: type[RefitError], problems: list[Problem]) -> RefitError:
    error = kind.of(problems)
    error.agreed = True  # type: ignore[attr-defined]
    return error


def merged(errors: list[RefitError]) -> RefitError | None:
    """This rank's own errors as one; None if there are none."""
    if len(errors) < 2:
        return errors[0] if errors else None
    return _gravest([type(error).__name__ for error in errors]).of([problem for error in errors for problem in error.problems])


def _both(error: RefitError | None, second: RefitError) -> RefitError:
    return merged([error, second]) or second if error is not None else second


def _gravest(kinds: list[str]) -> type[RefitError]:
    classes = [class_of(kind) for kind in kinds]
    return next((cls for cls in classes if issubclass(cls, TornError)), classes[0])
