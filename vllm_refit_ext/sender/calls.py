"""Calls to several engines at once: all outcomes are reported, and errors say which engine."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from vllm_refit_ext.client import EngineClient, start
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
        except Exception as error:  # whatever it is, it is told with the engine's name
            located = _located(as_refit_error(error), self._names[index])
            self._failed(index, located)
            raise located from error
