"""The digest kernel: `core.digest` over strided content, or over canonical content read out of a layout."""

# Triton's language: constants are upper case, types its own, and branches that return need an else.
# ruff: noqa: N803, SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from vllm_refit_ext.core import digest as spec
from vllm_refit_ext.kernels import fields
from vllm_refit_ext.kernels.jit.place import scale_col, scale_row, value_col, value_row

FIRST_TILE = tl.constexpr(int(fields.Digest.FIRST_TILE))
TILE_COLS = tl.constexpr(int(fields.Digest.TILE_COLS))
ADDRESS = tl.constexpr(int(fields.Digest.ADDRESS))
OUT = tl.constexpr(int(fields.Digest.OUT))
ROWS = tl.constexpr(int(fields.Digest.ROWS))
COLS = tl.constexpr(int(fields.Digest.COLS))
ROW_STRIDE = tl.constexpr(int(fields.Digest.ROW_STRIDE))
COL_STRIDE = tl.constexpr(int(fields.Digest.COL_STRIDE))
FLAT0 = tl.constexpr(int(fields.Digest.FLAT0))
FLAT_ROW = tl.constexpr(int(fields.Digest.FLAT_ROW))
FLAT_COL = tl.constexpr(int(fields.Digest.FLAT_COL))
ROW0 = tl.constexpr(int(fields.Digest.ROW0))
COL0 = tl.constexpr(int(fields.Digest.COL0))
STORED_ROWS = tl.constexpr(int(fields.Digest.STORED_ROWS))
STORED_COLS = tl.constexpr(int(fields.Digest.STORED_COLS))
HALF = tl.constexpr(int(fields.Digest.HALF))
WIDTH = tl.constexpr(fields.WIDTH)
INDEX_LOW = tl.constexpr(spec.INDEX_LOW)
INDEX_HIGH = tl.constexpr(spec.INDEX_HIGH)
MIX_1 = tl.constexpr(spec.MIX_1)
MIX_2 = tl.constexpr(spec.MIX_2)


@triton.jit
def digest_tiles(
    table,
    tiles,
    out,
    WORD: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """Add one BR x BK tile's digest to out[OUT] (int64, wraps). LAYOUT "" reads strided words WORD (uint8, uint16, uint32),
    column stride 1 when UNIT; otherwise the values of a layout, or its scale bytes when SCALES. ALIGN: bytes that the
    address, the rows and the box's width are multiples of."""
    pid = tl.program_id(0)
    row = table + tl.load(tiles + pid).to(tl.int64) * WIDTH
    local = pid - tl.load(row + FIRST_TILE).to(tl.int32)
    across = tl.load(row + TILE_COLS).to(tl.int32)
    rows = tl.load(row + ROWS).to(tl.int32)
    cols = tl.multiple_of(tl.load(row + COLS).to(tl.int32), max(ALIGN * 8 // WORD.primitive_bitwidth, 1))
    r0 = (local // across) * BR
    r = r0 + tl.arange(0, BR)
    c0 = (local % across) * BK
    c = c0 + tl.arange(0, BK)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    base = tl.multiple_of(tl.load(row + ADDRESS).to(tl.pointer_type(WORD)), ALIGN)
    if LAYOUT == "":
        row_stride = tl.multiple_of(tl.load(row + ROW_STRIDE), max(ALIGN * 8 // WORD.primitive_bitwidth, 1))
        at = r.to(tl.int64)[:, None] * row_stride
        if UNIT:
            at = at + c[None, :]
        else:
            at = at + c.to(tl.int64)[None, :] * tl.load(row + COL_STRIDE)
    else:
        stored_rows = tl.load(row + STORED_ROWS)
        stored_cols = tl.multiple_of(tl.load(row + STORED_COLS), 32)
        half = tl.load(row + HALF).to(tl.int32)
        rr = tl.load(row + ROW0).to(tl.int32) + r
        cc = tl.multiple_of(tl.load(row + COL0).to(tl.int32), 1 if SCALES else 32) + c
        if SCALES:
            at = scale_row(rr, stored_rows, stored_cols, half, LAYOUT)[:, None] + scale_col(cc, stored_rows, LAYOUT)[None, :]
        else:
            at = value_row(rr, stored_rows, stored_cols, half, LAYOUT)[:, None] + value_col(cc, stored_rows, LAYOUT)[None, :]
    h = tl.load(base + at, mask=mask, other=0).to(tl.uint32)

    flat_row = tl.load(row + FLAT_ROW)
    flat_col = tl.load(row + FLAT_COL)
    corner = tl.load(row + FLAT0) + r0 * flat_row + c0 * flat_col
    last = corner + (BR - 1) * flat_row + (BK - 1) * flat_col
    if (corner >> 32) == (last >> 32):
        # hi32(i) is the same all over the tile, and lo32(i) * constant is linear modulo 2^32: it splits by row and column.
        first = (corner + (r - r0) * flat_row).to(tl.uint32) * INDEX_LOW + (corner >> 32).to(tl.uint32) * INDEX_HIGH
        h += first[:, None] + ((c - c0).to(tl.uint32) * (flat_col.to(tl.uint32) * INDEX_LOW))[None, :]
    else:
        index = corner + (r - r0).to(tl.int64)[:, None] * flat_row + (c - c0).to(tl.int64)[None, :] * flat_col
        h += index.to(tl.uint32) * INDEX_LOW + (index >> 32).to(tl.uint32) * INDEX_HIGH
    h ^= h >> 16
    h *= MIX_1
    h ^= h >> 15
    h *= MIX_2
    h ^= h >> 16
    tl.atomic_add(out + tl.load(row + OUT), tl.sum(tl.where(mask, h, 0).to(tl.int64)), sem="relaxed")
