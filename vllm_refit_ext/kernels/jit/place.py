"""Where an element lives in each layout: the row and column functions of `core.layouts` in Triton. Offsets are bytes."""

# Triton's language: constants are upper case, types its own, and branches that return need an else.
# ruff: noqa: N803, RET505
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from vllm_refit_ext.kernels import fields

FIRST_TILE = tl.constexpr(int(fields.Matrix.FIRST_TILE))
TILE_COLS = tl.constexpr(int(fields.Matrix.TILE_COLS))
CANON = tl.constexpr(int(fields.Matrix.CANON))
CANON_SCALES = tl.constexpr(int(fields.Matrix.CANON_SCALES))
STORED = tl.constexpr(int(fields.Matrix.STORED))
STORED_SCALES = tl.constexpr(int(fields.Matrix.STORED_SCALES))
ROWS = tl.constexpr(int(fields.Matrix.ROWS))
COLS = tl.constexpr(int(fields.Matrix.COLS))
ROW_STRIDE = tl.constexpr(int(fields.Matrix.ROW_STRIDE))
COL_STRIDE = tl.constexpr(int(fields.Matrix.COL_STRIDE))
SCALE_ROW_STRIDE = tl.constexpr(int(fields.Matrix.SCALE_ROW_STRIDE))
ROW0 = tl.constexpr(int(fields.Matrix.ROW0))
COL0 = tl.constexpr(int(fields.Matrix.COL0))
STORED_ROWS = tl.constexpr(int(fields.Matrix.STORED_ROWS))
STORED_COLS = tl.constexpr(int(fields.Matrix.STORED_COLS))
HALF = tl.constexpr(int(fields.Matrix.HALF))
WIDTH = tl.constexpr(fields.WIDTH)


@triton.jit
def find_tile(table, tiles):
    """(table row of this program's matrix, its number, tile row, tile column)."""
    pid = tl.program_id(0)
    number = tl.load(tiles + pid)
    row = table + number.to(tl.int64) * WIDTH
    local = pid - tl.load(row + FIRST_TILE).to(tl.int32)
    across = tl.load(row + TILE_COLS).to(tl.int32)
    return row, number, local // across, local % across


@triton.jit
def pointer(row, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The address in column FIELD as a pointer to DTYPE that is known to be a multiple of ALIGN bytes."""
    return tl.multiple_of(tl.load(row + FIELD).to(tl.pointer_type(DTYPE)), ALIGN)


@triton.jit
def shuffled_row(r, half):
    """`core.layouts.shuffled_row`."""
    r = tl.where(half > 0, tl.where(r < half, 2 * r + 1, 2 * (r - half)), r)
    return (r // 32) * 32 + (r % 4) * 8 + (r % 32) // 4


@triton.jit
def value_row(r, stored_rows, stored_cols, half, LAYOUT: tl.constexpr):
    """Row part of a value's offset; `r` int32 canonical rows of the stored matrix."""
    if LAYOUT == "marlin":
        return ((r // 64) * 1024 + (r % 8) * 128 + ((r % 64) // 8) * 4).to(tl.int64)
    elif LAYOUT == "trtllm_moe":
        return shuffled_row(r, half).to(tl.int64) * stored_cols
    else:
        return r.to(tl.int64) * stored_cols


@triton.jit
def value_col(k, stored_rows, LAYOUT: tl.constexpr):
    """Column part of a value's offset; `k` int32 columns of the stored matrix."""
    if LAYOUT == "marlin":
        return (k // 16).to(tl.int64) * (16 * stored_rows) + ((k % 8) // 2 * 32 + (k % 2) * 2 + (k % 16) // 8)
    else:
        return k


@triton.jit
def blocked_row(r, blocks):
    """Row part of an offset in the 128 x 4 block order."""
    return (r // 128).to(tl.int64) * ((blocks + 3) // 4 * 512) + ((r % 32) * 16 + (r % 128) // 32 * 4)


@triton.jit
def scale_row(r, stored_rows, stored_cols, half, LAYOUT: tl.constexpr):
    """Row part of a scale byte's offset."""
    if LAYOUT == "marlin":
        j = (r % 64) // 8
        return ((r // 64) * 64 + (r % 8) * 8 + (j // 4) * 4 + (j % 2) * 2 + (j % 4) // 2).to(tl.int64)
    elif LAYOUT == "plain":
        return r.to(tl.int64) * (stored_cols // 32)
    elif LAYOUT == "trtllm_moe":
        return blocked_row(shuffled_row(r, half), stored_cols // 32)
    else:
        return blocked_row(r, stored_cols // 32)


@triton.jit
def scale_col(c, stored_rows, LAYOUT: tl.constexpr):
    """Column part of a scale byte's offset; `c` int32 scale blocks."""
    if LAYOUT == "marlin":
        return c.to(tl.int64) * stored_rows
    elif LAYOUT == "plain":
        return c
    else:
        return (c // 4) * 512 + c % 4
