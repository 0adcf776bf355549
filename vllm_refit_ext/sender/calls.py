"""Calls to several engines at once: all outcomes are reported, and errors say which engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from vllm_refit_ext.client import EngineClient
from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError
from vllm_refit_ext.sender.ranks import as_refit_error

T = TypeVar("T")


def engine_name(index: int, engine: EngineClient) -> str:
    """How errors call engine number `index` of a sender."""
    return f"engine {engine.name or index}"


class Calls(Generic[T]):
    """One thread an engine, so that no engine waits for another."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        work: Callable[[int, EngineClient], T],
        failed: Callable[[RefitError], None] = lambda error: None,
    ) -> None:
        """Start `work(index, engine)` for every engine. failed: called at once, in the failing call's thread, with its error."""
        self._names = [engine_name(i, engine) for i, engine in enumerate(engines)]
        self._work, self._failed = work, failed
        self._outcomes: list[T | RefitError | None] = [None] * len(engines)
        self._threads = [
            threading.Thread(target=self._run, args=(i, engine), name=f"refit-engine-{i}", daemon=True)
            for i, engine in enumerate(engines)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, engine: EngineClient) -> None:
        try:
            self._outcomes[index] = self._work(index, engine)
        except Exception as error:  # noqa: BLE001 - the thread that waits must learn of it
            located = _located(as_refit_error(error), self._names[index])
            self._outcomes[index] = located
            self._failed(located)

    def results(self, timeout_s: float, done: str, first: RefitError | None = None) -> list[T]:
        """What all calls returned, in the order of the engines.

        Raises one error with the problems of `first` and of all calls that failed, in the class of the earliest of these; where
        other engines did not fail, it names them and says what they have `done`. A call that has not returned after `timeout_s`
        seconds counts as DeadlineError.
        """
        end = time.monotonic() + timeout_s
        errors, results, well = [first] if first is not None else [], [], []
        for thread, name, index in zip(self._threads, self._names, range(len(self._threads)), strict=True):
            thread.join(max(0.0, end - time.monotonic()))
            outcome = self._outcomes[index]
            if isinstance(outcome, RefitError):
                errors.append(outcome)
            elif thread.is_alive():
                errors.append(DeadlineError("it did not answer", where=name, wanted=f"within {timeout_s:g} s"))
            else:
                results.append(outcome)
                well.append(name)
        if errors:
            problems: dict[Problem, None] = {p: None for error in errors for p in error.problems}
            if well:
                problems[Problem(f"{done}, unlike the engine(s) that failed", ", ".join(well))] = None
            raise type(errors[0]).of(list(problems))
        return results  # type: ignore[return-value]  # a call that returned has an outcome, which may itself be None


def call_all(engines: Sequence[EngineClient], work: Callable[[int, EngineClient], T], timeout_s: float, done: str) -> list[T]:
    """`work(index, engine)` for all engines at once. Raises as `Calls.results` does."""
    return Calls(engines, work).results(timeout_s, done)


def _located(error: RefitError, name: str) -> RefitError:
    """The same problems, each saying of which engine it is."""
    problems = [
        p
        if (p.where + " ").startswith(name + " ")
        else msgspec.structs.replace(p, where=f"{name} · {p.where}" if p.where else name)
        for p in error.problems
    ]
    return type(error).of(problems)
