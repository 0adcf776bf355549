"""A scenario's record, and what every scenario checks: the bytes of a take where they moved, and a fresh engine's weights and
answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.fleet import Engine, Fleet, Trainer
from vllm_refit_ext.core.messages import TakeReply


class Assertion(msgspec.Struct, frozen=True):
    name: str
    observed: Any
    expected: Any
    held: bool


class Record(msgspec.Struct):
    """One scenario's outcome. status: passed, failed or skipped."""

    scenario: str
    status: str = ""
    reason: str = ""
    seconds: float = 0.0
    machine: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    assertions: list[Assertion] = []

    def equal(self, name: str, observed: Any, expected: Any) -> None:
        self.assertions.append(Assertion(name, observed, expected, observed == expected))

    def within(self, name: str, observed: float, expected: float, share: float = 0.02) -> None:
        held = abs(observed - expected) <= share * expected
        self.assertions.append(Assertion(name, observed, f"{expected} within {share:.0%}", held))

    def less(self, name: str, observed: float, limit: float) -> None:
        self.assertions.append(Assertion(name, observed, f"at most {limit}", observed <= limit))


def check_fresh(record: Record, engine: Engine, fresh: tuple[Any, Any]) -> None:
    """The engine must hold and answer what a fresh engine does."""
    differ = sorted({n for mine, wanted in zip(engine.weights(), fresh[0], strict=True) for n in wanted if mine[n] != wanted[n]})
    record.equal(f"{engine.name}: tensors whose bytes are not a fresh engine's", differ, [])
    tokens, wanted = ([answer["tokens"] for answer in answers] for answers in (engine.answers(), fresh[1]))
    record.equal(f"{engine.name}: tokens are a fresh engine's", tokens, wanted)


def check_spoilt(record: Record, fleet: Fleet, kind: str, engine: Engine) -> None:
    """Change every weight on purpose."""
    engine.spoil()
    same = sum(
        mine[n] == wanted[n] for mine, wanted in zip(engine.weights(), fleet.fresh[kind, 1.0][0], strict=True) for n in mine
    )
    held = sum(len(rank) for rank in engine.weights())
    record.metrics[f"{engine.name}: tensors unlike a fresh engine's after they were spoilt"] = held - same
    record.equal(f"{engine.name}: answers are spoilt", engine.answers() == fleet.fresh[kind, 1.0][1], False)


def sources(trainer: Trainer, engines: Sequence[Engine], counted: Counter[str]) -> Counter[str]:
    """Bytes by who made the shared files that they were read from."""
    names = {str(pid): f"trainer rank {rank}" for rank, pid in enumerate(trainer.pids)}
    names |= {str(pid): f"{e.name} rank {rank}" for e in engines for rank, pid in enumerate(e.pids)}
    found = Counter[str]()
    for file, nbytes in counted.items():
        found[names[file.split("-")[2]]] += nbytes
    return found


def check_bytes(
    record: Record, trainer: Trainer, engine: Engine, replies: list[TakeReply], planned: list[int], others: Sequence[Engine] = ()
) -> Counter[str]:
    """Compare what the copies of the last take read and wrote with each other, with the report and with `planned`, bytes by
    engine rank. others: engines that may have been read. Returns bytes by source."""
    total = Counter[str]()
    for rank, ((read, written), reply) in enumerate(zip(engine.counted(), replies, strict=True)):
        by_source = sources(trainer, others, read)
        where = f"{engine.name} rank {rank}"
        record.equal(f"{where}: bytes by source add up to the bytes received", sum(by_source.values()), written)
        reported = {f"trainer rank {r}": n for r, n in reply.received.items()}
        trainers = {s: n for s, n in by_source.items() if s.startswith("trainer")}
        record.equal(f"{where}: the report's bytes by trainer rank are those that were counted", reported, trainers)
        record.within(f"{where}: bytes received are those planned", written, planned[rank])
        total += by_source
        record.metrics[f"{where}: bytes by source"] = dict(sorted(by_source.items()))
    return total


def show(record: Record) -> None:
    """Print one outcome, and what did not hold."""
    console = Console(width=130, force_terminal=False, markup=False, highlight=False)
    console.print(f"{record.scenario:<16} {record.status:<8} {len(record.assertions):3d} assertions {record.seconds:6.1f} s")
    for a in record.assertions:
        if not a.held:
            console.print(f"    {a.name}: observed {a.observed!r}, expected {a.expected!r}"[:2000])
    if record.reason:
        console.print(f"    {record.reason}")
