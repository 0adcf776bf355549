"""Forwarding: one copy of a box crosses to a host, and the engine ranks of the host hand it to each other. Pure tables.

Trainer rank 0 knows the plan of all ranks and every rank's host. For each host with several engine ranks it finds the boxes that
more than one of them needs, where a copy would cross from another host. Each of them lands on one rank, dealt so that the bytes
that land are even over the ranks of the host, and comes from one of the trainer ranks that the plan names for it, dealt so that
what trainer ranks send is even; the other ranks get it from the landing rank. A rank for which the plan names a trainer rank of
its own host takes the box from there, and hands it on to those for which it would cross.

Boxes that overlap only in part (engines of different size on one host) are cut where one of them begins or ends, unless one of
them ends in a layout with blocks: then only equal boxes are shared. Boxes for an engine's own reload, which come first, are
shared with each other alone. Where nothing is shared, a rank's schedule is that of a rank alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.coded import CHECKPOINT, PLAIN
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.plan import Plan, overlaps
from vllm_refit_ext.core.replicas import atoms_of
from vllm_refit_ext.wires.collective_schedule import Rows, Schedule, schedule_alone, schedule_forwarding
from vllm_refit_ext.wires.outgoing import Cut
from vllm_refit_ext.wires.staging import ALIGN, boxes_of, cut_boxes, kinds_of, rounds

KINDS = 3
"""Of `kinds_of`: scales, for the reload, in place."""


class Forwarded(msgspec.Struct):
    """What one engine rank of a sharing host receives. rows: its pieces, with the source that sends each. move, start: int64 [n],
    [n, D], the move of this rank's own plan that a piece is of, and where in its box the piece begins."""

    rows: Rows
    move: Int
    start: Int


def schedules(plan: Plan, hosts: Hosts, bucket_bytes: int) -> tuple[list[Schedule], dict[int, Forwarded]]:
    """The schedule of every engine rank of the joint `plan`, and the tables of those that can't find theirs from their own plan.

    bucket_bytes: most payload of a round. In a schedule made here, the source columns are those of the trainer rank that sends.
    """
    shared, trainers = forwarding(plan, hosts, bucket_bytes), len(hosts.trainers)
    found = [
        schedule_forwarding(shared[rank].rows, rank, trainers)
        if rank in shared
        else schedule_alone(rounds(plan.for_target(rank), bucket_bytes), trainers)
        for rank in range(len(hosts.engines))
    ]
    return found, shared


