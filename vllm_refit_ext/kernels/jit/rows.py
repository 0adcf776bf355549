"""Kernels for layouts that keep rows whole: quantise into them, shuffle canonical codes into them, and read any layout back."""

# Triton's language: constants are upper case, types its own, and branches that return need an else.
# ruff: noqa: N803, SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from vllm_refit_ext.kernels.jit import place
from vllm_refit_ext.kernels.jit.format import block_scale, encode, magnitude, widen
from vllm_refit_ext.kernels.jit.place import find_tile, pointer, scale_col, scale_row, value_col, value_row


@triton.jit
def quantize_rows(
    table,
    tiles,
    nonfinite,
    LAYOUT: tl.constexpr,
    RULE: tl.constexpr,
    DTYPE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    STORED_ALIGN: tl.constexpr,
    HARDWARE: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """One BR x BK tile: read DTYPE (float32, or uint16: the bits of bfloat16), write codes and scale bytes in place.

    UNIT: the source's column stride is 1. ALIGN: bytes that source addresses and rows are multiples of. STORED_ALIGN: the same of
    the target's values. `nonfinite` [matrices] int32 becomes 1 where a block holds NaN or Inf.
    """
    BLOCKS: tl.constexpr = BK // 32
    row, number, ty, tx = find_tile(table, tiles)
    rows = tl.load(row + place.ROWS).to(tl.int32)
    blocks = tl.load(row + place.COLS).to(tl.int32) // 32
    row0 = tl.load(row + place.ROW0).to(tl.int32)
    block0 = tl.load(row + place.COL0).to(tl.int32) // 32
    stored_rows = tl.load(row + place.STORED_ROWS)
    stored_cols = tl.multiple_of(tl.load(row + place.STORED_COLS), 32)
    half = tl.load(row + place.HALF).to(tl.int32)

    r = ty * BR + tl.arange(0, BR)
    b = tx * BLOCKS + tl.arange(0, BLOCKS)
    e = tl.arange(0, 32)
    mask2 = (r < rows)[:, None] & (b < blocks)[None, :]
    mask3 = mask2[:, :, None]
    k = b[None, :, None] * 32 + e[None, None, :]

    source = pointer(row, place.CANON, DTYPE, ALIGN)
    row_stride = tl.multiple_of(tl.load(row + place.ROW_STRIDE), max(ALIGN * 8 // DTYPE.primitive_bitwidth, 1))
    at = r.to(tl.int64)[:, None, None] * row_stride
    if UNIT:
        at = at + k
    else:
        at = at + k * tl.load(row + place.COL_STRIDE)
    x = widen(tl.load(source + at, mask=mask3, other=0))

    byte, factor, bad = block_scale(tl.max(magnitude(x), axis=2), RULE)
    codes = encode(x * factor[:, :, None], HARDWARE)
    tl.store(nonfinite + number + tl.zeros([BR, BLOCKS], tl.int32), 1, mask=bad & mask2)

    rr = row0 + r
    values = pointer(row, place.STORED, tl.uint8, STORED_ALIGN)
    to = value_row(rr, stored_rows, stored_cols, half, LAYOUT)[:, None, None] + (block0 * 32 + k)
    tl.store(values + to, codes, mask=mask3)
    scales = pointer(row, place.STORED_SCALES, tl.uint8, 1)
    to = scale_row(rr, stored_rows, stored_cols, half, LAYOUT)[:, None] + scale_col(block0 + b, stored_rows, LAYOUT)[None, :]
    tl.store(scales + to, byte, mask=mask2)


@triton.jit
def shuffle_rows(
    table,
    tiles,
    LAYOUT: tl.constexpr,
    INVERSE: tl.constexpr,
    ALIGN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """One BR x BK tile of codes and its scales: canonical to LAYOUT, or with INVERSE from LAYOUT to canonical.

    Canonical codes and scales have column stride 1. ALIGN: bytes that all value addresses and rows are multiples of.
    """
    BLOCKS: tl.constexpr = BK // 32
    row, _, ty, tx = find_tile(table, tiles)
    rows = tl.load(row + place.ROWS).to(tl.int32)
    cols = tl.multiple_of(tl.load(row + place.COLS).to(tl.int32), 32)
    row0 = tl.load(row + place.ROW0).to(tl.int32)
    col0 = tl.multiple_of(tl.load(row + place.COL0).to(tl.int32), 32)
    stored_rows = tl.load(row + place.STORED_ROWS)
    stored_cols = tl.multiple_of(tl.load(row + place.STORED_COLS), 32)
    half = tl.load(row + place.HALF).to(tl.int32)

    r = ty * BR + tl.arange(0, BR)
    k = tx * BK + tl.arange(0, BK)
    b = tx * BLOCKS + tl.arange(0, BLOCKS)
    mask = (r < rows)[:, None] & (k < cols)[None, :]
    canon = pointer(row, place.CANON, tl.uint8, ALIGN)
    row_stride = tl.multiple_of(tl.load(row + place.ROW_STRIDE), ALIGN)
    canon += r.to(tl.int64)[:, None] * row_stride + k[None, :]
    stored = pointer(row, place.STORED, tl.uint8, ALIGN)
    stored += (
        value_row(row0 + r, stored_rows, stored_cols, half, LAYOUT)[:, None] + value_col(col0 + k, stored_rows, LAYOUT)[None, :]
    )

    smask = (r < rows)[:, None] & (b < cols // 32)[None, :]
    canon_scales = pointer(row, place.CANON_SCALES, tl.uint8, 1)
    canon_scales += r.to(tl.int64)[:, None] * tl.load(row + place.SCALE_ROW_STRIDE) + b[None, :]
    stored_scales = pointer(row, place.STORED_SCALES, tl.uint8, 1)
    stored_scales += scale_row(row0 + r, stored_rows, stored_cols, half, LAYOUT)[:, None]
    stored_scales += scale_col(col0 // 32 + b, stored_rows, LAYOUT)[None, :]
    if INVERSE:
        tl.store(canon, tl.load(stored, mask=mask), mask=mask)
        tl.store(canon_scales, tl.load(stored_scales, mask=smask), mask=smask)
    else:
        codes = tl.load(canon, mask=mask)
        byte = tl.load(canon_scales, mask=smask)
        tl.store(stored, codes, mask=mask)
        tl.store(stored_scales, byte, mask=smask)
