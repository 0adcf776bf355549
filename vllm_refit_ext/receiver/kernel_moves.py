"""From a plan's moves to the moves of a kernel table: the canonical box of a parameter becomes a place in what the engine
holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from vllm_refit_ext.core.coded import PLAIN, coding_of
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.moves import At, CopyMove, QuantizeMove, ShuffleMove, Stack, Strided
from vllm_refit_ext.receiver.held import HeldParam
from vllm_refit_ext.wires.coded import Ints, ScaleMoves, Side


class Numbering(msgspec.Struct):
    """Buffers of a table: source buffers of the plan keep their numbers, then come targets.

    `plain`: parameter -> number. `values`: MXFP8 parameter -> number of its values; `scales`: of each tensor that holds its
    scales.
    """

    plain: dict[str, int]
    values: dict[str, int]
    scales: dict[str, list[int]]


def number_buffers(plan: Plan, held: Mapping[str, HeldParam]) -> Numbering:
    """Numbers for every target buffer that `plan` writes in place."""
    at = len(plan.sources)
    found = Numbering({}, {}, {})
    for t in np.unique(plan.target).tolist():
        buffer = plan.targets[t]
        if buffer.layout == PLAIN and buffer.name not in found.plain:
            found.plain[buffer.name], at = at, at + 1
        elif buffer.name in held and buffer.name not in found.values:
            found.values[buffer.name], at = at, at + 1
            found.scales[buffer.name] = list(range(at, at + len(held[buffer.name].scales)))
            at += len(held[buffer.name].scales)
    return found


def kernel_moves(plan: Plan, held: Mapping[str, HeldParam], numbers: Numbering) -> list[CopyMove | QuantizeMove | ShuffleMove]:
    """The table's moves for every move of `plan` into a plain or an MXFP8 parameter.

    Raises LayoutError that names the tensor of a move that no kernel takes.
    """
    moves: list[CopyMove | QuantizeMove | ShuffleMove] = []
    scales = ScaleMoves(plan)
    for move in range(len(plan)):
        buffer = plan.targets[int(plan.target[move])]
        if buffer.layout == PLAIN:
            moves.append(_copy(plan, move, numbers.plain[buffer.name]))
        elif coding_of(buffer.layout) and buffer.name in held:
            one = held[buffer.name]
            for twin in range(len(one.scales)):
                stack = _stack(one, numbers.values[buffer.name], numbers.scales[buffer.name][twin])
                if buffer.dtype == "float8_e4m3fn":
                    moves += _shuffles(plan, move, one, stack, scales)
                else:
                    moves += _quantises(plan, move, one, stack)
    return moves


def unfit(plan: Plan, held: Mapping[str, HeldParam]) -> dict[str, str]:
    """HF names with a move that no kernel takes, with the reason: a trainer's shard may cut a block of 32 that the engine does
    not."""
    numbers, scales, reasons = number_buffers(plan, held), ScaleMoves(plan), dict[str, str]()
    for move in range(len(plan)):
        buffer = plan.targets[int(plan.target[move])]
        name = plan.names[int(plan.tensor[move])]
        if not coding_of(buffer.layout) or buffer.name not in held or name in reasons:
            continue
        one = held[buffer.name]
        stack = _stack(one, numbers.values[buffer.name], numbers.scales[buffer.name][0])
        try:
            list(
                _shuffles(plan, move, one, stack, scales)
                if buffer.dtype == "float8_e4m3fn"
                else _quantises(plan, move, one, stack)
            )
        except LayoutError as error:
            reasons[name] = str(error)
    return reasons


def _stack(one: HeldParam, values: int, scales: int) -> Stack:
    return Stack(one.coding.layout, At(values), At(scales), one.held, one.count)


def _copy(plan: Plan, move: int, target: int) -> CopyMove:
    a, b = plan.sources[int(plan.source[move])], plan.targets[int(plan.target[move])]
    shape = tuple(plan.extent[move].tolist())
    source = Strided(
        At(int(plan.source[move]), int(plan.source_offset[move])), a.dtype, shape, tuple(plan.source_strides[move].tolist())
    )
    place = Strided(At(target, int(plan.target_offset[move])), b.dtype, shape, tuple(plan.target_strides[move].tolist()))
    return CopyMove(source, place, plan.names[int(plan.tensor[move])])


def _quantises(plan: Plan, move: int, one: HeldParam, stack: Stack) -> Iterator[QuantizeMove]:
    number = int(plan.source[move])
    source, target = plan.sources[number], plan.targets[int(plan.target[move])]
    name = plan.names[int(plan.tensor[move])]
    coding = coding_of(target.layout)
    assert coding is not None
    side = Side(int(plan.source_offset[move]), tuple(plan.source_strides[move].tolist()))
    for start, shape, (part,) in matrices(plan, move, one, [side], name):
        box = Strided(At(number, part.offset), source.dtype, shape, part.strides)
        yield QuantizeMove(box, stack, start, coding.rule, name)


def _shuffles(plan: Plan, move: int, one: HeldParam, stack: Stack, scales: ScaleMoves) -> Iterator[ShuffleMove]:
    name = plan.names[int(plan.tensor[move])]
    number = int(plan.source[move])
    for codes, other, scale, piece in scales.pieces(move):
        for start, shape, (a, b) in matrices(piece, 0, one, [codes, scale], name):
            size = (*shape[:-1], shape[-1] // BLOCK)
            yield ShuffleMove(
                Strided(At(number, a.offset), "uint8", shape, a.strides),
                Strided(At(other, b.offset), "uint8", size, b.strides),
                stack,
                start,
                name=name,
            )


def matrices(plan: Plan, move: int, one: HeldParam, sides: list[Side], name: str) -> Iterator[tuple[Ints, Ints, list[Side]]]:
    """Cut a move into boxes [rows, K] or [matrices, rows, K] of the canonical parameter.

    Yields (start, shape, sides): start and shape in elements of the held matrix, a side's strides in the order of the shape.
    Dimensions of the checkpoint tensor may come in any order; one that steps neither by matrices, rows nor elements is walked.
    """
    buffer = plan.targets[int(plan.target[move])]
    item, k = ITEMSIZE[buffer.dtype], one.shape[-1]
    size = one.shape[-2] * k
    extent, steps = plan.extent[move].tolist(), (plan.target_strides[move] // item).tolist()
    axes: dict[str, int] = {}
    walked = []
    for d, n in enumerate(extent):
        if n == 1:
            continue
        kind = {1: "k", k: "row", size: "matrix"}.get(steps[d], "")
        # One row steps like one matrix where a matrix has a single row.
        if kind == "row" and len(one.shape) == 3 and size == k:
            kind = "matrix"
        if kind and kind not in axes:
            axes[kind] = d
        else:
            walked.append(d)
    first = int(plan.target_offset[move]) // item
    order = [axes.get(kind) for kind in ("matrix", "row", "k")]
    shape = tuple(extent[d] if d is not None else 1 for d in order)
    stack = len(one.shape) == 3
    for index in np.ndindex(*(extent[d] for d in walked)):
        element = first + sum(i * steps[d] for i, d in zip(index, walked, strict=True))
        place = (element // size, element % size // k, element % k)
        parts = [
            Side(
                side.offset + sum(i * side.strides[d] for i, d in zip(index, walked, strict=True)),
                tuple(side.strides[d] if d is not None else 0 for d in order),
            )
            for side in sides
        ]
        for part in parts:
            part.strides = (*part.strides[:2], _last(part.strides[2], order[2], name))
        if stack:
            yield place, shape, parts
        else:
            yield place[1:], shape[1:], [Side(p.offset, p.strides[1:]) for p in parts]


def _last(stride: int, axis: int | None, name: str) -> int:
    if axis is None:
        raise LayoutError("a move takes single elements along K", where=name, wanted="whole blocks of 32")
    return stride
