"""The plan: which bytes of which trainer rank go to which bytes of which engine rank. Pure data, computed once, proved first.

`build_plan` intersects the sources' boxes with the targets' boxes. It either returns a plan in which every target element is
written exactly once, or raises one PlanError that lists everything that is missing, offered twice or doesn't fit.

A rank's part of the plan depends only on the manifest, the sources and that rank's own targets. So an engine worker can plan
for itself, the sender can plan for all, and equal digests prove that they agree.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.box import Int, describe, volume
from vllm_refit_ext.core.coverage import repeated, unoffered
from vllm_refit_ext.core.dtypes import CASTS, ITEMSIZE
from vllm_refit_ext.core.errors import PlanError, Problem
from vllm_refit_ext.core.manifest import Manifest, suggest_each
from vllm_refit_ext.core.placement import Buffer, Placements
from vllm_refit_ext.core.replicas import Atoms, atoms_of, choose

PAIRS_AT_ONCE = 1 << 21
"""Target rows are joined in pieces of about this many candidate pairs, so that the largest plan stays within memory."""


class Edge(msgspec.Struct, frozen=True):
    """Bytes that one source rank gives to one target rank in a refit."""

    source: int
    target: int
    nbytes: int
    moves: int


class ByRank:
    """Rows of a table grouped by rank, so that all ranks together cost no more than the rows."""

    def __init__(self, rank: Int) -> None:
        """rank: int64 [n], of each row, 0 or more."""
        narrow = np.min_scalar_type(int(rank.max(initial=0)))  # numpy sorts 16 bits by radix
        self._order = np.argsort(rank.astype(narrow), kind="stable")
        self._begin = np.concatenate([[0], np.cumsum(np.bincount(rank))])

    def of(self, rank: int) -> Int:
        """Rows of `rank`, rising, int64 [m]."""
        if rank + 1 >= len(self._begin):
            return np.zeros(0, np.int64)
        return self._order[self._begin[rank] : self._begin[rank + 1]]


class Plan:
    """A table of moves. A move takes the box lo..lo+extent of a tensor from a source buffer to a target buffer.

    Attributes
    ----------
    names: tensor names in manifest order; `tensor[i]` indexes it. sources, targets: lists of Buffer.
    tensor, source, target: int64 [n]. lo, extent: int64 [n, D] elements. source_offset, target_offset: int64 [n] bytes.
    source_strides, target_strides: int64 [n, D] bytes.
    scale_of: int64 [names]: which tensor holds a tensor's sent scales, -1 where none does. depth: int64 [names]: dimensions
        of each tensor.
    """

    COLUMNS = ("tensor", "source", "target", "lo", "extent", "source_offset", "source_strides", "target_offset", "target_strides")

    def __init__(self, manifest: Manifest, sources: Sequence[Buffer], targets: Sequence[Buffer], **columns: Int) -> None:
        self.manifest = manifest
        self.names = list(manifest.tensors)
        self.sources, self.targets = list(sources), list(targets)
        self.tensor, self.source, self.target = columns["tensor"], columns["source"], columns["target"]
        self.lo, self.extent = columns["lo"], columns["extent"]
        self.source_offset, self.source_strides = columns["source_offset"], columns["source_strides"]
        self.target_offset, self.target_strides = columns["target_offset"], columns["target_strides"]
        self._source_rank: Int = np.array([b.rank for b in self.sources], np.int64)
        self._target_rank: Int = np.array([b.rank for b in self.targets], np.int64)
        self._source_item: Int = np.array([ITEMSIZE[b.dtype] for b in self.sources], np.int64)
        specs = manifest.tensors.values()
        coded = {spec.scale for spec in specs if spec.format == "mxfp8"}
        index = {name: i for i, name in enumerate(self.names) if name in coded}
        self.scale_of: Int = np.array([index.get(t.scale, -1) if t.format == "mxfp8" else -1 for t in specs], np.int64)
        self.depth: Int = np.array([len(t.shape) for t in specs], np.int64)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def source_rank(self) -> Int:
        """Trainer rank of each move, int64 [n]."""
        return self._source_rank[self.source] if len(self) else np.zeros(0, np.int64)

    @property
    def target_rank(self) -> Int:
        """Engine rank of each move, int64 [n]."""
        return self._target_rank[self.target] if len(self) else np.zeros(0, np.int64)

    @property
    def nbytes(self) -> Int:
        """Bytes of each move as the source holds them, int64 [n]: what is sent."""
        return (
            np.prod(self.extent, axis=1, dtype=np.int64) * self._source_item[self.source] if len(self) else np.zeros(0, np.int64)
        )

    @property
    def is_scale(self) -> NDArray[np.bool_]:
        """The moves of scales that are sent beside their codes, bool [n]."""
        scales = np.zeros(len(self.names), bool)
        scales[self.scale_of[self.scale_of >= 0]] = True
        mask: NDArray[np.bool_] = scales[self.tensor]
        return mask

    def select(self, keep: NDArray[np.bool_] | Int) -> Plan:
        """The moves in `keep` (mask or indices). Names, buffers and what is known of them are shared: it costs no more
        than its moves."""
        part = copy.copy(self)
        for known in ("by_source", "_moves_into", "_moves_from"):
            part.__dict__.pop(known, None)
        for column in self.COLUMNS:
            setattr(part, column, getattr(self, column)[keep])
        return part

    def into(self, accepts: Callable[[Buffer], bool]) -> NDArray[np.bool_]:
        """The moves into target buffers that `accepts` takes, bool [n]. Each buffer that moves use is asked once."""
        good = np.zeros(len(self.targets), bool)
        used = np.unique(self.target).tolist()
        good[used] = [accepts(self.targets[t]) for t in used]
        mask: NDArray[np.bool_] = good[self.target]
        return mask

    def with_scales(self, moves: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """`moves` (bool [n]) and the moves of all sent scales of the tensors of codes among them."""
        wanted = np.zeros(len(self.names), bool)
        scales = self.scale_of[self.tensor[moves]]
        wanted[scales[scales >= 0]] = True
        mask: NDArray[np.bool_] = moves | wanted[self.tensor]
        return mask

    def for_target(self, rank: int) -> Plan:
        """The moves into engine rank `rank`."""
        return self.select(self._moves_into.of(rank))

    def for_source(self, rank: int) -> Plan:
        """The moves out of trainer rank `rank`."""
        return self.select(self._moves_from.of(rank))

    @functools.cached_property
    def _moves_into(self) -> ByRank:
        return ByRank(self.target_rank)

    @functools.cached_property
    def _moves_from(self) -> ByRank:
        return ByRank(self.source_rank)

    @functools.cached_property
    def source_buffers(self) -> ByRank:
        """Numbers of the source buffers, by trainer rank."""
        return ByRank(self._source_rank)

    def read_buffers(self, ranks: int) -> list[Int]:
        """For each of `ranks` trainer ranks, which of its own buffers are read, counted from its first: int64 [m], rising."""
        read = np.zeros(len(self.sources), bool)
        read[self.source] = True
        return [np.flatnonzero(read[self.source_buffers.of(rank)]) for rank in range(ranks)]

    @functools.cached_property
    def _target_buffers(self) -> ByRank:
        return ByRank(self._target_rank)

    def edges(self) -> list[Edge]:
        """Bytes and moves for every pair of ranks that exchange any, sorted by (source, target)."""
        if not len(self):
            return []
        pairs = np.stack([self.source_rank, self.target_rank], axis=1)
        distinct, which = np.unique(pairs, axis=0, return_inverse=True)
        which = which.reshape(-1)
        total = np.zeros(len(distinct), np.int64)
        np.add.at(total, which, self.nbytes)
        moves = np.bincount(which, minlength=len(distinct))
        return [Edge(int(s), int(t), int(b), int(m)) for (s, t), b, m in zip(distinct, total, moves, strict=True)]

    @functools.cached_property
    def by_source(self) -> dict[int, int]:
        """Bytes of all moves by source rank."""
        ranks, which = np.unique(self.source_rank, return_inverse=True)
        total = np.zeros(len(ranks), np.int64)
        np.add.at(total, which.reshape(-1), self.nbytes)
        return dict(zip(ranks.tolist(), total.tolist(), strict=True))

    def digest(self, rank: int) -> str:
        """sha256 of everything that engine rank `rank` will do. Equal on both sides, or they must not move a byte."""
        own = self.for_target(rank)
        mine = self._target_buffers.of(rank)
        state = self._of_manifest.copy()
        targets = [self.targets[i] for i in mine.tolist()]
        sources = [(i, self.sources[i]) for i in np.unique(own.source).tolist()]
        state.update(msgspec.msgpack.encode([(b.name, b.dtype, b.shape, b.layout) for b in targets]))
        state.update(msgspec.msgpack.encode([(i, b.name, b.rank, b.dtype, b.shape, b.layout) for i, b in sources]))
        for column in self.COLUMNS:
            values = getattr(own, column)
            values = np.searchsorted(mine, values) if column == "target" else values
            if values.ndim == 2:  # padded dimensions differ between a rank's own plan and the joint one
                values = values[:, : self.depth.max(initial=0)]
            state.update(np.ascontiguousarray(values, dtype="<i8").tobytes())
        return str(state.hexdigest())

    @functools.cached_property
    def _of_manifest(self) -> Any:
        return hashlib.sha256(self.manifest.digest.encode())


def build_plan(manifest: Manifest, sources: Placements, targets: Placements, distance: NDArray[np.int8] | None = None) -> Plan:
    """The plan from `sources` (what trainer ranks hold) to `targets` (what engine ranks need).

    distance: int8 [trainer ranks, engine ranks], smaller is nearer; replicas at the smallest distance are used. Without it all
    replicas are equally near.

    Raises PlanError listing every target tensor that the manifest lacks, every dtype pair that a move may not convert, every
    box outside its tensor, and every target box that the sources do not cover.
    """
    depth = max((sources.lo.shape[1], targets.lo.shape[1], *(len(t.shape) for t in manifest.tensors.values())))
    index = {name: i for i, name in enumerate(manifest.tensors)}
    problems: list[Problem] = []
    source_tensor = _tensor_index(sources, index)
    target_tensor = _tensor_index(targets, index)
    problems += _name_problems(targets, target_tensor, index)
    sources, source_tensor = _known(sources.widened(depth), source_tensor)
    targets, target_tensor = _known(targets.widened(depth), target_tensor)
    for side, table, tensor in (("source", sources, source_tensor), ("target", targets, target_tensor)):
        problems += _shape_problems(side, table, tensor, manifest)
    problems += _dtype_problems(sources, source_tensor, targets, target_tensor, manifest)
    if problems:
        raise PlanError.of(problems, f"no plan: {len(problems)} problem(s)")

    atoms = atoms_of(source_tensor, sources.lo, sources.hi, sources.rank)
    if problems := repeated(sources, source_tensor, _elsewhere(sources, atoms), list(index)):
        raise PlanError.of(problems, f"no plan: {len(problems)} tensor(s) are offered twice by a rank")
    row, atom, lo, hi = overlaps(targets.lo, targets.hi, target_tensor, atoms, len(index))
    problems = unoffered(targets, target_tensor, row, lo, hi, list(index))
    if problems:
        raise PlanError.of(problems, f"no plan: {len(problems)} target box(es) are not covered by what the trainer offers")

    # Manifest order keeps layers together; within a tensor, order by target rank and box, so that both ends of an edge agree.
    order = np.lexsort((*lo.T[::-1], targets.rank[row], target_tensor[row]))
    row, atom, lo, hi = row[order], atom[order], lo[order], hi[order]
    source_row = choose(atoms, atom, targets.rank[row], volume(lo, hi), distance)
    return Plan(
        manifest,
        sources.buffers,
        targets.buffers,
        tensor=target_tensor[row],
        source=sources.buffer[source_row],
        target=targets.buffer[row],
        lo=lo,
        extent=hi - lo,
        source_offset=sources.offset[source_row] + ((lo - sources.lo[source_row]) * sources.strides[source_row]).sum(axis=1),
        source_strides=sources.strides[source_row],
        target_offset=targets.offset[row] + ((lo - targets.lo[row]) * targets.strides[row]).sum(axis=1),
        target_strides=targets.strides[row],
    )


def _elsewhere(sources: Placements, atoms: Atoms) -> Int:
    """Pairs of rows with which one rank offers an atom from different bytes, int64 [n, 2]."""
    atom, first, second = atoms.repeats.T
    lo, strides = atoms.lo[atom], sources.strides
    begin = [sources.offset[row] + ((lo - sources.lo[row]) * strides[row]).sum(axis=1) for row in (first, second)]
    apart = (sources.buffer[first] != sources.buffer[second]) | (begin[0] != begin[1])
    apart |= ((atoms.hi[atom] - lo > 1) & (strides[first] != strides[second])).any(axis=1)
    return atoms.repeats[apart, 1:]


def _tensor_index(table: Placements, index: dict[str, int]) -> Int:
    lookup = np.fromiter((index.get(name, -1) for name in table.names), np.int64, len(table.names))
    return lookup[table.tensor] if len(table) else np.zeros(0, np.int64)


def _known(table: Placements, tensor: Int) -> tuple[Placements, Int]:
    keep = tensor >= 0
    return (table, tensor) if keep.all() else (table.select(keep), tensor[keep])


def _name_problems(targets: Placements, tensor: Int, index: dict[str, int]) -> list[Problem]:
    missing = np.unique(targets.tensor[tensor < 0])
    return [
        Problem("the engine needs it and the trainer does not offer it", f"tensor {name!r}", do=do)
        for name, do in suggest_each((targets.names[i] for i in missing), index)
    ]


def _shape_problems(side: str, table: Placements, tensor: Int, manifest: Manifest) -> list[Problem]:
    depth = table.lo.shape[1]
    shapes = np.array([[*t.shape, *([1] * (depth - len(t.shape)))] for t in manifest.tensors.values()], np.int64).reshape(
        -1, depth
    )
    bad = np.flatnonzero((table.hi > shapes[tensor]).any(axis=1) | (table.lo < 0).any(axis=1))
    names = list(manifest.tensors)
    problems = {}
    for i in bad:
        name = names[tensor[i]]
        box = describe(table.lo[i], table.hi[i])
        where = f"tensor {name!r}, {side} rank {table.rank[i]}, buffer {table.buffers[table.buffer[i]].name!r}"
        wanted = f"within {list(manifest.tensors[name].shape)}"
        problems[name] = Problem("its box reaches outside the shape in the manifest", where, box, wanted)
    return list(problems.values())


def _dtype_problems(
    sources: Placements, source_tensor: Int, targets: Placements, target_tensor: Int, manifest: Manifest
) -> list[Problem]:
    """Every tensor whose buffers disagree with the manifest, or whose target can't take what is sent."""
    problems = []
    names, specs = list(manifest.tensors), list(manifest.tensors.values())
    dtypes = sorted(ITEMSIZE)

    def pairs(table: Placements, tensor: Int) -> list[tuple[int, int]]:
        number = {dtype: i for i, dtype in enumerate(dtypes)}
        code = np.array([number[b.dtype] for b in table.buffers], np.int8)
        found = np.zeros((len(names), len(dtypes)), bool)
        found[tensor, code[table.buffer]] = True
        return [(t, c) for t, c in np.argwhere(found).tolist()]

    for t, code in pairs(sources, source_tensor):
        if dtypes[code] != specs[t].dtype:
            problems.append(Problem("the source holds another dtype", f"tensor {names[t]!r}", dtypes[code], specs[t].dtype))
    for t, code in pairs(targets, target_tensor):
        got, wanted = specs[t].dtype, dtypes[code]
        if got != wanted and (got, wanted) not in CASTS:
            what = "a move may not convert this dtype"
            problems.append(Problem(what, f"tensor {names[t]!r}", got, wanted, "offer the tensor in the engine's dtype"))
    return problems


