"""From a plan's moves to the moves of a kernel table: the canonical box of a parameter becomes a place in what the engine
holds.

Geometry is computed for all moves at once; what is left to do for each is to make one object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from vllm_refit_ext.core.coded import PLAIN, Coding, coding_of
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.placement import Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.memory import Buffer
from vllm_refit_ext.kernels.moves import At, CopyMove, Move, QuantizeMove, ShuffleMove, Stack, Strided
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.wires.coded import CODES, ScaleMoves

MATRIX, ROW, COLUMN = 0, 1, 2


class Numbering(msgspec.Struct):
    """Buffers of a table: source buffers of the plan keep their numbers, then come targets.

    `plain`: parameter -> number. `values`: MXFP8 parameter -> number of its values; `scales`: of each tensor that holds its
    scales.
    """

    plain: dict[str, int]
    values: dict[str, int]
    scales: dict[str, list[int]]


class KernelMoves(msgspec.Struct):
    """What a table executes for a plan.

    numbers: of its buffers. moves: into plain and MXFP8 parameters. unfit: HF name with a move that no kernel takes -> the error;
    a trainer's shard may cut a block of 32 that the engine does not.
    """

    numbers: Numbering
    moves: list[Move]
    unfit: dict[str, LayoutError]


class Side(msgspec.Struct):
    """One side of boxes: int64 `offset` [n] bytes into a buffer, int64 `strides` [n, D] bytes."""

    offset: Int
    strides: Int


class Matrices(msgspec.Struct):
    """Boxes [matrices, rows, K] of canonical parameters. of: int64 [m], the row of the input that each is a part of. start,
    shape: int64 [m, 3], elements of the stored matrix. runs: bool [m], whether K is taken in runs. sides: their strides [m, 3] in
    the order of the shape."""

    of: Int
    start: Int
    shape: Int
    runs: NDArray[np.bool_]
    sides: list[Side]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Of each box, as numbers and tuples: of, start, shape, runs, then offset and strides of every side."""
        sides = [column for side in self.sides for column in (side.offset, side.strides)]
        columns = (self.of, self.start, self.shape, self.runs, *sides)
        return zip(*(c.tolist() if c.ndim == 1 else map(tuple, c.tolist()) for c in columns), strict=True)


def number_buffers(plan: Plan, stored: Mapping[str, StoredParam]) -> Numbering:
    """Numbers for every target buffer that `plan` writes in place."""
    at = len(plan.sources)
    found = Numbering({}, {}, {})
    for t in np.unique(plan.target).tolist():
        buffer = plan.targets[t]
        if buffer.layout == PLAIN and buffer.name not in found.plain:
            found.plain[buffer.name], at = at, at + 1
        elif buffer.name in stored and buffer.name not in found.values:
            found.values[buffer.name], at = at, at + 1
            found.scales[buffer.name] = list(range(at, at + len(stored[buffer.name].scales)))
            at += len(stored[buffer.name].scales)
    return found


def target_buffers(
    plan: Plan, numbers: Numbering, params: Mapping[str, torch.Tensor], stored: Mapping[str, StoredParam]
) -> list[Buffer]:
    """Buffers of a table as `numbers` has them: the source buffers of `plan`, empty, then the live tensors."""
    found: dict[int, torch.Tensor] = {n: params[name] for name, n in numbers.plain.items()}
    for name, number in numbers.values.items():
        found[number] = stored[name].values
        found |= dict(zip(numbers.scales[name], stored[name].scales, strict=True))
    return [*[0] * len(plan.sources), *(found[n] for n in sorted(found))]


