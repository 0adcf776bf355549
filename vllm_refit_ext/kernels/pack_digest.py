"""Table rows of digests: strided content of any element size, or the canonical bytes behind a layout."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_refit_ext.core.digest import check_box, row_strides, words_of
from vllm_refit_ext.core.dtypes import itemsize
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.kernels.fields import Digest, cells_of
from vllm_refit_ext.kernels.moves import DigestMove, StoredBox, Strided, size3, start3
from vllm_refit_ext.kernels.tuning import WIDE

if TYPE_CHECKING:
    from vllm_refit_ext.kernels.pack import Group, Packer

Ints = tuple[int, ...]
Rows = list["tuple[Group, list[int], int, int, int, int]"]
"""Of one kind of box: group, cells, bytes behind the box's address, words behind its first, and the grid of tiles."""


def pack_digest(packer: Packer, owner: int, move: DigestMove) -> None:
    """Add a DigestMove. Raises LayoutError where the box does not lie in the tensor or in the stored matrices.

    A model has thousands of boxes of one kind, which differ in their place alone: how a kind becomes rows is worked out once.
    """
    content = move.content
    extra = len(content.shape) - len(move.shape)
    if extra and any(n != 1 for n in content.shape[: max(extra, 0)]):
        raise LayoutError(
            "the content has more dimensions than the tensor", where=move.name, got=content.shape, wanted=f"a box of {move.shape}"
        )
    box = content.shape[max(extra, 0) :]
    check_box(box, move.shape, move.start)
    if 0 in box:
        return
    flat = row_strides(move.shape)
    first = sum(map(operator.mul, move.start, flat))
    if isinstance(content, StoredBox):
        stack = content.stack
        stack.check_box(content.size, content.start, move.name, BLOCK if content.scales else 1)
        place, nbytes = (stack.scales, stack.scale_bytes) if content.scales else (stack.values, stack.value_bytes)
        matrix, *start = start3(content.start)
        buffer, offset = place.buffer, place.offset + matrix * nbytes
        count = size3(content.size)[0]
        packer.touched.add(owner, buffer, offset, count * nbytes, writes=False)
        kind = (stack.layout, stack.stored, *start, content.size, content.scales, flat)
    else:
        buffer, offset = content.at.buffer, content.at.offset
        packer.touch_box(owner, content, writes=False)
        first *= words_of(itemsize(content.dtype))  # a place is counted in words
        kind = (content.dtype, content.shape, content.strides, flat)
    key = (*kind, offset % WIDE, packer.alignment.get(buffer, WIDE))
    if key not in packer.kinds:
        packer.kinds[key] = _stored(packer, content, flat) if isinstance(content, StoredBox) else _strided(packer, content, flat)
    for group, cells, at, flat0, down, across in packer.kinds[key]:
        row = cells.copy()
        row[Digest.FLAT0], row[Digest.OUT] = first + flat0, move.out
        group.put(owner, row, {Digest.ADDRESS: (buffer, offset + at)}, down, across)


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """Words [rows, cols] at a byte offset, strides in bytes, and the flat word indices of the first and of a step."""

    offset: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    flat0: int
    flat_row: int
    flat_col: int


def _strided(packer: Packer, content: Strided, flat: Ints) -> Rows:
    size = itemsize(content.dtype)
    words, width = words_of(size), min(size, 4)
    shape, strides = (1, 1, *content.shape), (0, 0, *content.strides)
    flat = (0,) * (len(shape) - len(flat)) + flat
    unit = strides[-1] == size
    wide = unit and packer.aligned(WIDE, (content.at.buffer, (content.at.offset, *strides[:-1], shape[-1] * size)))
    group = packer.group(
        "digest_tiles", shape[-1], WORD=f"uint{8 * width}", LAYOUT="", SCALES=False, UNIT=unit, ALIGN=WIDE if wide else width
    )
    rows: Rows = []
    for lead in np.ndindex(*shape[:-2]):
        offset = sum(i * n for i, n in zip(lead, strides, strict=False))
        index = sum(i * n for i, n in zip(lead, flat, strict=False))
        whole = _Rectangle(offset, shape[-2], shape[-1], strides[-2], strides[-1], index, flat[-2], flat[-1])
        for part in _fold(_words(whole, size, words), group.tile.cols, width):
            row: dict[int, int] = {Digest.ROWS: part.rows, Digest.COLS: part.cols}
            row |= {Digest.ROW_STRIDE: part.row_stride // width, Digest.COL_STRIDE: part.col_stride // width}
            row |= {Digest.FLAT_ROW: part.flat_row, Digest.FLAT_COL: part.flat_col}
            down, across = -(-part.rows // group.tile.rows), -(-part.cols // group.tile.cols)
            rows.append((group, cells_of(row), part.offset, part.flat0, down, across))
    return rows


def _words(r: _Rectangle, size: int, words: int) -> list[_Rectangle]:
    """The rectangle in words of at most 4 bytes: an 8-byte element is two words, and two rectangles where elements lie apart."""
    if words == 1:
        return [r]
    if r.col_stride == size and r.flat_col == 1:
        return [_Rectangle(r.offset, r.rows, 2 * r.cols, r.row_stride, 4, 2 * r.flat0, 2 * r.flat_row, 1)]
    return [
        _Rectangle(r.offset + 4 * i, r.rows, r.cols, r.row_stride, r.col_stride, 2 * r.flat0 + i, 2 * r.flat_row, 2 * r.flat_col)
        for i in range(2)
    ]


def _fold(parts: list[_Rectangle], across: int, width: int) -> list[_Rectangle]:
    """One long row becomes many rows of a tile's width and a rest, because a tile of one row would leave most threads idle."""
    out = []
    for r in parts:
        if r.rows > 1 or r.cols < 2 * across or r.col_stride != width:
            out.append(r)
            continue
        rows, rest = divmod(r.cols, across)
        out.append(_Rectangle(r.offset, rows, across, across * width, width, r.flat0, across * r.flat_col, r.flat_col))
        if rest:
            done = rows * across
            out.append(_Rectangle(r.offset + done * width, 1, rest, 0, width, r.flat0 + done * r.flat_col, 0, r.flat_col))
    return out


def _stored(packer: Packer, content: StoredBox, flat: Ints) -> Rows:
    stack = content.stack
    place, nbytes = (stack.scales, stack.scale_bytes) if content.scales else (stack.values, stack.value_bytes)
    count, rows, cols = size3(content.size)
    matrix, row0, col0 = start3(content.start)
    wide = packer.aligned(WIDE, (place.buffer, (place.offset + matrix * nbytes, nbytes, cols)))
    group = packer.group(
        "digest_tiles", cols, WORD="uint8", LAYOUT=stack.layout, SCALES=content.scales, UNIT=True, ALIGN=WIDE if wide else 1
    )
    flat = (0,) * (3 - len(flat)) + flat
    row: dict[int, int] = {Digest.ROWS: rows, Digest.COLS: cols, Digest.ROW0: row0, Digest.COL0: col0}
    row |= {Digest.FLAT_ROW: flat[-2], Digest.FLAT_COL: flat[-1]}
    row |= {Digest.STORED_ROWS: stack.stored.rows, Digest.STORED_COLS: stack.stored.cols, Digest.HALF: stack.stored.half}
    down, across = -(-rows // group.tile.rows), -(-cols // group.tile.cols)
    return [(group, cells_of(row), i * nbytes, i * flat[-3], down, across) for i in range(count)]
