"""From moves to table rows: expand, align and group them, so that each group is one launch of one specialised kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.dtypes import itemsize
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.kernels import fields
from vllm_refit_ext.kernels.moves import CopyMove, DigestMove, QuantizeMove, ShuffleMove, Stack, Strided, size3, start3
from vllm_refit_ext.kernels.pack_copy import pack_copy
from vllm_refit_ext.kernels.pack_digest import Rows, pack_digest
from vllm_refit_ext.kernels.tuning import TILES, WIDE, Tile, choose

Key = tuple[tuple[str, object], ...]
"""What a launch is specialised for: ("kernel", name) and the kernel's constants, sorted by name."""

_INT32 = 2**31 - 1


@dataclass
class Group:
    """The rows of one launch. `slots[c]` lists the buffer numbers of address column c; `owner` the move of each row."""

    key: Key
    tile: Tile
    rows: list[list[int]] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)
    slots: dict[int, list[int]] = field(default_factory=dict)
    owner: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, owner: int, row: dict[int, int], at: dict[int, tuple[int, int]], down: int, across: int) -> None:
        """Add a row: plain columns `row`, addresses `at` {column: (buffer, byte offset)}, and its grid of tiles."""
        self.put(owner, fields.cells_of(row), at, down, across)

    def put(self, owner: int, cells: list[int], at: dict[int, tuple[int, int]], down: int, across: int) -> None:
        """`add` with the plain columns as the cells of a row, which are taken."""
        cells[0], cells[1] = self.count, across
        for column, (buffer, offset) in at.items():
            cells[column] = offset
            self.slots.setdefault(column, []).append(buffer)
        self.rows.append(cells)
        self.tiles.append(down * across)
        self.owner.append(owner)
        self.count += down * across
        if self.count > _INT32:
            raise LayoutError(
                "too many tiles for one launch",
                got=self.count,
                wanted=f"at most {_INT32}",
                do="split the moves over several tables",
            )

    def tile_owner(self) -> NDArray[np.int32]:
        """For each tile, its row: what a program reads first. 4 bytes a tile."""
        return np.repeat(np.arange(len(self.rows), dtype=np.int32), self.tiles)


@dataclass
class Touched:
    """Byte ranges of buffers that a table reads or writes, for bounds, alignment and aliasing checks: [n] each."""

    buffer: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    writes: list[bool] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)

    def add(self, owner: int, buffer: int, offset: int, nbytes: int, writes: bool) -> None:
        """Note `nbytes` at `offset` of `buffer`."""
        if nbytes:
            self.buffer.append(buffer)
            self.begin.append(offset)
            self.end.append(offset + nbytes)
            self.writes.append(writes)
            self.owner.append(owner)


