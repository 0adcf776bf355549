"""Who gives what: the distinct boxes that sources hold, who holds each, and a balanced choice among the holders.

Data parallelism, context parallelism and replicated heads put the same box on many trainer ranks. An *atom* is a box that some
set of ranks holds whole and that overlaps no other atom. Usually the atoms are the distinct boxes themselves; where distinct
boxes overlap in part, they are cut on their common grid.

The choice is made for each target rank by itself, so that no rank needs to know another's targets to plan: its boxes are dealt
out, largest first, each to the holder that this target rank reads least from so far, with what it must read anyway counted
before. Equals take turns from another holder on for each target rank. Each target loads its sources evenly, so the sum over all
targets is even too.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.box import Int, cells, disjoint

AT_ONCE = 1 << 23
"""Numbers that are compared at once, so that the deal of the largest plan stays within memory."""


class Atoms(msgspec.Struct):
    """Disjoint source boxes, sorted by tensor.

    tensor: int64 [a]. lo, hi: int64 [a, D]. start: int64 [a + 1]; the holders of atom i are rows
    `holder[start[i]:start[i+1]]` of the source table, one a rank, in rank order. rank: int64, the holders' ranks.
    repeats: int64 [r, 3], (atom, a holder, another row of the same rank that holds the atom too).
    """

    tensor: Int
    lo: Int
    hi: Int
    start: Int
    holder: Int
    rank: Int
    repeats: Int


def atoms_of(tensor: Int, lo: Int, hi: Int, rank: Int) -> Atoms:
    """The atoms of a source table. tensor, rank: int64 [n]; lo, hi: int64 [n, D]. Empty boxes are left out."""
    rows = np.flatnonzero((hi > lo).all(axis=1))
    order = rows[np.lexsort((rank[rows], *hi[rows].T, *lo[rows].T, tensor[rows]))]
    key = np.concatenate([tensor[order, None], lo[order], hi[order]], axis=1)
    new = np.ones(len(order), bool)
    new[1:] = (key[1:] != key[:-1]).any(axis=1)
    begin = np.flatnonzero(new)
    start, none = np.append(begin, len(order)), np.zeros((0, 3), np.int64)
    atoms = Atoms(tensor[order[begin]], lo[order[begin]], hi[order[begin]], start, order, rank[order], none)
    overlapping = _overlapping(atoms)
    if len(overlapping):
        atoms = _cut(atoms, set(overlapping.tolist()))
    return _one_row_a_rank(atoms)


def _overlapping(atoms: Atoms) -> Int:
    """Tensors whose distinct boxes share elements. Equal sets of boxes (the layers of a model) are tested once."""
    edges = np.flatnonzero(np.diff(atoms.tensor, prepend=-1, append=-1))
    seen: dict[bytes, bool] = {}
    bad = []
    for a, b in zip(edges, edges[1:], strict=False):
        if b - a < 2:
            continue
        key = atoms.lo[a:b].tobytes() + atoms.hi[a:b].tobytes()
        if key not in seen:
            seen[key] = disjoint(atoms.lo[a:b], atoms.hi[a:b])
        if not seen[key]:
            bad.append(int(atoms.tensor[a]))
    return np.array(bad, np.int64)


def _cut(atoms: Atoms, tensors: set[int]) -> Atoms:
    """The same atoms with the boxes of `tensors` cut on their common grid; a cell is held by all whose box contains it."""
    out_tensor, out_lo, out_hi, out_holder, out_rank, sizes = [], [], [], [], [], []
    edges = np.flatnonzero(np.diff(atoms.tensor, prepend=-1, append=-1))
    for a, b in zip(edges, edges[1:], strict=False):
        t = int(atoms.tensor[a])
        if t not in tensors:
            boxes = [(atoms.lo[i], atoms.hi[i], [i]) for i in range(a, b)]
        else:
            grid, count = cells(atoms.lo[a:b], atoms.hi[a:b])
            boxes = []
            for cell in np.argwhere(count > 0):
                lo = np.array([grid[d][i] for d, i in enumerate(cell)])
                hi = np.array([grid[d][i + 1] for d, i in enumerate(cell)])
                inside = (atoms.lo[a:b] <= lo).all(axis=1) & (atoms.hi[a:b] >= hi).all(axis=1)
                boxes.append((lo, hi, [a + i for i in np.flatnonzero(inside)]))
        for lo, hi, members in boxes:
            rows = np.concatenate([np.arange(atoms.start[i], atoms.start[i + 1]) for i in members])
            rows = rows[np.argsort(atoms.rank[rows], kind="stable")]
            out_tensor.append(t)
            out_lo.append(lo)
            out_hi.append(hi)
            out_holder.append(atoms.holder[rows])
            out_rank.append(atoms.rank[rows])
            sizes.append(len(rows))
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Atoms(
        np.array(out_tensor, np.int64),
        np.array(out_lo),
        np.array(out_hi),
        start,
        np.concatenate(out_holder),
        np.concatenate(out_rank),
        atoms.repeats,
    )


def _one_row_a_rank(atoms: Atoms) -> Atoms:
    """Keep the first of several rows that one rank has for the same atom."""
    owner = np.repeat(np.arange(len(atoms.tensor)), np.diff(atoms.start))
    keep = np.ones(len(owner), bool)
    keep[1:] = (owner[1:] != owner[:-1]) | (atoms.rank[1:] != atoms.rank[:-1])
    size = np.bincount(owner[keep], minlength=len(atoms.tensor))
    start = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
    again = np.flatnonzero(~keep)
    first = np.maximum.accumulate(np.where(keep, np.arange(len(keep)), 0))[again]
    repeats = np.stack([owner[again], atoms.holder[first], atoms.holder[again]], axis=1)
    return Atoms(atoms.tensor, atoms.lo, atoms.hi, start, atoms.holder[keep], atoms.rank[keep], repeats)


def choose(atoms: Atoms, atom: Int, target_rank: Int, size: Int, distance: NDArray[np.int8] | None) -> Int:
    """The source row that serves each overlap.

    atom, target_rank, size: int64 [n], the atom, the reading rank and the elements of each overlap. distance: see `build_plan`.
    Returns int64 [n].
    """
    copies = np.diff(atoms.start)
    chosen = atoms.holder[atoms.start[atom]] if len(atom) else np.zeros(0, np.int64)
    many = np.flatnonzero(copies[atom] > 1) if len(atom) else np.zeros(0, np.int64)
    if not len(many):
        return chosen
    sets, members = _holder_sets(atoms, np.unique(atom[many]))
    names, known = np.unique(target_rank), np.unique(atoms.rank)
    load = np.zeros((len(names), len(known)), np.int64)
    alone = copies[atom] == 1
    holds = atoms.rank[atoms.start[atom[alone]]]
    np.add.at(load, (np.searchsorted(names, target_rank[alone]), np.searchsorted(known, holds)), size[alone])
    # The sets with the fewest holders first, and of each set the largest boxes. The manifest order breaks ties, so that the deal
    # is the same everywhere.
    group, reader = sets[atom[many]], target_rank[many]
    order = np.lexsort((many, -size[many], group, copies[atom[many]], reader))
    many, group, reader = many[order], group[order], reader[order]
    edges = np.flatnonzero(np.concatenate([[True], (group[1:] != group[:-1]) | (reader[1:] != reader[:-1]), [True]]))
    # The first set of every reader, then the second and so on. Readers that take boxes of the same sizes from equally many
    # holders are dealt to at once.
    alike: dict[tuple[int, int, bytes], list[tuple[int, Int]]] = {}
    level = 0
    for a, b in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        level = level + 1 if a and reader[a] == reader[a - 1] else 0
        ranks = members[group[a]]
        near = np.arange(len(ranks))
        if distance is not None:
            away = distance[ranks, reader[a]]
            near = np.flatnonzero(away == away.min())
        alike.setdefault((level, len(near), size[many[a:b]].tobytes()), []).append((a, near))
    for (_, holders, raw), parts in sorted(alike.items(), key=lambda entry: entry[0][0]):
        sizes = np.frombuffer(raw, np.int64)
        step = max(1, AT_ONCE // (len(sizes) * min(len(sizes), holders) + holders))
        for first in range(0, len(parts), step):
            begin = np.array([a for a, _ in parts[first : first + step]], np.int64)
            near = np.stack([n for _, n in parts[first : first + step]])
            ranks = np.stack([members[g][n] for g, n in zip(group[begin], near, strict=True)])
            at = np.searchsorted(names, reader[begin])[:, None], np.searchsorted(known, ranks)
            mine = load[at]
            pick = deal(sizes, mine, reader[begin])
            load[at] = mine
            boxes = many[begin[:, None] + np.arange(len(sizes))]
            chosen[boxes] = atoms.holder[atoms.start[atom[boxes]] + np.take_along_axis(near, pick, axis=1)]
    return chosen


def deal(size: Int, load: Int, first: Int) -> Int:
    """Deal out boxes to some readers, each to the holder that this reader has read least from so far.

    size: int64 [n], falling, the same for all readers. load: int64 [readers, holders], what is read so far; changed. first: int64
    [readers], who of equals begins. Returns int64 [readers, n], the holder of each.
    """
    readers, holders = load.shape
    dealt = np.zeros((readers, len(size)), np.int64)
    turn = (first[:, None] + np.arange(holders)) % holders
    had = np.take_along_axis(load, turn, axis=1)
    edges = np.flatnonzero(np.diff(size, prepend=-1, append=-1))
    for a, b in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        # Of boxes of one size holder h has had[h] + m * size before its m-th: the least of these numbers, in order. No more
        # holders than boxes can be among them.
        one, count = int(size[a]), b - a
        least = np.sort(np.argsort(had, axis=1, kind="stable")[:, :count], axis=1)
        low = np.take_along_axis(had, least, axis=1)
        most = min(count, -(-int(np.ptp(low, axis=1).max()) // one) + -(-count // low.shape[1]) + 1)
        before = (low[:, :, None] + one * np.arange(most)).reshape(readers, -1)
        who = np.take_along_axis(least, np.argsort(before, axis=1, kind="stable")[:, :count] // most, axis=1)
        dealt[:, a:b] = np.take_along_axis(turn, who, axis=1)
        np.add.at(had, (np.arange(readers)[:, None], who), one)
    np.put_along_axis(load, turn, had, axis=1)
    return dealt


def _holder_sets(atoms: Atoms, which: Int) -> tuple[Int, list[Int]]:
    """Number the distinct sets of holder ranks: set of each atom in `which` (int64 [all atoms]), ranks of each set."""
    number: dict[bytes, int] = {}
    members: list[Int] = []
    sets = np.full(len(atoms.tensor), -1, np.int64)
    for i in which:
        ranks = atoms.rank[atoms.start[i] : atoms.start[i + 1]]
        key = ranks.tobytes()
        if key not in number:
            number[key] = len(members)
            members.append(ranks)
        sets[i] = number[key]
    return sets, members
