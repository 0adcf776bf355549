"""The trainer's ranks talking among themselves: small messages to and from rank 0, and errors that reach everyone.

Rank 0 drives the engine; the others must learn how that went. Each step of a refit is `gather` (every rank's value or problems
to rank 0) followed by `scatter` (rank 0's answer, or all the problems, to every rank). A rank that fails still takes part, so
nobody waits for it; one that died or stopped is found by the deadline of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from vllm_refit_ext.core import errors
from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError


class Answer(msgspec.Struct, frozen=True):
    """A value, or the problems that took its place, with the name of their error class."""

    value: bytes = b""
    problems: list[Problem] = []
    kind: str = "RefitError"

    def unwrap(self) -> bytes:
        """The value. Raises the error that the problems were."""
        if self.problems:
            kind: type[RefitError] = getattr(errors, self.kind, RefitError)
            raise kind.of(
                self.problems, f"the refit failed with {len(self.problems)} problem(s)" if len(self.problems) > 1 else ""
            )
        return self.value


def answer_of(work: Callable[[], bytes]) -> Answer:
    """Run `work`; its value, or its problems where it raises. Errors that are not ours are told by their class and text."""
    try:
        return Answer(work())
    except RefitError as error:
        return Answer(problems=error.problems, kind=type(error).__name__)
    except Exception as error:  # noqa: BLE001 - it must reach the other ranks, which wait for this one
        return Answer(problems=[Problem(f"{type(error).__name__}: {error}")])


class Ranks:
    """All ranks of the trainer. Collective: every rank makes one, and calls its methods in the same order."""

    def __init__(self, deadline_s: float) -> None:
        """deadline_s: seconds after which a wait for another rank fails."""
        self.deadline_s = deadline_s
        self.size, self.rank, self._group = 1, 0, None
        if dist.is_available() and dist.is_initialized():
            self.size, self.rank = dist.get_world_size(), dist.get_rank()
            # Of its own, on the CPU: the messages must not queue behind the trainer's collectives.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s)) if self.size > 1 else None

    def exchange(self, mine: Answer, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Give `mine` to rank 0, which turns all values into one answer a rank with `decide`; return this rank's answer.

        Raises on every rank what any rank or `decide` failed with.
        """
        answers = self._gather(mine)
        if answers is None:
            return self._receive_answer().unwrap()
        failed = [(rank, a) for rank, a in enumerate(answers) if a.problems]
        verdicts: Sequence[Answer]
        if failed:
            problems = [self._located(p, rank) for rank, a in failed for p in a.problems]
            verdicts = [Answer(problems=problems, kind=failed[0][1].kind)] * self.size
        else:
            box: list[bytes] = []

            def run() -> bytes:
                box.extend(decide([a.value for a in answers]))
                return b""

            outcome = answer_of(run)
            verdicts = [outcome] * self.size if outcome.problems else [Answer(value) for value in box]
        for rank in range(1, self.size):
            self._send(msgspec.msgpack.encode(verdicts[rank]), rank)
        return verdicts[0].unwrap()

    def _located(self, problem: Problem, rank: int) -> Problem:
        if self.size == 1:
            return problem
        return msgspec.structs.replace(problem, where=" · ".join(x for x in (f"trainer rank {rank}", problem.where) if x))

    def _gather(self, mine: Answer) -> list[Answer] | None:
        if self.rank != 0:
            self._send(msgspec.msgpack.encode(mine), 0)
            return None
        answers = [mine]
        for rank in range(1, self.size):
            try:
                answers.append(msgspec.msgpack.decode(self._receive(rank), type=Answer))
            except DeadlineError as error:
                answers.append(Answer(problems=error.problems, kind="DeadlineError"))
        return answers

    def _receive_answer(self) -> Answer:
        return msgspec.msgpack.decode(self._receive(0), type=Answer)

    def _send(self, payload: bytes, rank: int) -> None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([len(payload)]), rank, group=self._group)
            dist.send(data, rank, group=self._group)
        except RuntimeError as error:
            if self.rank == 0:
                return  # that rank is gone; the others still wait for their answer
            raise self._lost(rank, error) from error

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, rank, group=self._group)
            data = torch.empty(int(size[0]), dtype=torch.uint8)
            dist.recv(data, rank, group=self._group)
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        return data.numpy().tobytes()

    def _lost(self, rank: int, error: Exception) -> DeadlineError:
        reason = str(error).strip().splitlines()
        return DeadlineError(
            "it did not answer",
            where=f"trainer rank {rank}",
            got=reason[-1][:200] if reason else "no reason",
            wanted=f"an answer within {self.deadline_s:g} s",
            do="see whether that process is dead, stopped or stuck in a collective",
        )
