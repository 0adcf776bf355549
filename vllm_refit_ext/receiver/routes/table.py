"""From recorded events to a table of placements, with everything that is not a copy named."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.copies import through
from vllm_refit_ext.core.affine import Box, Dim, TooManyBoxesError, decompose
from vllm_refit_ext.core.dtypes import CASTS
from vllm_refit_ext.core.placement import Buffer, Placements
from vllm_refit_ext.receiver.routes import coverage
from vllm_refit_ext.receiver.routes.created import Created
from vllm_refit_ext.receiver.routes.recorder import Copy, Recorder, Write


class Routes(msgspec.Struct, frozen=True):
    """Where one worker's own loader puts each checkpoint tensor.

    placements: HF boxes in this worker's parameters as created (row-major, layout "plain"); a Buffer's name is the
      parameter's full name. Only names whose every write is a copy are in it.
    computed: HF name -> what the loader does to it beyond copying; such a name takes the engine's own reload.
    dropped: HF name -> why the loader puts nothing of it on this rank.
    unwritten: parameter -> the elements that no offered tensor fills.
    exempt: parameter or persistent buffer -> why it may stay unwritten.
    reinterpreted: HF name -> (its dtype, the parameter's) where bytes move between two dtypes of one size.
    aliases: other name of a shared parameter -> the name used here.
    filled: parameter -> (how many of its elements checkpoint tensors fill, the names of these tensors).
    seconds: time that recording took.
    """

    placements: Placements
    computed: dict[str, str]
    dropped: dict[str, str]
    unwritten: dict[str, str]
    exempt: dict[str, str]
    reinterpreted: dict[str, tuple[str, str]]
    aliases: dict[str, str]
    filled: dict[str, tuple[int, frozenset[str]]]
    seconds: float

    def wanted(self, names: Collection[str]) -> dict[str, int]:
        """Elements of each parameter that loading `names` alone must write: all that tensors fill, or one where it is filled by
        others too."""
        chosen = frozenset(names)
        return {p: count if who <= chosen else 1 for p, (count, who) in self.filled.items() if who & chosen}


MayStay = Callable[[str, torch.Tensor, Created, int, bool], str]
"""(name, tensor as created, all of them, elements that nothing fills, whether these are all) -> why that is right, else empty."""


class _Region(msgspec.Struct):
    """What one event wrote: boxes [n, D] of the parameter. `live` until something later replaces it."""

    event: Copy | Write
    lo: coverage.Int
    hi: coverage.Int
    live: bool = True

    @property
    def sources(self) -> frozenset[int]:
        event = self.event
        if isinstance(event, Write):
            return event.sources
        return frozenset({event.source}) if event.image is None else frozenset(p.source for p in event.image.parts)


class _Sorter:
    """Sorts the events of one recording: copies that stand, names that are computed, elements that nothing fills."""

    def __init__(self, created: Created, recorder: Recorder, names: Sequence[str], may_stay: MayStay) -> None:
        self.created, self.recorder, self.names, self.may_stay = created, recorder, names, may_stay
        self.computed = dict(recorder.computed)
        self.overwritten: dict[int, str] = {}
        self.unwritten: dict[str, str] = {}
        self.exempt: dict[str, str] = {}
        self.reinterpreted: dict[int, tuple[str, str]] = {}
        self.filled: dict[str, tuple[int, frozenset[str]]] = {}
        self._boxes: dict[Any, list[Box]] = {}
        self._arrays: dict[Any, tuple[coverage.Int, coverage.Int]] = {}
        self._tiles: dict[Any, list[tuple[int, int]]] = {}

    def sort(self) -> list[_Region]:
        """Every region that stands, in recorded order for each parameter."""
        regions: list[list[_Region]] = [[] for _ in self.recorder.shapes]
        for event in self.recorder.events:
            try:
                lo, hi = self._written(event)
            except TooManyBoxesError as error:
                self.compute(_Region(event, *_nothing(0)).sources, f"its copy into parameter {event.target} needs {error}")
                continue
            if len(lo):
                regions[event.target].append(_Region(event, lo, hi))
        for index, (name, meta) in enumerate(self.created.tensors.items()):
            self._settle(index, name, meta, regions[index])
        return [r for of_one in regions for r in of_one if r.live]

    def boxes(self, shape: tuple[int, ...], start: int, dims: Sequence[Dim]) -> list[Box]:
        """`decompose`, remembered: a model repeats few kinds of copies many times."""
        key = (shape, start, tuple(dims))
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = decompose(shape, start, dims)
        return found

    def _written(self, event: Copy | Write) -> tuple[coverage.Int, coverage.Int]:
        """Boxes of the parameter that the event writes, int64 [n, D] each; those of one row are shared with other rows."""
        shape = self.recorder.shapes[event.target]
        dims = tuple((n, d, 0) for n, _, d in event.dims)
        if not shape:
            return np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
        # All experts of a layer are written alike, so the boxes are kept for the first and moved along dimension 0.
        pitch = 1
        for n in shape[1:]:
            pitch *= n
        row, rest = divmod(event.at, pitch) if pitch else (0, 0)
        key = (shape, rest, dims)
        found = self._arrays.get(key)
        if found is None:
            boxes = decompose((shape[0] + row, *shape[1:]), rest, dims)
            lo = np.array([b[0] for b in boxes], np.int64).reshape(-1, len(shape))
            hi = np.array([b[1] for b in boxes], np.int64).reshape(-1, len(shape))
            found = self._arrays[key] = lo, hi
        if not row:
            return found
        lo, hi = found[0].copy(), found[1].copy()
        lo[:, 0] += row
        hi[:, 0] += row
        return lo, hi

    def _settle(self, index: int, name: str, meta: torch.Tensor, regions: list[_Region]) -> None:
        """Decide what stands in one parameter, and what is missing."""
        shape = self.recorder.shapes[index] or (1,)
        total = int(np.prod(shape, dtype=np.int64))
        if not regions:
            if total:
                self._report(name, meta, shape, *_nothing(len(shape)))
            return
        lo = np.concatenate([r.lo for r in regions])
        hi = np.concatenate([r.hi for r in regions])
        key = (lo.tobytes(), hi.tobytes())
        pairs = self._tiles.get(key)
        if pairs is None:
            owner = np.repeat(np.arange(len(regions)), [len(r.lo) for r in regions])
            pairs = self._tiles[key] = sorted({(int(owner[a]), int(owner[b])) for a, b in coverage.overlaps(lo, hi)})
        for first, second in pairs:
            self._conflict(name, regions, first, second)
        if pairs or int(coverage.volumes(lo, hi).sum()) != total:
            self._report(name, meta, shape, lo, hi)
        sourced = [r for r in regions if r.live and r.sources]
        if sourced:
            lo, hi = np.concatenate([r.lo for r in sourced]), np.concatenate([r.hi for r in sourced])
            count = total - coverage.missing(shape, lo, hi)[0] if pairs else int(coverage.volumes(lo, hi).sum())
            who = frozenset[int]().union(*(r.sources for r in sourced))
            self.filled[name] = min(count, total), frozenset(self.names[i] for i in who)

    def _conflict(self, name: str, regions: Sequence[_Region], first: int, second: int) -> None:
        """Two events wrote some of the same elements: the later one stands, if that is what the loader means."""
        if first == second:
            self.compute(regions[first].sources, f"one copy writes elements of {name} twice")
            return
        early, late = regions[first], regions[second]
        if not early.sources or not early.live:
            return  # a constant that a copy then replaces
        covered = coverage.missing(self.recorder.shapes[early.event.target], late.lo, late.hi)[0] == 0 or (
            np.array_equal(early.lo, late.lo) and np.array_equal(early.hi, late.hi)
        )
        if isinstance(late.event, Copy) and covered:
            early.live = False
            if early.sources != late.sources:
                by = ", ".join(sorted(self.names[i] for i in late.sources))
                for source in early.sources:
                    self.overwritten[source] = f"overwritten by {by} in {name}"
            return
        how = late.event.op if isinstance(late.event, Write) else "a second copy"
        self.compute(early.sources | late.sources, f"{how} changes elements of {name} that it had filled")

    def _report(self, name: str, meta: torch.Tensor, shape: Sequence[int], lo: coverage.Int, hi: coverage.Int) -> None:
        count, where = coverage.missing(shape, lo, hi)
        if not count:
            return
        total = int(np.prod(shape, dtype=np.int64))
        reason = self.may_stay(name, meta, self.created, count, count == total)
        if reason:
            self.exempt[name] = reason
        else:
            first = f", the first {where}" if where and count < total else ""
            self.unwritten[name] = f"{count} of {total} elements{first}"

    def compute(self, sources: frozenset[int], reason: str) -> None:
        for source in sources:
            self.computed.setdefault(source, reason)


def _nothing(depth: int) -> tuple[coverage.Int, coverage.Int]:
    return np.zeros((0, depth), np.int64), np.zeros((0, depth), np.int64)


def build(
    may_stay: MayStay,
    why_dropped: Callable[[list[str]], dict[str, str]],
    created: Created,
    recorder: Recorder,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    rank: int,
    began: float,
) -> Routes:
    """The routes that a finished recording describes.

    may_stay: why elements may stay unfilled. why_dropped: a reason for each name of which nothing lands on this rank. `began` is
    when it started, by `time.perf_counter`.
    """
    sorter = _Sorter(created, recorder, names, may_stay)
    rows: list[tuple[int, int, Box, int]] = []
    for region in sorter.sort():
        event = region.event
        if isinstance(event, Copy):
            try:
                rows += _rows(sorter, event, names, shapes, dtypes)
            except TooManyBoxesError as error:
                sorter.compute(region.sources, f"its copy into {recorder.target_names[event.target]} needs {error}")
    rows = [row for row in rows if row[0] not in sorter.computed]
    placed = {row[0] for row in rows}
    cleared = dict.fromkeys(recorder.zeroed, "the loader puts zeros in its place on this rank")
    dropped = {
        i: sorter.overwritten.get(i, cleared.get(i, ""))
        for i in range(len(names))
        if i not in placed and i not in sorter.computed
    }
    reasons_of = why_dropped([names[i] for i, reason in dropped.items() if not reason])
    return Routes(
        _placements(rows, recorder, names, shapes, rank),
        {names[i]: reason for i, reason in sorted(sorter.computed.items())},
        {names[i]: reason or reasons_of[names[i]] for i, reason in dropped.items()},
        sorter.unwritten,
        sorter.exempt,
        {names[i]: pair for i, pair in sorter.reinterpreted.items() if i in placed},
        created.aliases,
        sorter.filled,
        time.perf_counter() - began,
    )


def _rows(
    sorter: _Sorter,
    event: Copy,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
) -> list[tuple[int, int, Box, int]]:
    """(source, target, box, first element written) of each box that the copy moves."""
    target = event.target
    if event.image is None:
        moves: Sequence[tuple[int, int, int, Sequence[Dim]]] = [(event.source, event.start, 0, event.dims)]
    else:
        seen = through(event.image, event.start, event.dims)
        if seen is None:
            sorter.compute(
                frozenset(p.source for p in event.image.parts),
                f"only a part of what is copied into {sorter.recorder.target_names[target]} comes from checkpoint tensors",
            )
            return []
        moves = seen
    rows = []
    for source, start, at, dims in moves:
        problem = _dtype_problem(sorter, event, source, dtypes[source])
        if problem:
            sorter.compute(frozenset({source}), f"{problem} on the way into {sorter.recorder.target_names[target]}")
            continue
        rows += [(source, target, box, event.at + at) for box in sorter.boxes(shapes[source], start, dims)]
    return rows


def _dtype_problem(sorter: _Sorter, event: Copy, source: int, offered: torch.dtype) -> str:
    """What is wrong with the dtypes of a move; empty if bytes are sent as they are or by an allowed cast."""
    owned = sorter.recorder.dtypes[event.target]
    have, want = _name(offered), _name(owned)
    seen = offered if event.image is None else event.image.dtype
    if event.target_dtype == owned and event.source_dtype == seen:
        return "" if have == want or (have, want) in CASTS else f"{have} is converted to {want}"
    if event.source_dtype != event.target_dtype or seen != offered:
        return f"{have} is seen as {_name(event.source_dtype)} and {want} as {_name(event.target_dtype)}"
    if have != want:
        sorter.reinterpreted[source] = have, want
    return ""


def _placements(
    rows: Sequence[tuple[int, int, Box, int]],
    recorder: Recorder,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    rank: int,
) -> Placements:
    used = sorted({row[1] for row in rows})
    offered = sorted({row[0] for row in rows})
    buffer_of, tensor_of = {t: i for i, t in enumerate(used)}, {s: i for i, s in enumerate(offered)}
    buffers = [Buffer(recorder.target_names[t], rank, _name(recorder.dtypes[t]), recorder.shapes[t]) for t in used]
    depth = max((len(shapes[s]) for s in offered), default=0)
    lo, hi = np.zeros((len(rows), depth), np.int64), np.ones((len(rows), depth), np.int64)
    strides = np.zeros((len(rows), depth), np.int64)
    by_depth: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_depth.setdefault(len(shapes[row[0]]), []).append(i)
    for n, members in by_depth.items():
        if n:
            lo[members, :n] = [rows[i][2][0] for i in members]
            hi[members, :n] = [rows[i][2][1] for i in members]
            strides[members, :n] = [rows[i][2][3] for i in members]
    buffer = np.array([buffer_of[row[1]] for row in rows], np.int64)
    width = np.array([recorder.dtypes[t].itemsize for t in used], np.int64)
    size = width[buffer] if len(rows) else np.zeros(0, np.int64)
    return Placements(
        [names[s] for s in offered],
        buffers,
        np.array([tensor_of[row[0]] for row in rows], np.int64),
        buffer,
        lo,
        hi,
        np.array([row[3] + row[2][2] for row in rows], np.int64) * size,
        strides * size[:, None],
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