def kernel_moves(plan: Plan, stored: Mapping[str, StoredParam]) -> KernelMoves:
    """The table's moves for every move of `plan` into a plain or an MXFP8 parameter, and what no kernel takes."""
    made = KernelMoves(number_buffers(plan, stored), [], {})
    _copies(plan, np.flatnonzero(plan.into(lambda b: b.layout == PLAIN)), made)
    coded = plan.into(lambda b: b.name in stored and coding_of(b.layout) is not None)
    codes = plan.into(lambda b: b.dtype == CODES)
    _quantises(plan, np.flatnonzero(coded & ~codes), stored, made)
    _shuffles(plan, np.flatnonzero(coded & codes), stored, made)
    return made


def _copies(plan: Plan, moves: Int, made: KernelMoves) -> None:
    names, sources, targets = _of(plan, moves)
    columns = (plan.extent, plan.source_offset, plan.source_strides, plan.target_offset, plan.target_strides)
    sides = zip(*(c[moves].tolist() for c in columns), strict=True)
    for name, source, target, (extent, at, steps, place, others) in zip(names, sources, targets, sides, strict=True):
        a, b, shape = plan.sources[source], plan.targets[target], tuple(extent)
        from_box = Strided(At(source, at), a.dtype, shape, tuple(steps))
        into_box = Strided(At(made.numbers.plain[b.name], place), b.dtype, shape, tuple(others))
        made.moves.append(CopyMove(from_box, into_box, name))


def _quantises(plan: Plan, moves: Int, stored: Mapping[str, StoredParam], made: KernelMoves) -> None:
    side = Side(plan.source_offset[moves], plan.source_strides[moves])
    found = matrices(plan, moves, stored, plan.target_offset[moves], plan.extent[moves], [side])
    stacks = _stacks(plan, moves, stored, made.numbers)
    names, sources, targets = _of(plan, moves)
    for i, start, shape, runs, offset, strides in found.rows():
        source, target, name = sources[i], targets[i], names[i]
        coding, all_scales, deep = stacks[target]
        try:
            _check_runs(runs, name)
            box = Strided(At(source, offset), plan.sources[source].dtype, shape[deep:], strides[deep:])
            made.moves += [QuantizeMove(box, one, start[deep:], coding.rule, name) for one in all_scales]
        except LayoutError as error:
            made.unfit.setdefault(name, error)


