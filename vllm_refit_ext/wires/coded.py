"""Boxes of what travels or ends as MXFP8: codes found together with their scales, quantised and dequantised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.coded import CHECKPOINT, DEQUANTISED, SCALE_OF, coding_of, dequantised_to
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule
from vllm_refit_ext.core.placement import Int, Placements
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.twin import quantize_values
from vllm_refit_ext.wires.boxes import Content, Memory, as_bytes, box_view, source_view

CODES = "float8_e4m3fn"
Ints = tuple[int, ...]


class Side(msgspec.Struct):
    """One side of a box: `offset` bytes into a buffer, `strides` bytes, for the box's `extent`."""

    offset: int
    strides: Ints


class ScaleMoves:
    """The moves of travelling scales, found by the tensor and parameter that they belong to."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        index = {name: i for i, name in enumerate(plan.names)}
        tensors = plan.manifest.tensors.values()
        self._index = {i: index[spec.scale] for i, spec in enumerate(tensors) if spec.format == "mxfp8"}
        self._moves: dict[tuple[int, str], list[int]] = {}
        travelling = set(self._index.values())
        for move in range(len(plan)) if travelling else ():
            tensor = int(plan.tensor[move])
            if tensor in travelling:
                self._moves.setdefault((tensor, _owner(plan, move)), []).append(move)

    def of(self, move: int) -> list[int]:
        """The moves of scales that may belong to `move`, a box of codes."""
        tensor = int(self.plan.tensor[move])
        return self._moves.get((self._index[tensor], _owner(self.plan, move)), [])

    def blocks(self, move: int) -> tuple[Int, Ints]:
        """Start [D] and extent of the box of scales of `move`, whole blocks."""
        return blocks_of(self.plan, move)

    def boxes(self, move: int, reader: Memory) -> Iterator[tuple[Int, Int, torch.Tensor]]:
        """Every box (lo [D], hi [D], uint8 bytes) that may hold scales of `move`."""
        for other in self.of(move):
            yield (
                self.plan.lo[other],
                self.plan.lo[other] + self.plan.extent[other],
                source_view(self.plan, other, reader).view(torch.uint8),
            )

    def _depth(self, move: int) -> int:
        return len(self.plan.manifest.tensors[self.plan.names[int(self.plan.tensor[move])]].shape)

    def pieces(self, move: int) -> Iterator[tuple[Side, int, Side, Plan]]:
        """Cut `move`, a box of codes, where its scales are cut.

        Yields the codes' side, the source buffer of the scales, their side (its strides along the last dimension are those of
        blocks), and a plan of one move for the piece. Raises LayoutError where scales are missing or a cut goes through a block.
        """
        plan, depth, name = self.plan, self._depth(move), self.plan.names[int(self.plan.tensor[move])]
        lo, hi = plan.lo[move], plan.lo[move] + plan.extent[move]
        if lo[depth - 1] % BLOCK or hi[depth - 1] % BLOCK:
            got = f"{lo[depth - 1]} to {hi[depth - 1]}"
            raise LayoutError("a cut along K goes through a block", where=name, got=got, wanted="multiples of 32")
        found = 0
        for other in self.of(move):
            first, last = plan.lo[other].copy(), plan.lo[other] + plan.extent[other]
            first[depth - 1] *= BLOCK
            last[depth - 1] *= BLOCK
            a, b = np.maximum(lo, first), np.minimum(hi, last)
            if (b <= a).any():
                continue
            found += int(np.prod(b - a))
            steps = plan.source_strides[other]
            at = a.copy()
            at[depth - 1] //= BLOCK
            codes = Side(
                int(plan.source_offset[move] + ((a - lo) * plan.source_strides[move]).sum()),
                tuple(plan.source_strides[move].tolist()),
            )
            scale = Side(int(plan.source_offset[other] + ((at - plan.lo[other]) * steps).sum()), tuple(steps.tolist()))
            piece = plan.select(np.array([move]))
            piece.target_offset = piece.target_offset + ((a - lo) * plan.target_strides[move]).sum()
            piece.lo, piece.extent = a[None], (b - a)[None]
            yield codes, int(plan.source[other]), scale, piece
        if found != int(np.prod(plan.extent[move])):
            raise LayoutError(
                "scales of a part of it do not travel to this rank", where=name, got=f"{found} elements with scales"
            )


def _owner(plan: Plan, move: int) -> str:
    """The parameter that a move of codes or scales belongs to."""
    return plan.targets[int(plan.target[move])].name.partition(SCALE_OF)[0]


class PlacedScales:
    """The scales that a trainer rank itself holds, which may not be those that travel: another replica may send these."""

    def __init__(self, plan: Plan, placements: Placements, tensors: Sequence[torch.Tensor]) -> None:
        """plan: any share of it that has this rank's codes. placements, tensors: what this rank offers."""
        self._plan, self._placements, self._tensors = plan, placements, tensors
        self._rows: dict[str, list[int]] = {}
        travelling = {spec.scale for spec in plan.manifest.tensors.values() if spec.scale}
        for row in range(len(placements)) if travelling else ():
            name = placements.names[placements.tensor[row]]
            if name in travelling:
                self._rows.setdefault(name, []).append(row)

    def blocks(self, move: int) -> tuple[Int, Ints]:
        """Start [D] and extent of the box of scales of `move`, whole blocks."""
        return blocks_of(self._plan, move)

    def boxes(self, move: int, reader: Memory) -> Iterator[tuple[Int, Int, torch.Tensor]]:
        """Every box (lo [D], hi [D], uint8 bytes) of the scales of `move`'s tensor."""
        depth = self._plan.lo.shape[1]
        name = self._plan.names[int(self._plan.tensor[move])]
        table = self._placements.widened(depth)
        for row in self._rows.get(self._plan.manifest.tensors[name].scale, ()):
            lo, hi = table.lo[row, :depth], table.hi[row, :depth]
            memory = as_bytes(self._tensors[int(table.buffer[row])])
            yield (
                lo,
                hi,
                box_view(memory, torch.uint8, int(table.offset[row]), (hi - lo).tolist(), table.strides[row, :depth].tolist()),
            )


