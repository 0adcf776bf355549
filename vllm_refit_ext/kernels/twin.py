"""Torch twins of the kernels: the same moves, the same bits, on any device that torch runs on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from vllm_refit_ext.core.layouts import Held, layout_of
from vllm_refit_ext.core.mxfp8 import BLOCK, CODE_NAN, Rule
from vllm_refit_ext.kernels.digest import digest_torch
from vllm_refit_ext.kernels.memory import Buffer, byte_view, view
from vllm_refit_ext.kernels.moves import CopyMove, DigestMove, HeldBox, QuantizeMove, ShuffleMove, Stack, size3, start3

_INF = 0x7F800000


def run(
    moves: Sequence[CopyMove | QuantizeMove | ShuffleMove | DigestMove], buffers: Sequence[Buffer], digests: torch.Tensor
) -> set[int]:
    """Execute `moves` in order and add DigestMoves to `digests` int64. Returns the numbers of moves with NaN or Inf."""
    bad = set()
    for number, move in enumerate(moves):
        if isinstance(move, CopyMove):
            copy(move, buffers)
        elif isinstance(move, QuantizeMove):
            codes, scales, finite = quantize_values(view(buffers[move.source.at.buffer], move.source), move.rule)
            put(move.target, move.start, codes, scales, buffers)
            if not finite:
                bad.add(number)
        elif isinstance(move, ShuffleMove):
            shuffle(move, buffers)
        else:
            value = digest(move, buffers) + int(digests[move.out])
            digests[move.out] = (value + (1 << 63)) % (1 << 64) - (1 << 63)
    return bad


def copy(move: CopyMove, buffers: Sequence[Buffer]) -> None:
    """Execute a CopyMove. Raw copies view both sides as integers, so nothing converts. A cast NaN is the quiet NaN."""
    source, target = view(buffers[move.source.at.buffer], move.source), view(buffers[move.target.at.buffer], move.target)
    if not move.casts:
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.element_size()]
        source, target = source.view(word), target.view(word)
    target.copy_(source)
    if move.casts:
        # Not masked_fill with NaN, which is free to choose its bits.
        word, quiet = (
            (torch.int16, {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00})
            if target.element_size() == 2
            else (torch.int32, {torch.float32: 0x7FC00000})
        )
        target.view(word).masked_fill_(target.isnan(), quiet[target.dtype])


def quantize_values(x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(codes uint8 [..., K], scales uint8 [..., K/32], all finite) of bfloat16 or float32 [..., K]. The bits of `core.mxfp8`."""
    blocks = x.to(torch.float32).contiguous().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = (
        (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
        if blocks.numel()
        else blocks.new_zeros(blocks.shape[:-1], dtype=torch.int32)
    )
    exponent = amax.to(torch.int64)
    exponent = ((exponent + 0x1FFFFF) >> 23) - 8 if rule == "ceil" else exponent >> 23
    byte = exponent.clamp(1, 254).to(torch.int32)
    bits = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)
    bad = amax >= _INF
    values = blocks * bits.view(torch.float32)[..., None]
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    finite = not bool(bad.any())
    if not finite:
        codes[bad] = CODE_NAN
    return codes.reshape(x.shape), byte.to(torch.uint8), finite


def shuffle(move: ShuffleMove, buffers: Sequence[Buffer]) -> None:
    """Execute a ShuffleMove."""
    codes = view(buffers[move.codes.at.buffer], move.codes).view(torch.uint8)
    scales = view(buffers[move.scales.at.buffer], move.scales).view(torch.uint8)
    if move.inverse:
        codes.copy_(get(move.target, move.start, move.codes.shape, buffers).view(codes.shape))
        size = (*move.codes.shape[:-1], move.codes.shape[-1] // BLOCK)
        start = (*move.start[:-1], move.start[-1] // BLOCK)
        scales.copy_(get(move.target, start, size, buffers, scales=True).view(scales.shape))
    else:
        put(move.target, move.start, codes, scales, buffers)


def digest(move: DigestMove, buffers: Sequence[Buffer]) -> int:
    """The digest of a DigestMove's content."""
    content = move.content
    if isinstance(content, HeldBox):
        tensor = get(content.stack, content.start, content.size, buffers, scales=content.scales).view(content.size)
    else:
        tensor = view(buffers[content.at.buffer], content)
    return digest_torch(tensor.reshape(tensor.shape[tensor.ndim - len(move.shape) :]), shape=move.shape, start=move.start)


def put(stack: Stack, start: tuple[int, ...], codes: torch.Tensor, scales: torch.Tensor, buffers: Sequence[Buffer]) -> None:
    """Write canonical codes [..., rows, K] and scales into `stack` at `start`."""
    first, row, col = start3(start)
    count, rows, cols = size3(tuple(codes.shape))
    for what, content, begin in ((False, codes, (row, col)), (True, scales, (row, col // BLOCK))):
        place, nbytes = (stack.scales, stack.scale_bytes) if what else (stack.values, stack.value_bytes)
        width = cols // BLOCK if what else cols
        memory = byte_view(buffers[place.buffer])
        index = _offsets(stack.layout, stack.held, begin, (rows, width), what, memory.device)
        for i, matrix in enumerate(content.reshape(count, rows, width)):
            at = place.offset + (first + i) * nbytes
            memory[at : at + nbytes][index] = matrix


def get(
    stack: Stack, start: tuple[int, ...], size: tuple[int, ...], buffers: Sequence[Buffer], scales: bool = False
) -> torch.Tensor:
    """Canonical bytes uint8 [matrices, rows, columns] of a box of `stack`; with `scales`, all counts are scale blocks."""
    (first, row, col), (count, rows, width) = start3(start), size3(size)
    place, nbytes = (stack.scales, stack.scale_bytes) if scales else (stack.values, stack.value_bytes)
    memory = byte_view(buffers[place.buffer])
    index = _offsets(stack.layout, stack.held, (row, col), (rows, width), scales, memory.device)
    out = torch.empty((count, rows, width), dtype=torch.uint8, device=memory.device)
    for i in range(count):
        at = place.offset + (first + i) * nbytes
        out[i] = memory[at : at + nbytes][index]
    return out


@lru_cache(maxsize=8)
def _offsets(
    layout: str, held: Held, start: tuple[int, int], size: tuple[int, int], scales: bool, device: torch.device
) -> torch.Tensor:
    """Byte offsets int64 [rows, columns] of a canonical box. Cached: experts of a layer share them."""
    form = layout_of(layout)
    row, col = (form.scale_row, form.scale_col) if scales else (form.value_row, form.value_col)
    rows, cols = (torch.arange(s, s + n).numpy() for s, n in zip(start, size, strict=True))
    return torch.from_numpy(row(held, rows)[:, None] + col(held, cols)[None, :]).to(device)
