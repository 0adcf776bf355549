"""Whole matrices into the layouts of `core.layouts` and back, in numpy: what the tests hold the kernels to."""

from __future__ import annotations

import numpy as np

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import Int, Offsets, Stored, layout_of
from vllm_refit_ext.core.mxfp8 import BLOCK, CODE_NAN, Bytes, Floats, check_k

PAD_SCALE = {"plain": 127, "linear_128x4": 0, "trtllm_moe": 127, "marlin": 0}
"""The scale byte that the engine's own post-load step gives to padded elements."""


def to_kernel(
    layout: str,
    codes: Bytes,
    scales: Bytes,
    *,
    gated: bool = False,
    stored: tuple[int, int] | None = None,
    pad_scale: int | None = None,
) -> tuple[Bytes, Bytes]:
    """Canonical codes [..., N, K] and scales [..., N, K/32] to the bytes that the engine's kernels read, per matrix of the stack.

    `gated` marks a fused [gate; up] matrix. `stored` is the padded (rows, K) of the engine; by default the rows are rounded up to
    what the layout needs and K stays. Padding gets code 0 and scale byte `pad_scale` (default: the layout's own). Bytes that only
    fill up a block of 128 x 4 scales are 0.

    Returns uint8 arrays [..., *value_shape] and [..., *scale_shape]. Raises LayoutError for shapes or dtypes that don't fit.
    """
    form = layout_of(layout)
    check_pair(codes, scales, layout)
    if codes.ndim < 2:
        raise LayoutError("a layout takes matrices", where=layout, got=f"shape {codes.shape}", wanted="[..., N, K]")
    grid = stored_for(layout, codes.shape[-2], codes.shape[-1], gated=gated, stored=stored)
    fill = PAD_SCALE[layout] if pad_scale is None else pad_scale
    codes, scales = _pad(codes, grid, grid.cols, 0), _pad(scales, grid, grid.blocks, fill)
    values = _scatter(codes, form.value_row, form.value_col, grid, form.value_shape(grid))
    return values, _scatter(scales, form.scale_row, form.scale_col, grid, form.scale_shape(grid))


