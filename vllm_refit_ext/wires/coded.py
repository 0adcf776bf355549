"""Boxes of what is sent or ends as MXFP8: codes found together with their scales, quantised and dequantised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import volume
from vllm_refit_ext.core.coded import CHECKPOINT, DEQUANTISED, SCALE_OF, coding_of, dequantised_to
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule
from vllm_refit_ext.core.placement import Int, Placements
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.torch_moves import quantize_values
from vllm_refit_ext.wires.boxes import Content, Memory, as_bytes, box_view, source_view

CODES = "float8_e4m3fn"
Ints = tuple[int, ...]
Where = tuple[Int, Int, int, int, Int]
"""A box of scales: lo [D], hi [D], in blocks; source buffer, byte offset, byte strides [D]."""


class Pieces(msgspec.Struct):
    """Boxes of codes, cut where their scales are cut. move, other: int64 [m], the moves of the codes and of their scales. lo, hi:
    int64 [m, D], in elements of the checkpoint tensor. bad: move of codes -> why it has no pieces."""

    move: Int
    other: Int
    lo: Int
    hi: Int
    bad: dict[int, LayoutError]


class ScaleMoves:
    """The moves of scales, found by the tensor and parameter that they belong to."""

    extra: Sequence[torch.Tensor] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        is_scale, partner = plan.is_scale, plan.scale_of[plan.tensor]
        owners: dict[str, int] = {}
        owner = np.zeros(len(plan.targets), np.int64)
        for t in np.unique(plan.target[is_scale | (partner >= 0)]).tolist():
            owner[t] = owners.setdefault(plan.targets[t].name.partition(SCALE_OF)[0], len(owners))
        self._key: Int = np.where(is_scale, plan.tensor, partner) * (len(owners) + 1) + owner[plan.target]
        moves = np.flatnonzero(is_scale)
        self._moves = moves[np.argsort(self._key[moves], kind="stable")]
        self._keys = self._key[self._moves]

    def of(self, move: int) -> list[int]:
        """The moves of scales that may belong to `move`, a box of codes."""
        first, last = (np.searchsorted(self._keys, self._key[move], side) for side in ("left", "right"))
        return self._moves[first:last].tolist()  # type: ignore[no-any-return]

    def blocks(self, move: int) -> tuple[Int, Ints]:
        """Start [D] and extent of the box of scales of `move`, whole blocks."""
        return blocks_of(self.plan, move)

    def where(self, move: int) -> Iterator[Where]:
        """Every box that may hold scales of `move`."""
        plan = self.plan
        for other in self.of(move):
            lo, at = plan.lo[other], int(plan.source_offset[other])
            yield lo, lo + plan.extent[other], int(plan.source[other]), at, plan.source_strides[other]

    def pieces(self, moves: Int) -> Pieces:
        """Cut `moves` (int64 [n], boxes of codes) where their scales are cut. Those of which scales are missing, or whose cut
        goes through a block, are in `bad`."""
        plan = self.plan
        lo, hi = plan.lo[moves], plan.lo[moves] + plan.extent[moves]
        last = plan.depth[plan.tensor[moves]] - 1
        every = np.arange(len(moves))
        first, end = lo[every, last], hi[every, last]
        bad: dict[int, LayoutError] = {}
        for i in np.flatnonzero((first % BLOCK != 0) | (end % BLOCK != 0)).tolist():
            bad[int(moves[i])] = LayoutError(
                "a cut along K goes through a block",
                where=plan.names[int(plan.tensor[moves[i]])],
                got=f"{first[i]} to {end[i]}",
                wanted="multiples of 32",
            )
        low, high = (np.searchsorted(self._keys, self._key[moves], side) for side in ("left", "right"))
        of = np.repeat(every, high - low)
        other = self._moves[np.arange(len(of)) - np.repeat(np.cumsum(high - low) - high, high - low)]
        axis, row = last[of], np.arange(len(of))
        a, b = plan.lo[other], plan.lo[other] + plan.extent[other]
        a[row, axis] *= BLOCK
        b[row, axis] *= BLOCK
        a, b = np.maximum(a, lo[of]), np.minimum(b, hi[of])
        common = (b > a).all(axis=1)
        of, other, a, b = of[common], other[common], a[common], b[common]
        found = np.bincount(of, volume(a, b), len(moves)).astype(np.int64)
        for i in np.flatnonzero(found != volume(lo, hi)).tolist():
            error = LayoutError(
                "scales of a part of it are not sent to this rank",
                where=plan.names[int(plan.tensor[moves[i]])],
                got=f"{found[i]} elements with scales",
            )
            bad.setdefault(int(moves[i]), error)
        good = ~np.isin(moves[of], list(bad)) if bad else np.ones(len(of), bool)
        return Pieces(moves[of][good], other[good], a[good], b[good], bad)


class PlacedScales:
    """The scales that a trainer rank itself holds, which may not be those that are sent: another replica may send these.

    extra: its tensors; their numbers come behind those of the plan's source buffers.
    """

    def __init__(self, plan: Plan, placements: Placements, tensors: Sequence[torch.Tensor]) -> None:
        """plan: any share of it that has this rank's codes. placements, tensors: what this rank offers."""
        self.plan, self.extra = plan, tensors
        self._placements = placements.widened(plan.lo.shape[1])
        self._rows: dict[int, list[int]] = {}
        index = {plan.names[t]: t for t in plan.scale_of[plan.scale_of >= 0].tolist()}
        for row, name in enumerate(placements.names[t] for t in placements.tensor.tolist()) if index else ():
            if name in index:
                self._rows.setdefault(index[name], []).append(row)

    def blocks(self, move: int) -> tuple[Int, Ints]:
        """Start [D] and extent of the box of scales of `move`, whole blocks."""
        return blocks_of(self.plan, move)

    def where(self, move: int) -> Iterator[Where]:
        """Every box of the scales of `move`'s tensor."""
        table, depth = self._placements, self.plan.lo.shape[1]
        for row in self._rows.get(int(self.plan.scale_of[self.plan.tensor[move]]), ()):
            number = len(self.plan.sources) + int(table.buffer[row])
            yield table.lo[row, :depth], table.hi[row, :depth], number, int(table.offset[row]), table.strides[row, :depth]