def blocks_of(plan: Plan, move: int) -> tuple[Int, Ints]:
    """Start [D] and extent of the box of scales of a move of codes, rounded outward to whole blocks."""
    last = len(plan.manifest.tensors[plan.names[int(plan.tensor[move])]].shape) - 1
    lo, hi = plan.lo[move].copy(), plan.lo[move] + plan.extent[move]
    lo[last] //= BLOCK
    hi[last] = -(-hi[last] // BLOCK)
    return lo, tuple((hi - lo).tolist())


def gather_scales(plan: Plan, move: int, found: ScaleMoves | PlacedScales, reader: Memory) -> torch.Tensor:
    """Scale bytes of a move of codes: uint8 of its extent with the last dimension in blocks, rounded outward.

    Raises LayoutError where scales of a part do not travel to this rank.
    """
    lo, shape = found.blocks(move)
    device = reader.memory(int(plan.source[move])).device
    scales = torch.zeros(shape, dtype=torch.uint8, device=device)
    filled = 0
    for first, last, box in found.boxes(move, reader):
        a, b = np.maximum(lo, first), np.minimum(lo + shape, last)
        if (b <= a).any():
            continue
        inner = tuple(slice(int(x), int(y)) for x, y in zip(a - first, b - first, strict=True))
        scales[tuple(slice(int(x), int(y)) for x, y in zip(a - lo, b - lo, strict=True))] = box[inner]
        filled += int(np.prod(b - a))
    if filled < int(np.prod(shape)):
        name = plan.names[int(plan.tensor[move])]
        raise LayoutError(
            "scales of a part of it do not travel to this rank",
            where=name,
            got=f"{filled} blocks",
            wanted=f"{int(np.prod(shape))}",
        )
    return scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, axis: int, skip: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of E4M3 `codes`, exact where `dtype` can hold them. scales: uint8, `axis` in blocks; the first code is number
    `skip` of its block."""
    exponents = scales.to(torch.int32).repeat_interleave(BLOCK, dim=axis).narrow(axis, skip, codes.shape[axis]) - 127
    return torch.ldexp(codes.view(torch.float8_e4m3fn).to(torch.float32), exponents).to(dtype)


def along_k(plan: Plan, move: int) -> int:
    """The dimension of a move's tensor that runs along K of its MXFP8 parameter."""
    name = plan.names[int(plan.tensor[move])]
    item = ITEMSIZE[plan.targets[int(plan.target[move])].dtype]
    for d, (step, n) in enumerate(zip(plan.target_strides[move], plan.extent[move], strict=True)):
        if step == item and n > 1:
            return d
    return len(plan.manifest.tensors[name].shape) - 1


def quantised(values: torch.Tensor, axis: int, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a box, uint8, with blocks along `axis`."""
    codes, scales, _ = quantize_values(values.movedim(axis, -1).contiguous(), rule)
    return codes.movedim(-1, axis), scales.movedim(-1, axis)


def sent_content(plan: Plan, move: int, memory: Memory, scales: ScaleMoves | PlacedScales) -> Content:
    """What a move makes of the sender's bytes, in the form in which the engine reads it back. None for scales that are read
    with their codes."""
    buffer = plan.targets[int(plan.target[move])]
    box = source_view(plan, move, memory)
    coding, ends_as = coding_of(buffer.layout), dequantised_to(buffer.layout)
    if buffer.layout.startswith(CHECKPOINT) or not (coding or ends_as):
        return box.to(getattr(torch, buffer.dtype))
    if buffer.dtype == "uint8":
        return None
    if buffer.dtype == CODES:
        found = gather_scales(plan, move, scales, memory)
        if buffer.layout.startswith(DEQUANTISED):
            axis = len(plan.manifest.tensors[plan.names[int(plan.tensor[move])]].shape) - 1
            return dequantise(box, found, axis, int(plan.lo[move, axis]) % BLOCK, getattr(torch, ends_as))
        return box.view(torch.uint8), found
    assert coding is not None
    return quantised(box, along_k(plan, move), coding.rule)