def forwarding(plan: Plan, hosts: Hosts, bucket_bytes: int) -> dict[int, Forwarded]:
    """What each engine rank receives that has something in common with others of its host. Other ranks are left out."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts.engines):
        by_host.setdefault(host, []).append(rank)
    kinds, found = kinds_of(plan), []
    for host, ranks in by_host.items():
        near = np.array([s == host for s in hosts.trainers], bool)
        if len(ranks) > 1 and not near.all() and (groups := _groups(plan, kinds, np.array(ranks, np.int64), near)) is not None:
            found.append(groups)
    if not found:
        return {}
    sharing = np.isin(plan.target_rank, np.concatenate([g.ranks for g in found]))
    sent = np.bincount(plan.source_rank[~sharing], plan.nbytes[~sharing], len(hosts.trainers)).astype(np.int64).tolist()
    dealt = [(groups, _cut(groups, bucket_bytes), _choices(groups)) for groups in found]
    for _, pieces, choices in dealt:  # what leaves no choice counts before anything is chosen
        total = np.bincount(choices.of[pieces.group], pieces.nbytes, len(choices.all)).astype(np.int64).tolist()
        for choice, nbytes in zip(choices.all, total, strict=True):
            for trainer in choice.forced:
                sent[trainer] += nbytes
    tables: dict[int, Forwarded] = {}
    for groups, pieces, choices in dealt:
        tables |= _rows(plan, groups, pieces, _deal(groups, pieces, choices, sent))
    return tables


class _Groups(msgspec.Struct):
    """The boxes that a host needs, in the order of their transfer. R engine ranks of the host, G boxes.

    ranks: [R], in the plan's numbers. kind, item, nbytes: [G], see `kinds_of`, bytes of an element, of the box. lo, extent: [G,
    D]. move: [G, R], the move of the joint plan that brings it to a rank, -1 where the rank does not need it. source: [G, R],
    trainer rank of that move, or -1. near: [G, R], whether this trainer rank is of the host. forward: [G], whether ranks hand it
    on.
    """

    ranks: Int
    kind: Int
    item: Int
    nbytes: Int
    lo: Int
    extent: Int
    move: Int
    source: Int
    near: NDArray[np.bool_]
    forward: NDArray[np.bool_]


class _Pieces(msgspec.Struct):
    """Boxes cut so that they fit and can be dealt evenly, in rounds. group: [A]. start, extent: [A, D]. nbytes, number: [A]."""

    group: Int
    start: Int
    extent: Int
    nbytes: Int
    number: Int


class _Deal(msgspec.Struct):
    """holder: [A, R], the member on which a piece lands that member r gets. giver: [A, R], the member whose move says where a
    trainer rank holds it. given: [A, R], for a holder the number of the set in `sets` to which it hands the piece; 0 is
    nobody."""

    holder: Int
    giver: Int
    given: Int
    sets: list[tuple[int, ...]]


def _groups(plan: Plan, kinds: Int, ranks: Int, near: NDArray[np.bool_]) -> _Groups | None:
    """The boxes of a host, or None where nothing need be handed on. near: [trainer ranks], whether it is of the host."""
    rows = np.flatnonzero(np.isin(plan.target_rank, ranks))
    tensors = len(plan.names)
    code = kinds[rows] * tensors + plan.tensor[rows]
    row, code, lo, hi = _cut_in_common(plan, rows, code, KINDS * tensors)
    member = np.searchsorted(ranks, plan.target_rank[row])
    # A rank may need one box several times: its n-th need is shared with the n-th need of the others.
    order = np.lexsort((row, member, *hi.T[::-1], *lo.T[::-1], code))
    row, code, lo, hi, member = row[order], code[order], lo[order], hi[order], member[order]
    new = _differs(np.concatenate([code[:, None], lo, hi], axis=1))
    again = new | _differs(member[:, None])
    index = np.arange(len(row))
    time = index - np.maximum.accumulate(np.where(again, index, 0))
    box = np.cumsum(new) - 1
    order = np.lexsort((member, time, box))
    row, code, lo, hi, member = row[order], code[order], lo[order], hi[order], member[order]
    new = _differs(np.stack([box[order], time[order]], axis=1))
    group, first = np.cumsum(new) - 1, np.flatnonzero(new)
    move = np.full((len(first), len(ranks)), -1, np.int64)
    move[group, member] = row
    source = np.where(move >= 0, plan.source_rank[move], -1)
    at_home = np.where(move >= 0, near[source], False)
    forward = ((move >= 0).sum(axis=1) > 1) & ((move >= 0) & ~at_home).any(axis=1)
    if not forward.any():
        return None
    item = np.array([ITEMSIZE[b.dtype] for b in plan.sources], np.int64)[plan.source[row[first]]]
    extent = (hi - lo)[first]
    nbytes = np.prod(extent, axis=1, dtype=np.int64) * item
    return _Groups(ranks, code[first] // tensors, item, nbytes, lo[first], extent, move, source, at_home, forward)


def _cut_in_common(plan: Plan, rows: Int, code: Int, count: int) -> tuple[Int, Int, Int, Int]:
    """The moves `rows` cut where other boxes of the same `code` begin or end: move, code [n], lo, hi [n, D]."""
    lo, hi = plan.lo[rows], plan.lo[rows] + plan.extent[rows]
    anywhere = np.array([b.layout in (PLAIN, CHECKPOINT) for b in plan.targets], bool)[plan.target[rows]]
    free = ~np.isin(code, code[~anywhere])
    atoms = atoms_of(code[free], lo[free], hi[free], plan.target_rank[rows][free])
    piece, _, low, high = overlaps(lo[free], hi[free], code[free], atoms, count)
    return (
        np.concatenate([rows[free][piece], rows[~free]]),
        np.concatenate([code[free][piece], code[~free]]),
        np.concatenate([low, lo[~free]]),
        np.concatenate([high, hi[~free]]),
    )


def _differs(table: Int) -> NDArray[np.bool_]:
    """Whether each row differs from the one before it; the first does."""
    new = np.ones(len(table), bool)
    new[1:] = (table[1:] != table[:-1]).any(axis=1)
    return new


def _cut(groups: _Groups, bucket_bytes: int) -> _Pieces:
    """Cut boxes for their rounds. What is handed on is cut so small that every rank that needs it can land a part in a round."""
    needs = groups.move >= 0
    fair = np.minimum(bucket_bytes, np.maximum(bucket_bytes // np.maximum(1, needs.sum(axis=1)), ALIGN))
    limit = np.where(groups.forward, fair, bucket_bytes)
    group, start, extent = cut_boxes(groups.extent, groups.nbytes, limit, groups.item)
    nbytes = np.prod(extent, axis=1, dtype=np.int64) * groups.item[group]
    taken = np.cumsum(nbytes[:, None] * needs[group], axis=0)
    kind = groups.kind[group]
    borders = np.searchsorted(kind, np.arange(KINDS), side="right")
    number = np.zeros(len(group), np.int64)
    first = index = 0
    while first < len(group):
        before = taken[first - 1] if first else np.zeros(needs.shape[1], np.int64)
        full = min(int(np.searchsorted(taken[:, r], before[r] + bucket_bytes, side="right")) for r in range(needs.shape[1]))
        last = min(max(first + 1, full), int(borders[kind[first]]))
        number[first:last] = index
        first, index = last, index + 1
    return _Pieces(group, start, extent, nbytes, number)


class _Choice(msgspec.Struct):
    """Among whom a piece is dealt. forced: trainer ranks that send it in any case, as often as they do. landing: members that may
    land it to hand it on, none where nobody does. givers: trainer rank -> member whose move names it, to choose from. others:
    members that get it from the one that lands it; that one is left out if it is among them.
    """

    forced: list[int]
    landing: list[int]
    givers: dict[int, int]
    others: list[int]


class _Choices(msgspec.Struct):
    """all: the distinct ones. of: [G], which of them a box has."""

    all: list[_Choice]
    of: Int


def _choices(groups: _Groups) -> _Choices:
    members = len(groups.ranks)
    table = np.concatenate([groups.source, groups.near, groups.forward[:, None]], axis=1)
    distinct, of = np.unique(table, axis=0, return_inverse=True)
    return _Choices([_choice(p[:members].tolist(), p[members:-1].tolist(), bool(p[-1])) for p in distinct], of.reshape(-1))


def _choice(source: list[int], near: list[int], forward: bool) -> _Choice:
    needing = [r for r, s in enumerate(source) if s >= 0]
    home = [r for r in needing if near[r]]
    if not forward:
        return _Choice([source[r] for r in needing], [], {}, [])
    if home:
        return _Choice([source[r] for r in home], home, {}, [r for r in needing if not near[r]])
    givers = {source[r]: r for r in needing}
    return _Choice(list(givers) if len(givers) == 1 else [], needing, givers, needing)


def _deal(groups: _Groups, pieces: _Pieces, choices: _Choices, sent: list[int]) -> _Deal:
    """Who lands what, and from which trainer rank; the fewer there are to choose from, the earlier. sent: bytes that each trainer
    rank sends so far, with all that leaves no choice; counted up."""
    members, of, nbytes = len(groups.ranks), choices.of[pieces.group], pieces.nbytes.tolist()
    sets: dict[tuple[int, ...], int] = {(): 0}
    holder = np.tile(np.arange(members), (len(of), 1))
    giver, given = holder.copy(), np.zeros_like(holder)
    landed = [0] * members
    for i in _fewest_first([len(c.landing) for c in choices.all], of):
        choice = choices.all[of[i]]
        land = min(choice.landing, key=landed.__getitem__)
        landed[land] += nbytes[i]
        others = tuple(r for r in choice.others if r != land)
        holder[i, list(others)] = land
        given[i, land] = sets.setdefault(others, len(sets))
    for i in _fewest_first([len(c.givers) for c in choices.all], of):
        givers = choices.all[of[i]].givers
        trainer = min(givers, key=sent.__getitem__)
        giver[i, holder[i, givers[trainer]]] = givers[trainer]
        sent[trainer] += nbytes[i] if len(givers) > 1 else 0
    return _Deal(holder, giver, given, list(sets))


def _fewest_first(count: list[int], of: Int) -> list[int]:
    """Pieces for which there is something to choose, those with the fewest choices first. count: of each choice."""
    many = np.array(count, np.int64)[of]
    return [int(i) for i in np.argsort(many, kind="stable") if many[i]]


def _rows(plan: Plan, groups: _Groups, pieces: _Pieces, deal: _Deal) -> dict[int, Forwarded]:
    """The tables of the host's engine ranks."""
    width = groups.item[pieces.group]
    runs = deal.given * (1 + math.ceil(math.log2(max(ITEMSIZE.values())))) + np.log2(width).astype(np.int64)[:, None]
    gives: list[dict[tuple[int, int], list[int]]] = [{} for _ in groups.ranks]
    handed = np.argwhere(deal.given > 0)
    for i, member in handed.tolist():
        ranks = [int(groups.ranks[r]) for r in deal.sets[int(deal.given[i, member])]]
        gives[member].setdefault((int(pieces.number[i]), int(runs[i, member])), ranks)
    return {int(rank): _rows_of(plan, groups, pieces, deal, runs, r, gives[r]) for r, rank in enumerate(groups.ranks)}


