"""Tables on the wire: int64 arrays as little-endian bytes inside a msgpack message. No pickle, and nothing to interpret.

Columns are stored at the narrowest of 1, 2, 4 or 8 bytes that holds them: most are small, and a table of a large model has
millions of rows.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.placement import Buffer, Placements

Int = NDArray[np.int64]
_WIDTHS = (("<i1", 7), ("<i2", 15), ("<i4", 31), ("<i8", 63))


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One int64 array: numpy type of the stored bytes, shape, bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def pack(array: Int) -> Column:
    """`array` (int64) at the narrowest width."""
    biggest = int(np.abs(array).max()) if array.size else 0
    kind = next(kind for kind, bits in _WIDTHS if biggest < 2**bits)
    return Column(kind, array.shape, np.ascontiguousarray(array.astype(kind)).tobytes())


def unpack(column: Column) -> Int:
    """The int64 array of `column`. Raises ValueError when kind, shape and bytes don't fit."""
    if column.kind not in {kind for kind, _ in _WIDTHS}:
        raise ValueError(f"unknown column type {column.kind!r}")
    if any(size < 0 for size in column.shape) or math.prod(column.shape) * int(column.kind[2]) != len(column.data):
        raise ValueError(f"a column of shape {list(column.shape)} and type {column.kind} can't have {len(column.data)} bytes")
    return np.frombuffer(column.data, column.kind).reshape(column.shape).astype(np.int64)


class PackedPlacements(msgspec.Struct, frozen=True):
    """`Placements` as a message."""

    names: list[str]
    buffers: list[Buffer]
    tensor: Column
    buffer: Column
    lo: Column
    hi: Column
    offset: Column
    strides: Column


def pack_placements(table: Placements) -> PackedPlacements:
    """`table` as a message."""
    columns = [pack(c) for c in (table.tensor, table.buffer, table.lo, table.hi, table.offset, table.strides)]
    return PackedPlacements(table.names, table.buffers, *columns)


def unpack_placements(message: PackedPlacements) -> Placements:
    """The table of `message`. Raises ValueError when indices, shapes or ranges don't hold together."""
    tensor, buffer, lo, hi, offset, strides = (
        unpack(c) for c in (message.tensor, message.buffer, message.lo, message.hi, message.offset, message.strides)
    )
    n = len(tensor)
    if (
        buffer.shape != (n,)
        or offset.shape != (n,)
        or lo.ndim != 2
        or not (lo.shape == hi.shape == strides.shape)
        or len(lo) != n
    ):
        raise ValueError("the columns of a placement table differ in length")
    for what, index, count in (("tensor", tensor, len(message.names)), ("buffer", buffer, len(message.buffers))):
        if n and (index.min() < 0 or index.max() >= count):
            raise ValueError(f"a {what} index is outside 0..{count - 1}")
    if (lo > hi).any() or (lo < 0).any():
        raise ValueError("a box has lo > hi or a negative start")
    table = Placements(message.names, message.buffers, tensor, buffer, lo, hi, offset, strides)
    check_bounds(table)
    return table


def check_bounds(table: Placements) -> None:
    """Raise ValueError when a row reaches outside its buffer."""
    if not len(table):
        return
    size = np.array([b.nbytes for b in table.buffers], np.int64)[table.buffer]
    item = np.array([b.nbytes // max(1, math.prod(b.shape)) for b in table.buffers], np.int64)[table.buffer]
    steps = (table.hi - table.lo - 1) * table.strides
    full = ((table.hi - table.lo) > 0).all(axis=1)
    first = table.offset + np.minimum(steps, 0).sum(axis=1)
    last = table.offset + np.maximum(steps, 0).sum(axis=1) + item
    bad = np.flatnonzero(full & ((first < 0) | (last > size)))
    if len(bad):
        row = int(bad[0])
        buffer = table.buffers[table.buffer[row]]
        raise ValueError(
            f"a box of {table.names[table.tensor[row]]!r} reaches outside buffer {buffer.name!r} of rank {buffer.rank}"
        )
