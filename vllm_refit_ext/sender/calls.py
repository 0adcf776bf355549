"""Calls to several engines at once: all outcomes are reported, and errors say which engine."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from vllm_refit_ext.client import EngineClient, start
from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError, as_refit_error

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
        failed: Callable[[int, RefitError], None] = lambda index, error: None,
    ) -> None:
        """Start `work(index, engine)` for every engine. failed: called at once, in the failing call's thread, with the
        engine's number and its error."""
        self._names = [engine_name(i, engine) for i, engine in enumerate(engines)]
        self._work, self._failed = work, failed
        self._outcomes = [start(functools.partial(self._run, i, engine), self._names[i]) for i, engine in enumerate(engines)]

    def _run(self, index: int, engine: EngineClient) -> T:
        try:
            return self._work(index, engine)
        except Exception as error:  # whatever it is, it is reported with the engine's name
            located = _located(as_refit_error(error), self._names[index])
            self._failed(index, located)
            raise located from error

    def wait(self, timeout_s: float) -> None:
        """Until all calls have ended, `timeout_s` seconds at most."""
        concurrent.futures.wait(self._outcomes, timeout_s)

    def results(self, timeout_s: float, done: str, first: RefitError | None = None) -> list[T]:
        """What all calls returned, in the order of the engines.

        Raises one error with the problems of `first` and of all calls that failed, in the class of the earliest of these; where
        other engines did not fail, it names them and says what they have `done`. A call that has not returned after `timeout_s`
        seconds counts as DeadlineError.
        """
        self.wait(timeout_s)
        errors, results, well = [first] if first is not None else [], [], []
        for name, outcome in zip(self._names, self._outcomes, strict=True):
            if not outcome.done():
                errors.append(DeadlineError("it did not answer", where=name, wanted=f"within {timeout_s:g} s"))
            elif (error := outcome.exception()) is not None:
                errors.append(as_refit_error(error))
            else:
                results.append(outcome.result())
                well.append(name)
        if errors:
            problems: dict[Problem, None] = {p: None for error in errors for p in error.problems}
            if well:
                problems[Problem(f"{done}, unlike the engine(s) that failed", ", ".join(well))] = None
            raise type(errors[0]).of(list(problems))
        return results


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
