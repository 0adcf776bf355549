"""The forwarding table of an engine rank: packed by trainer rank 0, and checked by the rank against its own plan.

A table names the rank's own moves and where in them a piece begins; it can't name memory. A rank that was given a table which
does not cover each of its moves exactly once, or breaks a bound, refuses it before anything is written.
"""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_refit_ext.core.box import Int, disjoint, volume
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import PlanError, Problem
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import Column, pack, unpack
from vllm_refit_ext.wires.collective_forward import Forwarded
from vllm_refit_ext.wires.collective_schedule import Rows, Schedule, schedule_forwarding
from vllm_refit_ext.wires.staging import boxes_of, kinds_of


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """rank: whose it is. digest: of the rank's part of the plan, which is that of another rank where both need the same. move,
    start, extent, number, holder, run, origin: by piece, see `Forwarded` and `Rows`. gives: [m, 3], round, run and engine rank
    that this rank hands the run to.
    """

    rank: int
    digest: str
    move: Column
    start: Column
    extent: Column
    number: Column
    holder: Column
    run: Column
    origin: Column
    gives: Column


COLUMNS = Table.__struct_fields__[2:]


def pack_table(shared: Forwarded, rank: int, digest: str) -> bytes:
    """What engine rank `rank` must know. digest: of its part of the plan."""
    rows = shared.rows
    gives = [(number, run, rank) for (number, run), ranks in sorted(rows.gives.items()) for rank in ranks]
    columns = (shared.move, shared.start, rows.plan.extent, rows.number, rows.holder, rows.run, rows.origin)
    packed = [pack(c) for c in (*columns, np.array(gives, np.int64).reshape(-1, 3))]
    return msgspec.msgpack.encode(Table(rank, digest, *packed))


def read_table(raw: bytes, plan: Plan, rank: int, trainers: int, engines: int, bucket_bytes: int) -> Schedule:
    """The schedule of engine rank `rank`, whose own plan is `plan`. Raises PlanError where the table does not fit this plan."""
    where = f"wire collective, engine rank {rank}"
    try:
        table = msgspec.msgpack.decode(raw, type=Table)
        columns = [unpack(getattr(table, c)) for c in COLUMNS]
    except (msgspec.DecodeError, ValueError) as error:
        raise PlanError("its forwarding table can't be read", where=where, got=str(error)[:200]) from None
    if table.rank != rank:
        raise PlanError("its forwarding table is of another rank", where=where, got=table.rank, wanted=rank, do=AGAIN)
    if table.digest != (mine := plan.digest(rank)):
        raise PlanError("its forwarding table is of another plan", where=where, got=table.digest[:16], wanted=mine[:16], do=AGAIN)
    depth, count = plan.extent.shape[1], len(columns[0])
    wanted = [(count,), (count, depth), (count, depth), *[(count,)] * 4, (len(columns[-1]), 3)]
    if [c.shape for c in columns] != wanted:
        raise PlanError("the columns of its forwarding table differ in length", where=where, do=AGAIN)
    move, start, extent, number, holder, run, origin, gives = columns
    problems = _bad_rows(plan, move, start, extent, where)
    if not problems:
        part = boxes_of(plan, move, start, extent)
        by_run: dict[tuple[int, int], list[int]] = {}
        for n, r, target in gives.tolist():
            by_run.setdefault((n, r), []).append(target)
        rows = Rows(part, number, holder, run, origin, by_run)
        problems = _bad_ranks(rows, rank, trainers, engines, where)
    if not problems:
        schedule = schedule_forwarding(rows, rank, trainers)
        problems = _bad_rounds(schedule, bucket_bytes, where)
    if problems:
        raise PlanError.of(problems, f"the forwarding table of engine rank {rank} does not fit its plan")
    return schedule


AGAIN = "prepare again on every rank, and install the same version of this project on trainers and engines"


def _bad_rows(plan: Plan, move: Int, start: Int, extent: Int, where: str) -> list[Problem]:
    """Pieces that are not of this plan, and moves that they don't cover exactly once."""
    strange = (move < 0) | (move >= len(plan))
    if not strange.any():
        strange = np.any((start < 0) | (extent <= 0) | (start + extent > plan.extent[move]), axis=1)
    if strange.any():
        got = f"{int(strange.sum())} of {len(move)}"
        return [Problem("it names boxes that this rank's moves don't have", where, got, do=AGAIN)]
    covered = np.zeros(len(plan), np.int64)
    np.add.at(covered, move, volume(start, start + extent))
    bad = set(np.flatnonzero(covered != np.prod(plan.extent, axis=1, dtype=np.int64)).tolist())
    order = np.argsort(move, kind="stable")
    edges = np.flatnonzero(np.diff(move[order], prepend=-1, append=-1))
    for a, b in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        rows = order[a:b]
        if b - a > 1 and not disjoint(start[rows], start[rows] + extent[rows]):
            bad.add(int(move[rows[0]]))
    return [
        Problem(
            "it does not bring every element of a move exactly once",
            f"{where}, tensor {plan.names[int(plan.tensor[i])]!r}",
            do=AGAIN,
        )
        for i in sorted(bad)
    ]


def _bad_ranks(rows: Rows, rank: int, trainers: int, engines: int, where: str) -> list[Problem]:
    """Peers that there are not, and runs to hand on that don't land here."""
    problems = []
    lands = rows.holder == rank
    if ((rows.holder < 0) | (rows.holder >= engines)).any() or ((rows.origin < 0) | (rows.origin >= trainers)).any():
        problems.append(
            Problem("it names ranks that take no part", where, wanted=f"{trainers} trainers, {engines} engine ranks", do=AGAIN)
        )
    here = set(zip(rows.number[lands].tolist(), rows.run[lands].tolist(), strict=True))
    for key, targets in rows.gives.items():
        if key not in here or not all(0 <= t < engines and t != rank for t in targets) or len(set(targets)) < len(targets):
            problems.append(Problem(f"it hands on run {key[1]} of round {key[0]}, which it can't", where, str(targets), do=AGAIN))
    return problems


def _bad_rounds(schedule: Schedule, bucket_bytes: int, where: str) -> list[Problem]:
    """Rounds that mix what must come one after another, that are too large, or whose elements lie askew."""
    problems: list[Problem] = []
    plan = schedule.plan
    if not len(plan):
        return problems
    kinds, count = kinds_of(plan), len(schedule.numbers)
    if (np.diff(kinds) < 0).any() or len(np.unique(schedule.number * 4 + kinds)) != count:
        problems.append(Problem("its rounds mix scales, what the reload needs and what is written in place", where, do=AGAIN))
    payload = np.bincount(schedule.number, plan.nbytes, count)
    item = np.array([ITEMSIZE[b.dtype] for b in plan.sources], np.int64)[plan.source]
    if payload.max() > max(bucket_bytes, int(item.max())):
        problems.append(
            Problem("a round is larger than a bucket", where, f"{int(payload.max())} bytes", str(bucket_bytes), AGAIN)
        )
    if (schedule.offset % item).any():
        problems.append(Problem("pieces of a run differ in the width of their elements", where, do=AGAIN))
    return problems
