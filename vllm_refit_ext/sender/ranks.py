"""The trainer's ranks talking among themselves: small messages to and from rank 0, and errors that reach everyone.

Rank 0 drives the engine; the others must learn how that went. Each step of a refit is one `exchange`: every rank's value or
problems go to rank 0, and rank 0's answer, or all the problems, comes back to every rank. A rank that fails still takes part, so
nobody waits for it; one that died or stopped is found by the deadline, and the others learn its number.

Every exchange belongs to a call (`prepare`, `refit`, ...) that all ranks make together: `call` numbers them. So what an earlier
call left behind is never taken for an answer of this one, and ranks that are in different calls learn so.

Messages go through the key-value store of torch.distributed, not through a collective: a collective that timed out leaves its
group unusable, and then nobody could learn why. Whoever hosts the store (the launcher, or rank 0) must outlive the last call.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from vllm_refit_ext.core.errors import DeadlineError, Problem, as_refit_error, class_of
from vllm_refit_ext.wires.rendezvous import put_parts, take_parts


class Answer(msgspec.Struct, frozen=True):
    """A value, or the problems that took its place, with the name of their error class. call: what the rank was asked to do."""

    value: bytes = b""
    problems: list[Problem] = []
    kind: str = "RefitError"
    call: str = ""

    def unwrap(self) -> bytes:
        """The value. Raises the error that the problems were."""
        if self.problems:
            text = f"the refit failed with {len(self.problems)} problem(s)" if len(self.problems) > 1 else ""
            raise class_of(self.kind).of(self.problems, text)
        return self.value


def answer_of(work: Callable[[], bytes]) -> Answer:
    """Run `work`; its value, or its problems where it raises. Errors that are not ours are reported by their class and text."""
    try:
        return Answer(work())
    except Exception as error:  # noqa: BLE001 - it must reach the other ranks, which wait for this one
        known = as_refit_error(error)
        return Answer(problems=known.problems, kind=type(known).__name__)


class Ranks:
    """All ranks of the trainer. Collective: every rank makes one, and calls its methods in the same order."""

    _made = 0

    def __init__(self, deadline_s: float) -> None:
        """deadline_s: seconds after which rank 0's wait for another rank fails. The others wait a little over twice as long,
        so that they hear rank 0's verdict rather than time out beside it.
        """
        self.deadline_s, self.size, self.rank = deadline_s, 1, 0
        self._call, self._calls, self._round = "", 0, 0
        self._store: Any = None
        if dist.is_available() and dist.is_initialized():
            self.size, self.rank = dist.get_world_size(), dist.get_rank()
            Ranks._made += 1
            self._store = _own_connection(f"refit-trainer/{Ranks._made}")

    def call(self, name: str) -> None:
        """Every rank begins `name` now; the exchanges that follow are of this call."""
        self._call, self._calls, self._round = name, self._calls + 1, 0

    def exchange(self, mine: Answer, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Give `mine` to rank 0, which turns all values into one answer a rank with `decide`; return this rank's answer.

        Raises on every rank what any rank or `decide` failed with.
        """
        self._round += 1
        mine = msgspec.structs.replace(mine, call=self._call)
        if self.rank != 0:
            self._put(self._key(f"{self.rank}"), mine)
            return self._take(self._key(f"answer/{self.rank}"), 0, time.monotonic() + 2 * self.deadline_s + 10).unwrap()
        verdicts = self._verdicts([mine, *self._gather()], decide)
        for rank in range(1, self.size):
            self._put(self._key(f"answer/{rank}"), verdicts[rank])
        return verdicts[0].unwrap()

    def _key(self, name: str) -> str:
        return f"{self._calls}/{self._round}/{name}"

    def _gather(self) -> list[Answer]:
        """What the other ranks gave, in rank order; the problem of being late for one that gave nothing in time."""
        deadline = time.monotonic() + self.deadline_s
        answers = []
        for rank in range(1, self.size):
            try:
                answers.append(self._take(self._key(f"{rank}"), rank, deadline))
            except DeadlineError as error:
                answers.append(Answer(problems=error.problems, kind="DeadlineError", call=self._call))
        return answers

    def _verdicts(self, answers: list[Answer], decide: Callable[[list[bytes]], Sequence[bytes]]) -> Sequence[Answer]:
        apart = [(rank, answer.call) for rank, answer in enumerate(answers) if answer.call != self._call]
        if apart:
            do = "make the same calls in the same order on every trainer rank"
            problems = [
                Problem("it is in another call than rank 0", f"trainer rank {rank}", call, self._call, do) for rank, call in apart
            ]
            return [Answer(problems=problems, kind="SessionError")] * self.size
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.problems]
        if failed:
            problems = [self._located(p, rank) for rank, answer in failed for p in answer.problems]
            return [Answer(problems=problems, kind=failed[0][1].kind)] * self.size
        box: list[bytes] = []

        def run() -> bytes:
            box.extend(decide([answer.value for answer in answers]))
            return b""

        outcome = answer_of(run)
        return [outcome] * self.size if outcome.problems else [Answer(value) for value in box]

    def _located(self, problem: Problem, rank: int) -> Problem:
        label = f"trainer rank {rank}"
        if self.size == 1 or problem.where.startswith(label):
            return problem
        return msgspec.structs.replace(problem, where=f"{label} · {problem.where}" if problem.where else label)

    def _put(self, key: str, answer: Answer) -> None:
        try:
            put_parts(self._store, key, msgspec.msgpack.encode(answer))
        except RuntimeError as error:
            raise self._lost(0, f"the store is gone: {error}") from error

    def _take(self, key: str, rank: int, deadline: float) -> Answer:
        """The answer under `key`, which `rank` writes; it is removed from the store."""
        try:
            self._store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            payload = take_parts(self._store, key, delete=True)
        except RuntimeError as error:
            reason = "nothing" if isinstance(error, dist.DistStoreError) else f"the store is gone: {error}"
            raise self._lost(rank, reason) from error
        return msgspec.msgpack.decode(payload, type=Answer)

    def _lost(self, rank: int, got: str) -> DeadlineError:
        return DeadlineError(
            "it did not answer",
            where=f"trainer rank {rank}",
            got=got.strip().splitlines()[0][:200],
            wanted=f"an answer within {self.deadline_s:g} s",
            do="see whether that process is dead, stopped or stuck in a collective",
        )


def _own_connection(prefix: str) -> Any:
    """torch's default store under a prefix, by a connection of its own where the store has such: its waits block a connection."""
    torch_dist: Any = dist  # its stubs leave stores out
    store = torch_dist.distributed_c10d._get_default_store()
    with contextlib.suppress(AttributeError, RuntimeError):
        store = store.clone()
    return torch_dist.PrefixStore(prefix, store)
