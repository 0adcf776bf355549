"""Schedule: what one engine rank receives round by round, where it lies in staging, and what it hands on. Pure tables.

An engine rank that has no box in common with others takes its rounds as `staging` cuts them, all from trainer ranks. On
a host where engine ranks need the same boxes (`collective_forward`), a box has one *landing* rank, which gets it from a trainer
rank and hands it to the others. Then a round has two phases: first what trainer ranks send, then what the engine ranks of the
host hand on of it. Boxes that one landing rank hands to the same ranks lie end to end in its staging, in one *run*, so that
handing on needs neither a copy nor memory. All elements of a run have the same width, so there is no padding inside that would
have to be sent.

No two ranks can wait for each other. Every message has a place in one order of all messages of a refit: round (as the host
counts it), phase, receiving rank, sending rank, run. Each rank starts its messages in this order; it starts what it hands on when
what it received from trainers in this round is there, and it waits for nothing else but messages that it started before. So both
ends of the first message that has not arrived have started it: everything before it has arrived. This holds however many
messages a batch has and however few batches are under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import msgspec
import numpy as np

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires.staging import Pieces, Rounds, kinds_of, padded


class Span(msgspec.Struct, frozen=True):
    """A message: bytes at..at+nbytes of a round's staging, from group rank `peer`, or to it where this rank `gives` it. tag: how
    many messages of this pair of ranks, in this direction, come before it in the refit."""

    peer: int
    at: int
    nbytes: int
    gives: bool = False
    tag: int = 0


class Schedule(Pieces):
    """The pieces of one engine rank and their messages.

    offset: int64 [n], bytes into the staging of its round. source: int64 [n], the group rank that sends it. run: int64 [n].
    numbers: of each round, as the host counts them. sizes: bytes of staging of each round. landing: by round, what comes from
    trainer ranks. exchange: by round, what comes from engine ranks of the host and what goes to these. Both are in the order in
    which they start. trainers: ranks that come first in the group.
    """

    offset: Int
    source: Int
    run: Int
    numbers: list[int]
    sizes: list[int]
    landing: list[list[Span]]
    exchange: list[list[Span]]
    trainers: int

    @property
    def peers(self) -> set[int]:
        """Group ranks that it receives from or hands on to."""
        return {span.peer for spans in (*self.landing, *self.exchange) for span in spans}


class Rows(msgspec.Struct):
    """The pieces of one engine rank on a host that shares. All int64.

    plan: the pieces. number: round of the host. holder: the engine rank on which it lands, in the plan's numbers; this rank
    itself where a trainer rank sends it here. run: as the holder counts its runs of the round. origin: the trainer rank that it
    comes from. gives: (round, run) -> engine ranks to which this rank hands the run.
    """

    plan: Plan
    number: Int
    holder: Int
    run: Int
    origin: Int
    gives: Mapping[tuple[int, int], list[int]]


def schedule_alone(rounds: Rounds, trainers: int) -> Schedule:
    """The schedule of a rank that gets everything from trainer ranks, of which there are `trainers`."""
    count = len(rounds.messages)
    landing = [[Span(m.source, m.at, m.nbytes) for m in found] for found in rounds.messages]
    return Schedule(
        rounds.plan,
        rounds.number,
        rounds.kept,
        rounds.reloads,
        rounds.staged(),
        rounds.plan.source_rank,
        np.zeros(len(rounds.plan), np.int64),
        list(range(count)),
        [rounds.size(r) for r in range(count)],
        _tagged(landing),
        [[] for _ in range(count)],
        trainers,
    )


def schedule_forwarding(rows: Rows, rank: int, trainers: int) -> Schedule:
    """The schedule of engine rank `rank`, which gets boxes from other engine ranks of its host or hands some to them. trainers:
    number of trainer ranks, which come first in the group."""
    order = np.lexsort((np.arange(len(rows.plan)), rows.origin, rows.run, rows.holder, rows.number))
    plan = rows.plan.select(order)
    number, holder, run, origin = (c[order] for c in (rows.number, rows.holder, rows.run, rows.origin))
    numbers, local = np.unique(number, return_inverse=True)
    count, nbytes = len(numbers), plan.nbytes
    offset, sizes = np.zeros(len(plan), np.int64), [0] * count
    landing: list[list[Span]] = [[] for _ in range(count)]
    exchange: list[list[Span]] = [[] for _ in range(count)]
    me = trainers + rank
    for a, b in pairwise(_borders(number, holder, run)):
        r, start = int(local[a]), padded(sizes[int(local[a])])
        ends = start + np.cumsum(nbytes[a:b])
        offset[a:b] = ends - nbytes[a:b]
        sizes[r] = int(ends[-1])
        if holder[a] != rank:
            exchange[r].append(Span(trainers + int(holder[a]), start, sizes[r] - start))
            continue
        for c, d in pairwise(_borders(origin[a:b])):
            at = int(offset[a + c])
            landing[r].append(Span(int(origin[a + c]), at, int(ends[d - 1]) - at))
        targets = rows.gives.get((int(number[a]), int(run[a])), ())
        exchange[r] += [Span(trainers + t, start, sizes[r] - start, gives=True) for t in targets]
    for spans in (*landing, *exchange):  # stable: the runs of a pair of ranks stay in their order
        spans.sort(key=lambda s: (s.peer, me) if s.gives else (me, s.peer))
    kinds = kinds_of(plan)[np.searchsorted(local, np.arange(count))] if count else kinds_of(plan)
    return Schedule(
        plan,
        local.astype(np.int64),
        int((kinds == 0).sum()),
        int((kinds == 1).sum()),
        offset,
        np.where(holder == rank, origin, trainers + holder),
        run,
        numbers.tolist(),
        sizes,
        _tagged(landing),
        _tagged(exchange),
        trainers,
    )


def _borders(*columns: Int) -> list[int]:
    """Where rows begin that differ from the row before, and the end."""
    table = np.stack(columns, axis=1)
    if not len(table):
        return [0]
    return [0, *(np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1).tolist(), len(table)]


def _tagged(rounds: list[list[Span]]) -> list[list[Span]]:
    count: Counter[tuple[int, bool]] = Counter()
    tagged: list[list[Span]] = []
    for spans in rounds:
        tagged.append([])
        for span in spans:
            pair = (span.peer, span.gives)
            tagged[-1].append(msgspec.structs.replace(span, tag=count[pair]))
            count[pair] += 1
    return tagged
