"""The copy kernel: strided rectangles to strided rectangles, raw or with a cast, many through one table."""

# Triton's language: constants are upper case, types its own, and branches that return need an else.
# ruff: noqa: N803, SIM108, SIM300
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from vllm_refit_ext.kernels import fields
from vllm_refit_ext.kernels.jit.format import narrow, widen

FIRST_TILE = tl.constexpr(int(fields.Copy.FIRST_TILE))
TILE_COLS = tl.constexpr(int(fields.Copy.TILE_COLS))
SOURCE = tl.constexpr(int(fields.Copy.SOURCE))
TARGET = tl.constexpr(int(fields.Copy.TARGET))
ROWS = tl.constexpr(int(fields.Copy.ROWS))
COLS = tl.constexpr(int(fields.Copy.COLS))
SOURCE_ROW = tl.constexpr(int(fields.Copy.SOURCE_ROW))
SOURCE_COL = tl.constexpr(int(fields.Copy.SOURCE_COL))
TARGET_ROW = tl.constexpr(int(fields.Copy.TARGET_ROW))
TARGET_COL = tl.constexpr(int(fields.Copy.TARGET_COL))
SHIFT = tl.constexpr(int(fields.Copy.SHIFT))
WIDTH = tl.constexpr(fields.WIDTH)


@triton.jit
def copy_units(
    table,
    tiles,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    CAST: tl.constexpr,
    LANES: tl.constexpr,
    UNITS: tl.constexpr,
):
    """One tile of UNITS units, 2^SHIFT of them a row. A unit is LANES contiguous elements, read as READ and written as WRITE.

    A copy reads and writes words. With CAST, float16, float32 and uint16 (the bits of bfloat16) are converted through float32.

    Source addresses are multiples of a unit's bytes, and so are target addresses. Runs that are not a power of two long waste the
    lanes beyond their end, never bytes.
    """
    pid = tl.program_id(0)
    row = table + tl.load(tiles + pid).to(tl.int64) * WIDTH
    local = pid - tl.load(row + FIRST_TILE).to(tl.int32)
    across = tl.load(row + TILE_COLS).to(tl.int32)
    shift = tl.load(row + SHIFT).to(tl.int32)
    unit = tl.arange(0, UNITS)
    r = (local // across) * (UNITS >> shift) + (unit >> shift)
    c = ((local % across) << shift) + (unit & ((1 << shift) - 1))
    mask = ((r < tl.load(row + ROWS)) & (c < tl.load(row + COLS)))[:, None]
    r = r.to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    source = tl.multiple_of(tl.load(row + SOURCE).to(tl.pointer_type(READ)), LANES * READ.primitive_bitwidth // 8)
    target = tl.multiple_of(tl.load(row + TARGET).to(tl.pointer_type(WRITE)), LANES * WRITE.primitive_bitwidth // 8)
    source_at = (r * tl.load(row + SOURCE_ROW) + c * tl.load(row + SOURCE_COL)) * LANES
    target_at = (r * tl.load(row + TARGET_ROW) + c * tl.load(row + TARGET_COL)) * LANES
    x = tl.load(source + (source_at[:, None] + lane), mask=mask)
    if CAST:
        if READ == tl.uint16:
            x = widen(x)
        else:
            x = x.to(tl.float32)
        # Every NaN becomes the quiet NaN of the target type, because hardware, torch and numpy each keep other bits of it.
        nan = x != x
        if WRITE == tl.uint16:
            x = tl.where(nan, 0x7FC0, narrow(x)).to(tl.uint16)
        elif WRITE == tl.float16:
            x = tl.where(nan, 0x7E00, x.to(tl.float16).to(tl.uint16, bitcast=True)).to(tl.uint16).to(tl.float16, bitcast=True)
        else:
            x = tl.where(nan, 0x7FC00000, x.to(tl.uint32, bitcast=True)).to(tl.uint32).to(tl.float32, bitcast=True)
    tl.store(target + (target_at[:, None] + lane), x, mask=mask)
