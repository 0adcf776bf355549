"""The torch reference of the kernels: the same moves, the same bits, on any device that torch runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vllm_refit_ext.core.layouts import layout_of
from vllm_refit_ext.core.mxfp8 import BLOCK, CODE_NAN, Rule
from vllm_refit_ext.kernels.digest import digest_torch
from vllm_refit_ext.kernels.memory import Buffer, byte_view, view
from vllm_refit_ext.kernels.moves import CopyMove, DigestMove, QuantizeMove, ShuffleMove, Stack, StoredBox, size3, start3

_INF = 0x7F800000
_CHUNK = 1 << 20
"""Elements whose offsets are made at once: 8 MiB."""


def run(
    moves: Sequence[CopyMove | QuantizeMove | ShuffleMove | DigestMove], buffers: Sequence[Buffer], digests: torch.Tensor
) -> set[int]:
    """Execute `moves` in order and add DigestMoves to `digests` int64. Returns the numbers of moves with NaN or Inf."""
    bad = set()
    for number, move in enumerate(moves):
        if isinstance(move, CopyMove):
            copy(move, buffers)
        elif isinstance(move, QuantizeMove):
            if not quantize(move, buffers):
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


def quantize(move: QuantizeMove, buffers: Sequence[Buffer]) -> bool:
    """Execute a QuantizeMove, some rows at a time. Returns whether all of the source is finite."""
    source = view(buffers[move.source.at.buffer], move.source)
    first, row, col = start3(move.start)
    _, rows, cols = size3(move.source.shape)
    step, finite = max(1, _CHUNK // max(1, cols)), True
    for matrix, values in enumerate(source[None] if source.ndim == 2 else source):
        for r in range(0, rows, step):
            codes, scales, good = quantize_values(values[r : r + step], move.rule)
            put(move.target, (first + matrix, row + r, col), codes, scales, buffers)
            finite = finite and good
    return finite


def quantize_values(x: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(codes uint8 [..., K], scales uint8 [..., K/32], all finite) of bfloat16 or float32 [..., K]. The bits of `core.mxfp8`."""
    blocks = x.to(torch.float32).contiguous().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    amax = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1)
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
    if isinstance(content, StoredBox):
        tensor = get(content.stack, content.start, content.size, buffers, scales=content.scales).view(content.size)
    else:
        tensor = view(buffers[content.at.buffer], content)
    return digest_torch(tensor.reshape(tensor.shape[tensor.ndim - len(move.shape) :]), shape=move.shape, start=move.start)


def put(stack: Stack, start: tuple[int, ...], codes: torch.Tensor, scales: torch.Tensor, buffers: Sequence[Buffer]) -> None:
    """Write canonical codes [..., rows, K] and scales into `stack` at `start`."""
    first, row, col = start3(start)
    count, rows, cols = size3(tuple(codes.shape))
    parts = ((False, codes, col, cols), (True, scales, col // BLOCK, cols // BLOCK))
    for is_scale, content, begin, width in parts:
        canonical = content.reshape(count, rows, width)
        for matrix, stored in enumerate(_matrices(stack, first, count, is_scale, buffers)):
            for part, index in _offsets(stack, (row, begin), (rows, width), is_scale, stored.device):
                stored[index] = canonical[matrix, part]


def get(
    stack: Stack, start: tuple[int, ...], size: tuple[int, ...], buffers: Sequence[Buffer], scales: bool = False
) -> torch.Tensor:
    """Canonical bytes uint8 [matrices, rows, columns] of a box of `stack`; with `scales`, all counts are scale blocks."""
    (first, row, col), (count, rows, width) = start3(start), size3(size)
    place = stack.scales if scales else stack.values
    out = torch.empty((count, rows, width), dtype=torch.uint8, device=byte_view(buffers[place.buffer]).device)
    for matrix, stored in enumerate(_matrices(stack, first, count, scales, buffers)):
        for part, index in _offsets(stack, (row, col), (rows, width), scales, stored.device):
            out[matrix, part] = stored[index]
    return out


def _matrices(stack: Stack, first: int, count: int, scales: bool, buffers: Sequence[Buffer]) -> Iterator[torch.Tensor]:
    """The bytes of `count` matrices from number `first` on, each a flat view."""
    place, nbytes = (stack.scales, stack.scale_bytes) if scales else (stack.values, stack.value_bytes)
    memory = byte_view(buffers[place.buffer])
    for i in range(first, first + count):
        at = place.offset + i * nbytes
        yield memory[at : at + nbytes]


def _offsets(
    stack: Stack, start: tuple[int, int], size: tuple[int, int], scales: bool, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, byte offsets int64 [rows, columns]) of a canonical box, some rows at a time so that the offsets stay small."""
    form = layout_of(stack.layout)
    row, col = (form.scale_row, form.scale_col) if scales else (form.value_row, form.value_col)
    by_row = torch.from_numpy(row(stack.stored, np.arange(start[0], start[0] + size[0]))).to(device)
    by_col = torch.from_numpy(col(stack.stored, np.arange(start[1], start[1] + size[1]))).to(device)
    step = max(1, _CHUNK // max(1, size[1]))
    for r in range(0, size[0], step):
        yield slice(r, r + step), by_row[r : r + step, None] + by_col[None, :]
