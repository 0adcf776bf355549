"""Kernels that write the `marlin` layout: a 64-row tile is read along K and written as whole 1,024-byte Marlin tiles.

A 4-byte word of the layout holds k = 2i + {0, 8, 1, 9} of one row, so the two halves of 16 columns are read as two tensors and
their elements meet in one register without shuffling; only finished words cross threads on their way to contiguous stores.
"""

# Triton's language: constants are upper case, types its own, and branches that return need an else.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from vllm_refit_ext.kernels.jit import place
from vllm_refit_ext.kernels.jit.format import block_scale, magnitude, pack4, pack4_codes, widen
from vllm_refit_ext.kernels.jit.place import find_tile, pointer


@triton.jit
def _tile(table, tiles, BK: tl.constexpr):
    """What both kernels need: (table row, number, tile row n0, box rows [64], their mask, first k, columns, covered)."""
    row, number, ty, tx = find_tile(table, tiles)
    rows = tl.load(row + place.ROWS).to(tl.int32)
    cols = tl.multiple_of(tl.load(row + place.COLS).to(tl.int32), 32)
    row0 = tl.load(row + place.ROW0).to(tl.int32)
    n0 = (row0 // 64 + ty) * 64
    r = n0 - row0 + tl.arange(0, 64)
    inside = (r >= 0) & (r < rows)
    covered = (n0 >= row0) & (n0 + 64 <= row0 + rows)
    return row, number, n0, r, inside, tx * BK, cols, covered


@triton.jit
def _halves(x):
    """[64, T, 8] to (even, odd) elements, each [64, T, 4]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 4, 2]))


@triton.jit
def _store_words(row, words, n0, k0, cols, rows_lo, rows_hi, covered, ALIGN: tl.constexpr, BK: tl.constexpr):
    """Store int32 words [64, BK/16, 4] (row, k tile, i); rows outside [rows_lo, rows_hi) of the tile are left alone."""
    T: tl.constexpr = BK // 16
    # Word p of a 256-word tile belongs to row 8 (p % 8) + p // 32 and i = p % 32 // 8.
    tile = tl.reshape(tl.permute(tl.reshape(words, [8, 8, T, 4]), (2, 1, 3, 0)), [T, 256])
    stored_rows = tl.load(row + place.STORED_ROWS)
    col0 = tl.load(row + place.COL0).to(tl.int32)
    t = tl.arange(0, T)
    p = tl.arange(0, 256)
    stored = pointer(row, place.STORED, tl.int32, ALIGN)
    at = ((col0 + k0) // 16 + t).to(tl.int64)[:, None] * (stored_rows * 4) + (n0 * 4 + p)[None, :]
    inside = ((k0 // 16 + t) < cols // 16)[:, None]
    if covered:
        tl.store(stored + at, tile, mask=inside)
    else:
        n = (p % 8) * 8 + p // 32
        tl.store(stored + at, tile, mask=inside & ((n >= rows_lo) & (n < rows_hi))[None, :])


@triton.jit
def _store_scales(row, byte, n0, k0, cols, rows_lo, rows_hi, BK: tl.constexpr):
    """Store scale bytes [64, BK/32]: position p of 64 belongs to row p // 8 + 8 j', j' = p % 8 with its low bits swapped."""
    G: tl.constexpr = BK // 32
    tile = tl.reshape(tl.permute(tl.reshape(byte, [2, 2, 2, 8, G]), (4, 3, 0, 2, 1)), [G, 64])
    stored_rows = tl.load(row + place.STORED_ROWS)
    col0 = tl.load(row + place.COL0).to(tl.int32)
    g = tl.arange(0, G)
    p = tl.arange(0, 64)
    j = p % 8
    n = p // 8 + 8 * (j // 4 * 4 + j % 2 * 2 + j % 4 // 2)
    stored = pointer(row, place.STORED_SCALES, tl.uint8, 1)
    at = ((col0 + k0) // 32 + g).to(tl.int64)[:, None] * stored_rows + (n0 + p)[None, :]
    mask = ((k0 // 32 + g) < cols // 32)[:, None] & ((n >= rows_lo) & (n < rows_hi))[None, :]
    tl.store(stored + at, tile, mask=mask)


@triton.jit
def quantize_marlin(
    table,
    tiles,
    nonfinite,
    RULE: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    STORED_ALIGN: tl.constexpr,
    HARDWARE: tl.constexpr,
    BK: tl.constexpr,
):
    """One 64 x BK tile, quantised into Marlin tiles. The arguments are those of `rows.quantize_rows`."""
    T: tl.constexpr = BK // 16
    row, number, n0, r, inside, k0, cols, covered = _tile(table, tiles, BK)
    t = tl.arange(0, T)
    e = tl.arange(0, 8)
    k = k0 + t[None, :, None] * 16 + e[None, None, :]
    mask = inside[:, None, None] & ((k0 // 16 + t) < cols // 16)[None, :, None]
    source = pointer(row, place.CANON, DTYPE, ALIGN)
    row_stride = tl.multiple_of(tl.load(row + place.ROW_STRIDE), max(ALIGN * 8 // DTYPE.primitive_bitwidth, 1))
    col_stride = tl.load(row + place.COL_STRIDE)
    at = r.to(tl.int64)[:, None, None] * row_stride
    if UNIT:
        low = source + (at + k)
        high = low + 8
    else:
        low = source + (at + k * col_stride)
        high = low + 8 * col_stride
    low = widen(tl.load(low, mask=mask, other=0))
    high = widen(tl.load(high, mask=mask, other=0))

    amax = tl.max(tl.reshape(tl.maximum(magnitude(low), magnitude(high)), [64, T // 2, 16]), axis=2)
    byte, factor, bad = block_scale(amax, RULE)
    tl.store(nonfinite + number + tl.zeros([64, T // 2], tl.int32), 1, mask=bad)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [64, T // 2, 2]), [64, T])[:, :, None]
    low0, low1 = _halves(low * factor)
    high0, high1 = _halves(high * factor)
    words = pack4(low0, high0, low1, high1, HARDWARE)

    row0 = tl.load(row + place.ROW0).to(tl.int32)
    rows = tl.load(row + place.ROWS).to(tl.int32)
    _store_words(row, words, n0, k0, cols, row0 - n0, row0 + rows - n0, covered, STORED_ALIGN, BK)
    _store_scales(row, byte, n0, k0, cols, row0 - n0, row0 + rows - n0, BK)


@triton.jit
def shuffle_marlin(table, tiles, ALIGN: tl.constexpr, STORED_ALIGN: tl.constexpr, BK: tl.constexpr):
    """One 64 x BK tile of canonical codes and scales into Marlin tiles; column strides are 1."""
    T: tl.constexpr = BK // 16
    row, _, n0, r, inside, k0, cols, covered = _tile(table, tiles, BK)
    t = tl.arange(0, T)
    e = tl.arange(0, 8)
    g = tl.arange(0, BK // 32)
    mask = inside[:, None, None] & ((k0 // 16 + t) < cols // 16)[None, :, None]
    canon = pointer(row, place.CANON, tl.uint8, ALIGN)
    row_stride = tl.multiple_of(tl.load(row + place.ROW_STRIDE), ALIGN)
    low = canon + (r.to(tl.int64)[:, None, None] * row_stride + (k0 + t[None, :, None] * 16 + e[None, None, :]))
    low0, low1 = _halves(tl.load(low, mask=mask))
    high0, high1 = _halves(tl.load(low + 8, mask=mask))
    words = pack4_codes(low0, high0, low1, high1)
    scales = pointer(row, place.CANON_SCALES, tl.uint8, 1)
    scales += r.to(tl.int64)[:, None] * tl.load(row + place.SCALE_ROW_STRIDE) + (k0 // 32 + g)[None, :]
    byte = tl.load(scales, mask=inside[:, None] & ((k0 // 32 + g) < cols // 32)[None, :])

    row0 = tl.load(row + place.ROW0).to(tl.int32)
    rows = tl.load(row + place.ROWS).to(tl.int32)
    _store_words(row, words, n0, k0, cols, row0 - n0, row0 + rows - n0, covered, STORED_ALIGN, BK)
    _store_scales(row, byte, n0, k0, cols, row0 - n0, row0 + rows - n0, BK)
