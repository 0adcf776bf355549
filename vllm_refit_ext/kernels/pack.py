"""From moves to table rows: expand, align and group them, so that each group is one launch of one specialised kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.digest import check_box, row_strides, words_of
from vllm_refit_ext.core.dtypes import itemsize
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.kernels import fields
from vllm_refit_ext.kernels.moves import CopyMove, DigestMove, HeldBox, QuantizeMove, ShuffleMove, Stack, Strided, size3, start3
from vllm_refit_ext.kernels.tuning import TILES, Tile

Key = tuple[tuple[str, object], ...]
"""What a launch is specialised for: ("kernel", name) and the kernel's constants, sorted by name."""

WIDE = 16
"""Bytes of the widest load a thread does. Addresses that are multiples of it take the fast kernel."""

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
        cells = [0] * fields.WIDTH
        cells[0], cells[1] = self.count, across
        for column, value in row.items():
            cells[column] = value
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

    def __init__(self, alignment: Mapping[int, int], tiles: Mapping[str, Tile]) -> None:
        self.alignment = alignment
        self.tile_sizes = {**TILES, **tiles}
        self.groups: dict[Key, Group] = {}
        self.touched = Touched()

    def pack(self, moves: Iterable[CopyMove | QuantizeMove | ShuffleMove | DigestMove]) -> None:
        """Add every move, in order."""
        for owner, move in enumerate(moves):
            if isinstance(move, QuantizeMove):
                self.quantize(owner, move)
            elif isinstance(move, ShuffleMove):
                self.shuffle(owner, move)
            elif isinstance(move, CopyMove):
                self.copy(owner, move)
            else:
                self.digest(owner, move)

    def aligned(self, wide: int, *parts: tuple[int, Iterable[int]]) -> bool:
        """Whether every (buffer, [offset and strides]) is a multiple of `wide` bytes."""
        return all(self.alignment.get(b, WIDE) % wide == 0 and all(n % wide == 0 for n in numbers) for b, numbers in parts)

    def group(self, kernel: str, **constants: object) -> Group:
        """The group of launches of `kernel` with these constants."""
        key: Key = (("kernel", kernel), *sorted(constants.items()))
        if key not in self.groups:
            self.groups[key] = Group(key, self.tile_sizes[kernel])
        return self.groups[key]

    def quantize(self, owner: int, move: QuantizeMove) -> None:
        """Rows of a QuantizeMove, one for each matrix."""
        source, target, size = move.source, move.target, itemsize(move.source.dtype)
        *_, row_stride, col_stride = source.strides
        unit = col_stride == size
        wide = unit and self.aligned(WIDE, (source.at.buffer, (source.at.offset, *source.strides[:-1])))
        group = self.group(
            "quantize_marlin" if target.layout == "marlin" else "quantize_rows",
            LAYOUT=target.layout,
            RULE=move.rule,
            DTYPE=source.dtype,
            UNIT=unit,
            ALIGN=WIDE if wide else size,
            HELD_ALIGN=self._held_align(target, move.name),
        )
        m = fields.Matrix
        for matrix, offset in _matrices(source):
            at: dict[int, tuple[int, int]] = {
                m.CANON: (source.at.buffer, source.at.offset + offset),
                m.CANON_SCALES: (source.at.buffer, 0),
            }
            row: dict[int, int] = {m.ROW_STRIDE: row_stride // size, m.COL_STRIDE: col_stride // size}
            self._matrix(group, owner, target, source.shape, move.start, matrix, row, at)
        self._touch_box(owner, source, writes=False)
        self._touch_stack(owner, target, source.shape, move.start, writes=True)

    def shuffle(self, owner: int, move: ShuffleMove) -> None:
        """Rows of a ShuffleMove, one for each matrix."""
        codes, scales, target = move.codes, move.scales, move.target
        wide = self.aligned(WIDE, (codes.at.buffer, (codes.at.offset, *codes.strides[:-1])))
        held = self._held_align(target, move.name)
        if target.layout == "marlin" and not move.inverse:
            # 8 bytes are read at a time: the two halves of 16 columns are separate loads.
            group = self.group("shuffle_marlin", ALIGN=WIDE if wide else 1, HELD_ALIGN=held)
        else:
            align = WIDE if wide and held == WIDE else 1
            group = self.group("shuffle_rows", LAYOUT=target.layout, INVERSE=move.inverse, ALIGN=align)
        m = fields.Matrix
        for (matrix, offset), (_, scale_offset) in zip(_matrices(codes), _matrices(scales), strict=True):
            at: dict[int, tuple[int, int]] = {
                m.CANON: (codes.at.buffer, codes.at.offset + offset),
                m.CANON_SCALES: (scales.at.buffer, scales.at.offset + scale_offset),
            }
            row: dict[int, int] = {m.ROW_STRIDE: codes.strides[-2], m.COL_STRIDE: 1, m.SCALE_ROW_STRIDE: scales.strides[-2]}
            self._matrix(group, owner, target, codes.shape, move.start, matrix, row, at)
        for box in (codes, scales):
            self._touch_box(owner, box, writes=move.inverse)
        self._touch_stack(owner, target, codes.shape, move.start, writes=not move.inverse)

    def copy(self, owner: int, move: CopyMove) -> None:
        """Rows of a CopyMove: dimensions are merged where both sides allow it, and all but the last two are expanded."""
        source, target = move.source, move.target
        if 0 in source.shape:
            return
        a, b = itemsize(source.dtype), itemsize(target.dtype)
        shape, s, t = _merge(source.shape, source.strides, target.strides, a, b)
        lanes = self._copy_lanes(source, target, shape, s, t, a, b)
        if lanes > 1:
            shape, s, t = (*shape[:-1], shape[-1] // lanes), (*s[:-1], a * lanes), (*t[:-1], b * lanes)
        if move.casts:
            group = self.group("copy_units", READ=source.dtype, WRITE=target.dtype, CAST=True, LANES=lanes)
        else:
            unit = a * lanes
            word = f"int{8 * min(unit, 8)}"
            group = self.group("copy_units", READ=word, WRITE=word, CAST=False, LANES=max(unit // 8, 1))
        self._copy_rows(group, owner, move, shape, s, t, a * lanes, b * lanes)
        self._touch_box(owner, source, writes=False)
        self._touch_box(owner, target, writes=True)

    def digest(self, owner: int, move: DigestMove) -> None:
        """Rows of a DigestMove."""
        content = move.content
        box = content.shape[len(content.shape) - len(move.shape) :]
        if any(n != 1 for n in content.shape[: len(content.shape) - len(move.shape)]):
            raise LayoutError(
                "the content has more dimensions than the tensor",
                where=move.name,
                got=content.shape,
                wanted=f"a box of {move.shape}",
            )
        check_box(box, move.shape, move.start)
        if 0 in box:
            return
        flat = row_strides(move.shape)
        first = sum(i * f for i, f in zip(move.start, flat, strict=True))
        if isinstance(content, HeldBox):
            self._digest_held(owner, move, content, first, flat)
        else:
            self._digest_strided(owner, move, content, first, flat)

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
        m, held = fields.Matrix, target.held
        rows, cols = shape[-2:]
        first, row0, col0 = start3(start)
        if rows == 0 or cols == 0:
            return
        at[m.HELD] = (target.values.buffer, target.values.offset + (first + matrix) * target.value_bytes)
        at[m.HELD_SCALES] = (target.scales.buffer, target.scales.offset + (first + matrix) * target.scale_bytes)
        row |= {m.ROWS: rows, m.COLS: cols, m.ROW0: row0, m.COL0: col0}
        row |= {m.HELD_ROWS: held.rows, m.HELD_COLS: held.cols, m.HALF: held.half}
        tile = group.tile
        down = -(-rows // tile.rows)
        if "marlin" in str(dict(group.key)["kernel"]):
            # Tiles start on the layout's own borders of 64 rows, not on the box's.
            down = -(-(row0 + rows) // 64) - row0 // 64
        group.add(owner, row, at, down, -(-cols // tile.cols))

    def _held_align(self, target: Stack, name: str) -> int:
        wide = self.aligned(WIDE, (target.values.buffer, (target.values.offset,)))
        if target.layout == "marlin" and not self.aligned(4, (target.values.buffer, (target.values.offset,))):
            raise LayoutError(
                "Marlin words must lie on 4 bytes", where=name, got=f"offset {target.values.offset}", wanted="a multiple of 4"
            )
        return WIDE if wide else (4 if target.layout == "marlin" else 1)

    def _copy_lanes(
        self, source: Strided, target: Strided, shape: tuple[int, ...], s: tuple[int, ...], t: tuple[int, ...], a: int, b: int
    ) -> int:
        """Elements a thread moves at once: as many as 16 bytes hold while every address and stride stays a multiple."""
        if s[-1] != a or t[-1] != b:
            return 1
        lanes = WIDE // max(a, b)
        while lanes > 1 and not (
            shape[-1] % lanes == 0
            and self.aligned(lanes * a, (source.at.buffer, (source.at.offset, *s[:-1])))
            and self.aligned(lanes * b, (target.at.buffer, (target.at.offset, *t[:-1])))
        ):
            lanes //= 2
        return lanes

    def _copy_rows(
        self,
        group: Group,
        owner: int,
        move: CopyMove,
        shape: tuple[int, ...],
        s: tuple[int, ...],
        t: tuple[int, ...],
        a: int,
        b: int,
    ) -> None:
        c = fields.Copy
        units = group.tile.rows * group.tile.cols
        rows, cols = shape[-2:]
        shift = min((cols - 1).bit_length(), units.bit_length() - 1)
        row: dict[int, int] = {c.ROWS: rows, c.COLS: cols, c.SHIFT: shift}
        row |= {c.SOURCE_ROW: s[-2] // a, c.SOURCE_COL: s[-1] // a, c.TARGET_ROW: t[-2] // b, c.TARGET_COL: t[-1] // b}
        for lead in np.ndindex(*shape[:-2]):
            from_, to = (sum(i * n for i, n in zip(lead, strides, strict=False)) for strides in (s, t))
            at: dict[int, tuple[int, int]] = {
                c.SOURCE: (move.source.at.buffer, move.source.at.offset + from_),
                c.TARGET: (move.target.at.buffer, move.target.at.offset + to),
            }
            group.add(owner, dict(row), at, -(-rows // (units >> shift)), -(-cols // (1 << shift)))

    def _digest_strided(self, owner: int, move: DigestMove, content: Strided, first: int, flat: tuple[int, ...]) -> None:
        d = fields.Digest
        size = itemsize(content.dtype)
        words, width = words_of(size), min(size, 4)
        shape = (1, 1, *content.shape)
        strides = (0, 0, *content.strides)
        flat = (0,) * (len(shape) - len(flat)) + flat
        unit = strides[-1] == size
        wide = unit and self.aligned(WIDE, (content.at.buffer, (content.at.offset, *strides[:-1], shape[-1] * size)))
        group = self.group(
            "digest_tiles", WORD=f"uint{8 * width}", LAYOUT="", SCALES=False, UNIT=unit, ALIGN=WIDE if wide else width
        )
        # Along a contiguous row the words of 8-byte elements are twice as many; otherwise low and high words are two rectangles.
        parts = ((0, 0, 1, words),) if unit or words == 1 else ((0, 0, 2, 1), (4, 1, 2, 1))
        rows, cols = shape[-2:]
        for byte, odd, scale, repeat in parts:
            row: dict[int, int] = {
                d.OUT: move.out,
                d.ROWS: rows,
                d.COLS: cols * repeat,
                d.ROW_STRIDE: strides[-2] // width,
                d.COL_STRIDE: strides[-1] // width,
            }
            row |= {d.FLAT_ROW: flat[-2] * words, d.FLAT_COL: flat[-1] * scale}
            for lead in np.ndindex(*shape[:-2]):
                moved = sum(i * n for i, n in zip(lead, strides, strict=False))
                index = first + sum(i * n for i, n in zip(lead, flat, strict=False))
                at: dict[int, tuple[int, int]] = {d.ADDRESS: (content.at.buffer, content.at.offset + moved + byte)}
                self._digest_row(group, owner, row | {d.FLAT0: index * words + odd}, at)
        self._touch_box(owner, content, writes=False)

    def _digest_held(self, owner: int, move: DigestMove, content: HeldBox, first: int, flat: tuple[int, ...]) -> None:
        d, stack = fields.Digest, content.stack
        stack.check_box(content.size, content.start, move.name, BLOCK if content.scales else 1)
        place, nbytes = (stack.scales, stack.scale_bytes) if content.scales else (stack.values, stack.value_bytes)
        wide = self.aligned(WIDE, (place.buffer, (place.offset, content.size[-1])))
        group = self.group(
            "digest_tiles", WORD="uint8", LAYOUT=stack.layout, SCALES=content.scales, UNIT=True, ALIGN=WIDE if wide else 1
        )
        count, rows, cols = size3(content.size)
        matrix, row0, col0 = start3(content.start)
        flat = (0,) * (3 - len(flat)) + flat
        row: dict[int, int] = {
            d.OUT: move.out,
            d.ROWS: rows,
            d.COLS: cols,
            d.ROW0: row0,
            d.COL0: col0,
            d.FLAT_ROW: flat[1],
            d.FLAT_COL: flat[2],
        }
        row |= {d.HELD_ROWS: stack.held.rows, d.HELD_COLS: stack.held.cols, d.HALF: stack.held.half}
        for i in range(count):
            at: dict[int, tuple[int, int]] = {d.ADDRESS: (place.buffer, place.offset + (matrix + i) * nbytes)}
            self._digest_row(group, owner, row | {d.FLAT0: first + i * flat[0]}, at)
        self.touched.add(owner, place.buffer, place.offset + matrix * nbytes, count * nbytes, writes=False)

    def _digest_row(self, group: Group, owner: int, row: dict[int, int], at: dict[int, tuple[int, int]]) -> None:
        d, tile = fields.Digest, group.tile
        group.add(owner, row, at, -(-row[d.ROWS] // tile.rows), -(-row[d.COLS] // tile.cols))

    def _touch_box(self, owner: int, box: Strided, writes: bool) -> None:
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


def _merge(
    shape: tuple[int, ...], s: tuple[int, ...], t: tuple[int, ...], a: int, b: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same box in the fewest dimensions, at least two: those of size 1 go, neighbours that step evenly on both sides join."""
    dims: list[tuple[int, int, int]] = []
    for n, x, y in zip(shape, s, t, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * x and dims[-1][2] == n * y:
            dims[-1] = (dims[-1][0] * n, x, y)
        else:
            dims.append((n, x, y))
    if not dims or (len(dims) == 1 and (dims[-1][1], dims[-1][2]) != (a, b)):
        dims.append((1, a, b))
    while len(dims) < 2:
        dims.insert(0, (1, 0, 0))
    shape, s, t = (tuple(d[i] for d in dims) for i in range(3))
    return shape, s, t