def blocks_of(plan: Plan, move: int) -> tuple[Int, Ints]:
    """Start [D] and extent of the box of scales of a move of codes, rounded outward to whole blocks."""
    last = len(plan.manifest.tensors[plan.names[int(plan.tensor[move])]].shape) - 1
    lo, hi = plan.lo[move].copy(), plan.lo[move] + plan.extent[move]
    lo[last] //= BLOCK
    hi[last] = -(-hi[last] // BLOCK)
    return lo, tuple((hi - lo).tolist())


def gather_scales(plan: Plan, move: int, found: ScaleMoves | PlacedScales, reader: Memory) -> torch.Tensor:
    """Scale bytes of a move of codes: uint8 of its extent with the last dimension in blocks, rounded outward.

    Raises LayoutError where scales of a part are not sent to this rank.
    """
    lo, shape = found.blocks(move)
    device = reader.memory(int(plan.source[move])).device
    scales = torch.zeros(shape, dtype=torch.uint8, device=device)
    filled = 0
    for first, last, number, offset, strides in found.where(move):
        own = number - len(plan.sources)
        memory = reader.memory(number) if own < 0 else as_bytes(found.extra[own])
        box = box_view(memory, torch.uint8, offset, (last - first).tolist(), strides.tolist())
        a, b = np.maximum(lo, first), np.minimum(lo + shape, last)
        if (b <= a).any():
            continue
        inner = tuple(slice(int(x), int(y)) for x, y in zip(a - first, b - first, strict=True))
        scales[tuple(slice(int(x), int(y)) for x, y in zip(a - lo, b - lo, strict=True))] = box[inner]
        filled += int(np.prod(b - a))
    if filled < int(np.prod(shape)):
        raise scales_missing(plan, move, filled, int(np.prod(shape)))
    return scales


def scales_missing(plan: Plan, move: int, got: int, wanted: int) -> LayoutError:
    """The error for codes of which some blocks have no scales here."""
    what, name = "scales of a part of it are not sent to this rank", plan.names[int(plan.tensor[move])]
    return LayoutError(what, where=name, got=f"{got} blocks", wanted=str(wanted))


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