def to_canonical(
    layout: str, values: Bytes, scale_bytes: Bytes, *, gated: bool = False, shape: tuple[int, int] | None = None
) -> tuple[Bytes, Bytes]:
    """The inverse of `to_kernel`: codes [..., N, K] and scales [..., N, K/32] of a stack of matrices as the engine holds them.

    `values` and `scale_bytes` are uint8 in the shapes that `to_kernel` returns; `shape` is the canonical (N, K) when the engine
    holds more. Raises LayoutError for shapes or dtypes that don't fit.
    """
    form = layout_of(layout)
    if values.dtype != np.uint8 or scale_bytes.dtype != np.uint8:
        raise LayoutError(
            "kernel layouts are bytes",
            where=layout,
            got=f"{values.dtype}, {scale_bytes.dtype}",
            wanted="uint8",
            do="view, don't convert",
        )
    if values.ndim < 2:
        raise LayoutError("a layout holds matrices", where=layout, got=f"shape {values.shape}", wanted="[..., rows, bytes]")
    lead, (a, b) = values.shape[:-2], values.shape[-2:]
    grid = Stored(b // 16, a * 16, gated) if layout == "marlin" else Stored(a, b, gated)
    form.check(grid)
    wanted = (*lead, *form.scale_shape(grid))
    if scale_bytes.shape != wanted:
        raise LayoutError("scale bytes don't fit the values", where=layout, got=scale_bytes.shape, wanted=wanted)
    n, k = shape or (grid.rows, grid.cols)
    stored_for(layout, n, k, gated=gated, stored=(grid.rows, grid.cols))
    codes = _gather(values, form.value_row, form.value_col, grid, grid.cols, len(form.value_shape(grid)))
    scales = _gather(scale_bytes, form.scale_row, form.scale_col, grid, grid.blocks, len(form.scale_shape(grid)))
    return _unpad(codes, grid, n, k), _unpad(scales, grid, n, k // BLOCK)


def stored_for(layout: str, rows: int, cols: int, *, gated: bool = False, stored: tuple[int, int] | None = None) -> Stored:
    """The stored size of a canonical rows x cols matrix: `stored` if given, else the least size that the layout takes.

    Raises LayoutError where that is smaller than the matrix, or not a size of the layout.
    """
    form = layout_of(layout)
    check_k(cols, layout)
    grid = Stored(*stored, gated) if stored else Stored(-(-rows // form.row_multiple) * form.row_multiple, cols, gated)
    form.check(grid)
    if grid.rows < rows or grid.cols < cols or (gated and (rows % 2 or grid.rows % 2)):
        raise LayoutError(
            "the matrix does not fit what the engine holds",
            where=layout,
            got=(rows, cols),
            wanted=f"at most {(grid.rows, grid.cols)}",
        )
    return grid


def _pad(array: Bytes, grid: Stored, width: int, fill: int) -> Bytes:
    halves = 2 if grid.gated else 1
    *lead, n, k = array.shape
    parts = array.reshape(*lead, halves, n // halves, k)
    padded = np.full((*lead, halves, grid.rows // halves, width), fill, dtype=np.uint8)
    padded[..., : n // halves, :k] = parts
    return padded.reshape(*lead, grid.rows, width)


def _unpad(array: Bytes, grid: Stored, n: int, k: int) -> Bytes:
    halves = 2 if grid.gated else 1
    parts = array.reshape(*array.shape[:-2], halves, grid.rows // halves, array.shape[-1])
    return np.ascontiguousarray(parts[..., : n // halves, :k]).reshape(*array.shape[:-2], n, k)


def _scatter(array: Bytes, row: Offsets, col: Offsets, grid: Stored, shape: tuple[int, ...]) -> Bytes:
    flat = np.zeros((*array.shape[:-2], int(np.prod(shape))), dtype=np.uint8)
    flat[..., _offsets(row, col, grid, array.shape[-1])] = array
    return flat.reshape(*array.shape[:-2], *shape)


def _gather(stored_bytes: Bytes, row: Offsets, col: Offsets, grid: Stored, width: int, ndim: int) -> Bytes:
    flat = stored_bytes.reshape(*stored_bytes.shape[: stored_bytes.ndim - ndim], -1)
    return np.ascontiguousarray(flat[..., _offsets(row, col, grid, width)])


def _offsets(row: Offsets, col: Offsets, grid: Stored, width: int) -> Int:
    return row(grid, np.arange(grid.rows))[:, None] + col(grid, np.arange(width))[None, :]


def dequantize(codes: Bytes, scales: Bytes) -> Floats:
    """Values float32 [..., K] of codes uint8 [..., K] and scales uint8 [..., K/32]; a scale byte 255 gives NaN.

    Raises LayoutError for dtypes other than uint8 or shapes that don't belong together.
    """
    check_pair(codes, scales)
    blocks = decode_e4m3(codes).reshape(*scales.shape, BLOCK)
    # Two steps keep each factor a normal float32, whatever the byte; both are powers of two.
    power = scales.astype(np.int32) - 127
    half = power // 2
    with np.errstate(over="ignore", under="ignore"):
        values = blocks * np.ldexp(np.float32(1), half)[..., None] * np.ldexp(np.float32(1), power - half)[..., None]
    values[scales == 255] = np.nan
    flat: Floats = values.astype(np.float32).reshape(codes.shape)
    return flat


def check_pair(codes: Bytes, scales: Bytes, name: str = "") -> None:
    """Raise LayoutError unless codes uint8 [..., K] and scales uint8 [..., K/32] belong together."""
    for what, array in (("codes", codes), ("scales", scales)):
        if array.dtype != np.uint8:
            raise LayoutError(
                f"{what} must be given as bytes", where=name, got=array.dtype, wanted="uint8", do="view, don't convert"
            )
    check_k(codes.shape[-1] if codes.ndim else 0, name)
    wanted = (*codes.shape[:-1], codes.shape[-1] // BLOCK)
    if scales.shape != wanted:
        raise LayoutError("scales don't fit the codes", where=name, got=f"scales {scales.shape}", wanted=str(wanted))


def decode_e4m3(codes: Bytes) -> Floats:
    """Values float32 of E4M3 codes, same shape."""
    return _VALUES[codes]


def _values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    value[(code & 0x7F) == CODE_NAN] = np.nan
    return np.where(code & 0x80, -value, value).astype(np.float32)


_VALUES = _values()