def _rows_of(
    plan: Plan,
    groups: _Groups,
    pieces: _Pieces,
    deal: _Deal,
    runs: Int,
    member: int,
    gives: dict[tuple[int, int], list[int]],
) -> Forwarded:
    mine = np.flatnonzero(groups.move[pieces.group, member] >= 0)
    group, holder = pieces.group[mine], deal.holder[mine, member]
    giver = deal.giver[mine, holder]
    lo = groups.lo[group] + pieces.start[mine]
    move, given_by = groups.move[group, member], groups.move[group, giver]
    start = lo - plan.lo[move]
    part = boxes_of(plan, move, start, pieces.extent[mine])
    sent = boxes_of(plan, given_by, lo - plan.lo[given_by], pieces.extent[mine])
    part.source, part.source_offset, part.source_strides = sent.source, sent.source_offset, sent.source_strides
    rows = Rows(part, pieces.number[mine], groups.ranks[holder], runs[mine, holder], groups.source[group, giver], gives)
    own = np.cumsum(plan.target_rank == groups.ranks[member]) - 1
    return Forwarded(rows, own[move], start)


def sent_by(found: Sequence[Schedule], rank: int) -> Iterator[Cut]:
    """For each engine rank what trainer rank `rank` sends it, with rounds as the target's host counts them."""
    for s in found:
        rows = np.flatnonzero(s.source == rank)
        number = np.array(s.numbers, np.int64)[s.number]
        yield s.plan, number, s.run, rows[np.lexsort((s.offset[rows], s.run[rows], s.number[rows]))]