class Packer:
    """Collects groups. `alignment` is the least alignment in bytes that each buffer's address will have (16 where not given)."""

    def __init__(self, alignment: Mapping[int, int], tiles: Mapping[str, tuple[Tile, ...]]) -> None:
        self.alignment = alignment
        self.tile_sizes = {**TILES, **tiles}
        self.groups: dict[tuple[Key, Tile], Group] = {}
        self.touched = Touched()
        self.kinds: dict[tuple[object, ...], Rows] = {}
        """Rows of digests by kind of box."""

    def pack(self, moves: Iterable[CopyMove | QuantizeMove | ShuffleMove | DigestMove]) -> None:
        """Add every move, in order."""
        for owner, move in enumerate(moves):
            if isinstance(move, QuantizeMove):
                self.quantize(owner, move)
            elif isinstance(move, ShuffleMove):
                self.shuffle(owner, move)
            elif isinstance(move, CopyMove):
                pack_copy(self, owner, move)
            else:
                pack_digest(self, owner, move)

    def aligned(self, wide: int, *parts: tuple[int, Iterable[int]]) -> bool:
        """Whether every (buffer, [offset and strides]) is a multiple of `wide` bytes."""
        return all(self.alignment.get(b, WIDE) % wide == 0 and all(n % wide == 0 for n in numbers) for b, numbers in parts)

    def group(self, kernel: str, cols: int, **constants: object) -> Group:
        """The group of launches of `kernel` with these constants and the tile for rows of `cols` columns."""
        key: Key = (("kernel", kernel), *sorted(constants.items()))
        tile = choose(self.tile_sizes[kernel], max(cols, 1))
        return self.groups.setdefault((key, tile), Group(key, tile))

    def quantize(self, owner: int, move: QuantizeMove) -> None:
        """Rows of a QuantizeMove, one for each matrix."""
        source, target, size = move.source, move.target, itemsize(move.source.dtype)
        *_, row_stride, col_stride = source.strides
        unit = col_stride == size
        wide = unit and self.aligned(WIDE, (source.at.buffer, (source.at.offset, *source.strides[:-1])))
        group = self.group(
            "quantize_marlin" if target.layout == "marlin" else "quantize_rows",
            source.shape[-1],
            LAYOUT=target.layout,
            RULE=move.rule,
            DTYPE=source.dtype,
            UNIT=unit,
            ALIGN=WIDE if wide else size,
            STORED_ALIGN=self._stored_align(target, move.name),
        )
        m = fields.Matrix
        for matrix, offset in _matrices(source):
            at: dict[int, tuple[int, int]] = {
                m.CANON: (source.at.buffer, source.at.offset + offset),
                m.CANON_SCALES: (source.at.buffer, 0),
            }
            row: dict[int, int] = {m.ROW_STRIDE: row_stride // size, m.COL_STRIDE: col_stride // size}
            self._matrix(group, owner, target, source.shape, move.start, matrix, row, at)
        self.touch_box(owner, source, writes=False)
        self._touch_stack(owner, target, source.shape, move.start, writes=True)

    def shuffle(self, owner: int, move: ShuffleMove) -> None:
        """Rows of a ShuffleMove, one for each matrix."""
        codes, scales, target = move.codes, move.scales, move.target
        wide = self.aligned(WIDE, (codes.at.buffer, (codes.at.offset, *codes.strides[:-1])))
        stored = self._stored_align(target, move.name)
        if target.layout == "marlin" and not move.inverse:
            # 8 bytes are read at a time: the two halves of 16 columns are separate loads.
            group = self.group("shuffle_marlin", codes.shape[-1], ALIGN=WIDE if wide else 1, STORED_ALIGN=stored)
        else:
            align = WIDE if wide and stored == WIDE else 1
            group = self.group("shuffle_rows", codes.shape[-1], LAYOUT=target.layout, INVERSE=move.inverse, ALIGN=align)
        m = fields.Matrix
        for (matrix, offset), (_, scale_offset) in zip(_matrices(codes), _matrices(scales), strict=True):
            at: dict[int, tuple[int, int]] = {
                m.CANON: (codes.at.buffer, codes.at.offset + offset),
                m.CANON_SCALES: (scales.at.buffer, scales.at.offset + scale_offset),
            }
            row: dict[int, int] = {m.ROW_STRIDE: codes.strides[-2], m.COL_STRIDE: 1, m.SCALE_ROW_STRIDE: scales.strides[-2]}
            self._matrix(group, owner, target, codes.shape, move.start, matrix, row, at)
        for box in (codes, scales):
            self.touch_box(owner, box, writes=move.inverse)
        self._touch_stack(owner, target, codes.shape, move.start, writes=not move.inverse)

    def _matrix(
        self,
        group: Group,
        owner: int,
        target: Stack,
        shape: tuple[int, ...],
        start: tuple[int, ...],
        matrix: int,
        row: dict[int, int],
        at: dict[int, tuple[int, int]],
    ) -> None:
        m, stored = fields.Matrix, target.stored
        rows, cols = shape[-2:]
        first, row0, col0 = start3(start)
        if rows == 0 or cols == 0:
            return
        at[m.STORED] = (target.values.buffer, target.values.offset + (first + matrix) * target.value_bytes)
        at[m.STORED_SCALES] = (target.scales.buffer, target.scales.offset + (first + matrix) * target.scale_bytes)
        row |= {m.ROWS: rows, m.COLS: cols, m.ROW0: row0, m.COL0: col0}
        row |= {m.STORED_ROWS: stored.rows, m.STORED_COLS: stored.cols, m.HALF: stored.half}
        tile = group.tile
        down = -(-rows // tile.rows)
        if "marlin" in str(dict(group.key)["kernel"]):
            # Tiles start on the layout's own borders of 64 rows, not on the box's.
            down = -(-(row0 + rows) // 64) - row0 // 64
        group.add(owner, row, at, down, -(-cols // tile.cols))

    def _stored_align(self, target: Stack, name: str) -> int:
        wide = self.aligned(WIDE, (target.values.buffer, (target.values.offset,)))
        if target.layout == "marlin" and not self.aligned(4, (target.values.buffer, (target.values.offset,))):
            raise LayoutError(
                "Marlin words must lie on 4 bytes", where=name, got=f"offset {target.values.offset}", wanted="a multiple of 4"
            )
        return WIDE if wide else (4 if target.layout == "marlin" else 1)

    def touch_box(self, owner: int, box: Strided, writes: bool) -> None:
        self.touched.add(owner, box.at.buffer, box.at.offset, box.nbytes, writes)

    def _touch_stack(self, owner: int, target: Stack, shape: tuple[int, ...], start: tuple[int, ...], writes: bool) -> None:
        count, rows, cols = size3(shape)
        count = count if rows and cols else 0
        for place, nbytes in ((target.values, target.value_bytes), (target.scales, target.scale_bytes)):
            self.touched.add(owner, place.buffer, place.offset + start3(start)[0] * nbytes, count * nbytes, writes)


def _matrices(box: Strided) -> list[tuple[int, int]]:
    """(matrix, byte offset) for each matrix of a box of two or three dimensions."""
    if len(box.shape) == 2:
        return [(0, 0)]
    return [(i, i * box.strides[0]) for i in range(box.shape[0])]
