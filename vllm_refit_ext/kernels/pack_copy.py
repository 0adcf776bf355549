"""Table rows of copies: dimensions are merged where both sides allow it, and moved in the widest units that both sides allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_refit_ext.core.dtypes import itemsize
from vllm_refit_ext.kernels.fields import Copy
from vllm_refit_ext.kernels.moves import CopyMove
from vllm_refit_ext.kernels.tuning import WIDE

if TYPE_CHECKING:
    from vllm_refit_ext.kernels.pack import Packer

Ints = tuple[int, ...]


def pack_copy(packer: Packer, owner: int, move: CopyMove) -> None:
    """Add a CopyMove: all dimensions but the last two become rows of their own."""
    source, target = move.source, move.target
    if 0 in source.shape:
        return
    a, b = itemsize(source.dtype), itemsize(target.dtype)
    shape, s, t = merge(source.shape, source.strides, target.strides, a, b)
    lanes = _lanes(packer, move, shape, s, t)
    if lanes > 1:
        shape, s, t = (*shape[:-1], shape[-1] // lanes), (*s[:-1], a * lanes), (*t[:-1], b * lanes)
    a, b = a * lanes, b * lanes
    if move.casts:
        group = packer.group("copy_units", shape[-1], READ=source.dtype, WRITE=target.dtype, CAST=True, LANES=lanes)
    else:
        word = f"int{8 * min(a, 8)}"
        group = packer.group("copy_units", shape[-1], READ=word, WRITE=word, CAST=False, LANES=max(a // 8, 1))
    units = group.tile.rows * group.tile.cols
    rows, cols = shape[-2:]
    # A tile is as wide as the run, rounded up to a power of two, so that short runs don't leave most of its lanes idle.
    shift = min((cols - 1).bit_length(), units.bit_length() - 1)
    row: dict[int, int] = {Copy.ROWS: rows, Copy.COLS: cols, Copy.SHIFT: shift}
    row |= {Copy.SOURCE_ROW: s[-2] // a, Copy.SOURCE_COL: s[-1] // a, Copy.TARGET_ROW: t[-2] // b, Copy.TARGET_COL: t[-1] // b}
    for lead in np.ndindex(*shape[:-2]):
        at: dict[int, tuple[int, int]] = {
            Copy.SOURCE: (source.at.buffer, source.at.offset + _dot(lead, s)),
            Copy.TARGET: (target.at.buffer, target.at.offset + _dot(lead, t)),
        }
        group.add(owner, dict(row), at, -(-rows // (units >> shift)), -(-cols // (1 << shift)))
    packer.touch_box(owner, source, writes=False)
    packer.touch_box(owner, target, writes=True)


def merge(shape: Ints, s: Ints, t: Ints, a: int, b: int) -> tuple[Ints, Ints, Ints]:
    """The same box in the fewest dimensions, at least two: those of size 1 go, neighbours that step evenly on both sides join."""
    dims: list[tuple[int, int, int]] = []
    for n, x, y in zip(shape, s, t, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * x and dims[-1][2] == n * y:
            dims[-1] = (dims[-1][0] * n, x, y)
        else:
            dims.append((n, x, y))
    if not dims or (len(dims) == 1 and dims[0][1:] != (a, b)):
        dims.append((1, a, b))
    if len(dims) < 2:
        dims.insert(0, (1, 0, 0))
    return tuple(d[0] for d in dims), tuple(d[1] for d in dims), tuple(d[2] for d in dims)


def _lanes(packer: Packer, move: CopyMove, shape: Ints, s: Ints, t: Ints) -> int:
    """Elements a thread moves at once: as many as 16 bytes hold while every address and stride stays a multiple."""
    source, target = move.source, move.target
    a, b = itemsize(source.dtype), itemsize(target.dtype)
    if s[-1] != a or t[-1] != b:
        return 1
    lanes = WIDE // max(a, b)
    while lanes > 1 and not (
        shape[-1] % lanes == 0
        and packer.aligned(lanes * a, (source.at.buffer, (source.at.offset, *s[:-1])))
        and packer.aligned(lanes * b, (target.at.buffer, (target.at.offset, *t[:-1])))
    ):
        lanes //= 2
    return lanes


def _dot(lead: Ints, strides: Ints) -> int:
    return sum(i * n for i, n in zip(lead, strides, strict=False))