def overlaps(lo: Int, hi: Int, tensor: Int, atoms: Atoms, count: int) -> tuple[Int, Int, Int, Int]:
    """Every overlap of a box with an atom of its tensor, in the order of the boxes.

    lo, hi: int64 [n, D]. tensor: int64 [n], below `count`. Returns box, atom, int64 [m], and the common box lo, hi, int64 [m, D].
    """
    first = np.searchsorted(atoms.tensor, np.arange(count))
    last = np.searchsorted(atoms.tensor, np.arange(count), side="right")
    per_row = (last - first)[tensor]
    pieces: list[tuple[Int, Int, Int, Int]] = []
    edges = [0]
    running = np.cumsum(per_row)
    while edges[-1] < len(lo):
        done = running[edges[-1] - 1] if edges[-1] else 0
        edges.append(max(edges[-1] + 1, int(np.searchsorted(running, done + PAIRS_AT_ONCE))))
    for start, stop in zip(edges, edges[1:], strict=False):
        rows = np.arange(start, min(stop, len(lo)))
        repeats = per_row[rows]
        row = np.repeat(rows, repeats)
        within = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        atom = first[tensor[row]] + within
        low, high = np.maximum(lo[row], atoms.lo[atom]), np.minimum(hi[row], atoms.hi[atom])
        keep = (high > low).all(axis=1)
        pieces.append((row[keep], atom[keep], low[keep], high[keep]))
    if not pieces:
        depth = lo.shape[1]
        none = np.zeros(0, np.int64)
        return none, none, np.zeros((0, depth), np.int64), np.zeros((0, depth), np.int64)
    row, atom, low, high = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return row, atom, low, high