def _shuffles(plan: Plan, moves: Int, stored: Mapping[str, StoredParam], made: KernelMoves) -> None:
    if not len(moves):
        return
    pieces = ScaleMoves(plan).pieces(moves)
    for move, error in pieces.bad.items():
        made.unfit.setdefault(plan.names[int(plan.tensor[move])], error)
    of, other = pieces.move, pieces.other
    inside, at = pieces.lo - plan.lo[of], pieces.lo - plan.lo[other]
    row, last = np.arange(len(of)), plan.depth[plan.tensor[of]] - 1
    at[row, last] = pieces.lo[row, last] // BLOCK - plan.lo[other, last]
    codes, scales = (
        Side(plan.source_offset[m] + (a * plan.source_strides[m]).sum(axis=1), plan.source_strides[m])
        for m, a in ((of, inside), (other, at))
    )
    place = plan.target_offset[of] + (inside * plan.target_strides[of]).sum(axis=1)
    found = matrices(plan, of, stored, place, pieces.hi - pieces.lo, [codes, scales])
    stacks = _stacks(plan, of, stored, made.numbers)
    names, sources, targets = _of(plan, of)
    scale_sources = plan.source[other].tolist()
    for i, start, shape, runs, offset, strides, scale_offset, scale_strides in found.rows():
        _, all_scales, deep = stacks[targets[i]]
        size = (*shape[deep:-1], shape[-1] // BLOCK)
        try:
            _check_runs(runs, names[i])
            a = Strided(At(sources[i], offset), "uint8", shape[deep:], strides[deep:])
            b = Strided(At(scale_sources[i], scale_offset), "uint8", size, scale_strides[deep:])
            made.moves += [ShuffleMove(a, b, one, start[deep:], name=names[i]) for one in all_scales]
        except LayoutError as error:
            made.unfit.setdefault(names[i], error)


def _of(plan: Plan, moves: Int) -> tuple[list[str], list[int], list[int]]:
    """Tensor name, source buffer and target buffer of each move."""
    return [plan.names[t] for t in plan.tensor[moves].tolist()], plan.source[moves].tolist(), plan.target[moves].tolist()


def _check_runs(runs: bool, name: str) -> None:
    if not runs:
        raise LayoutError("a move takes single elements along K", where=name, wanted="whole blocks of 32")


def _stacks(
    plan: Plan, moves: Int, stored: Mapping[str, StoredParam], numbers: Numbering
) -> dict[int, tuple[Coding, list[Stack], int]]:
    """For each target buffer of `moves`: its coding, a stack for every tensor that holds its scales, and how many of the three
    dimensions it lacks."""
    found = {}
    for t in np.unique(plan.target[moves]).tolist():
        buffer = plan.targets[t]
        one, coding = stored[buffer.name], coding_of(buffer.layout)
        assert coding is not None
        values = At(numbers.values[buffer.name])
        all_scales = [Stack(one.coding.layout, values, At(n), one.stored, one.count) for n in numbers.scales[buffer.name]]
        found[t] = coding, all_scales, 3 - len(one.shape)
    return found


def matrices(plan: Plan, moves: Int, stored: Mapping[str, StoredParam], at: Int, extent: Int, sides: list[Side]) -> Matrices:
    """Cut boxes of MXFP8 parameters into boxes [matrices, rows, K] of the canonical parameter.

    Row i is a box of `extent[i]` (int64 [n, D], dimensions of the checkpoint tensor) that lies `at[i]` bytes into the target of
    `moves[i]`. Dimensions may come in any order; one that steps neither by matrices, rows nor elements is walked.
    """
    targets, which = np.unique(plan.target[moves], return_inverse=True)
    buffers = [plan.targets[t] for t in targets.tolist()]
    width = np.array([stored[b.name].shape[-1] for b in buffers], np.int64)[which]
    size = np.array([stored[b.name].shape[-2] * stored[b.name].shape[-1] for b in buffers], np.int64)[which]
    item = np.array([ITEMSIZE[b.dtype] for b in buffers], np.int64)[which]
    of, row = np.arange(len(moves)), np.arange(len(moves))
    first, steps = at // item, plan.target_strides[moves] // item[:, None]
    axes = np.full((len(moves), 3), -1)
    kind = np.select([steps == size[:, None], steps == width[:, None], steps == 1], [MATRIX, ROW, COLUMN], -1)
    walked = np.zeros(extent.shape, bool)
    for d in range(extent.shape[1]):
        free = (kind[:, d] >= 0) & (axes[row, kind[:, d]] < 0)
        takes = (extent[:, d] > 1) & free
        axes[row[takes], kind[takes, d]] = d
        walked[:, d] = (extent[:, d] > 1) & ~free
    offsets = [side.offset for side in sides]
    for d in np.flatnonzero(walked.any(axis=0)).tolist():
        count = np.where(walked[of, d], extent[of, d], 1)
        again = np.repeat(np.arange(len(of)), count)
        step = np.arange(len(again)) - np.repeat(np.cumsum(count) - count, count)
        of, first = of[again], first[again] + step * steps[of[again], d]
        offsets = [offset[again] + step * side.strides[of, d] for offset, side in zip(offsets, sides, strict=True)]
    axis = axes[of]
    here = axis >= 0
    shape = np.where(here, np.take_along_axis(extent[of], axis, axis=1), 1)
    start = np.stack([first // size[of], first % size[of] // width[of], first % width[of]], axis=1)
    strides = [np.where(here, np.take_along_axis(side.strides[of], axis, axis=1), 0) for side in sides]
    return Matrices(of, start, shape, here[:, COLUMN], [Side(o, s) for o, s in zip(offsets, strides, strict=True)])
