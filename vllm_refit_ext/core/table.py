"""Tables on the wire: int64 arrays as little-endian bytes inside a msgpack message. No pickle, and nothing to interpret.

Columns are stored at the narrowest of 1, 2, 4 or 8 bytes that holds them: most are small, and a table of a large model has
millions of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.box import Int, describe
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import ManifestError, Problem
from vllm_refit_ext.core.placement import Buffer, Placements

MAX_DIMS = 8
"""Dimensions of a tensor."""
MAX_BYTES = 1 << 48
"""Bytes of a tensor or a buffer. Far beyond any, and sums and products of a few such sizes stay exact."""
MAX_RANKS = 1 << 16
"""Ranks of one side."""
LISTED = 4
"""Rows of one kind of problem that are named."""

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
    fits = math.prod(column.shape) * int(column.kind[2]) == len(column.data)
    if not fits or any(not 0 <= size <= MAX_BYTES for size in column.shape):
        raise ValueError(f"a column of shape {list(column.shape)} and type {column.kind} can't have {len(column.data)} bytes")
    return np.frombuffer(column.data, column.kind).reshape(column.shape).astype(np.int64)


def shape_problem(shape: Sequence[int], dtype: str) -> str:
    """What is wrong with a tensor of `shape` and a known `dtype`, or nothing."""
    if len(shape) > MAX_DIMS:
        return f"a tensor has at most {MAX_DIMS} dimensions"
    if any(size < 0 for size in shape):
        return "sizes must be zero or more"
    too_big = max(shape, default=0) > MAX_BYTES or math.prod(shape) * ITEMSIZE[dtype] > MAX_BYTES
    return f"a tensor has at most {MAX_BYTES >> 40} TiB" if too_big else ""


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


def unpack_placements(message: PackedPlacements, where: str = "a placement table") -> Placements:
    """The table of `message`. Raises ManifestError with all that does not hold together in it; `where` names it."""
    try:
        tensor, buffer, lo, hi, offset, strides = (
            unpack(c) for c in (message.tensor, message.buffer, message.lo, message.hi, message.offset, message.strides)
        )
    except ValueError as error:
        raise ManifestError("a column can't be read", where=where, got=error) from None
    n = len(tensor) if tensor.ndim else -1
    if (
        {tensor.shape, buffer.shape, offset.shape} != {(n,)}
        or lo.ndim != 2
        or {lo.shape, hi.shape, strides.shape} != {(n, lo.shape[1])}
    ):
        shapes = [list(c.shape) for c in (tensor, buffer, lo, hi, offset, strides)]
        raise ManifestError(
            "the columns don't fit each other", where=where, got=shapes, wanted="[n], [n], [n, D], [n, D], [n], [n, D]"
        )
    problems = _list_problems(message, where)
    for what, index, count in (("tensor", tensor, len(message.names)), ("buffer", buffer, len(message.buffers))):
        if n and (index.min() < 0 or index.max() >= count):
            got = f"{index.min()}..{index.max()}"
            problems.append(Problem(f"a {what} index is outside the list", where, got, f"0..{count - 1}"))
    if lo.shape[1] > MAX_DIMS:
        problems.append(Problem("boxes have too many dimensions", where, str(lo.shape[1]), f"at most {MAX_DIMS}"))
    if problems:
        raise ManifestError.of(problems, f"{where} has {len(problems)} problem(s)")
    table = Placements(message.names, message.buffers, tensor, buffer, lo, hi, offset, strides)
    if problems := _row_problems(table):
        raise ManifestError.of(problems, f"{where} has {len(problems)} problem(s)")
    return table


def _list_problems(message: PackedPlacements, where: str) -> list[Problem]:
    """What is wrong with the names and the buffers."""
    problems = [
        Problem(
            "the name stands twice in the list of names", f"{where}, tensor {name!r}", f"entries {first} and {last}", "one entry"
        )
        for name, (first, last) in _twice(message.names).items()
    ]
    for i, b in enumerate(message.buffers):
        at = f"{where}, buffer {i} {b.name!r}"
        if b.dtype not in ITEMSIZE:
            problems.append(Problem("unknown dtype", at, repr(b.dtype), "one of " + ", ".join(ITEMSIZE)))
        elif text := shape_problem(b.shape, b.dtype):
            problems.append(Problem(text, at, str(list(b.shape))))
        if not 0 <= b.rank < MAX_RANKS:
            problems.append(Problem("no rank has this number", at, str(b.rank), f"0..{MAX_RANKS - 1}"))
    return problems


def _twice(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    if len(set(names)) == len(names):
        return {}
    first: dict[str, int] = {}
    return {name: (first[name], i) for i, name in enumerate(names) if first.setdefault(name, i) != i}


def _row_problems(table: Placements) -> list[Problem]:
    """Boxes that are not boxes, and boxes whose bytes lie outside their buffer, astride its elements or upon each other."""
    if not len(table):
        return []
    size = np.array([b.nbytes for b in table.buffers], np.int64)[table.buffer]
    item = np.array([ITEMSIZE[b.dtype] for b in table.buffers], np.int64)[table.buffer]
    odd = np.asarray(((table.lo > table.hi) | (table.lo < 0) | (table.hi > MAX_BYTES)).any(axis=1), bool)
    extent = np.where(odd[:, None], 0, table.hi - table.lo)
    full = (extent > 0).all(axis=1)
    strides = np.where(extent > 1, table.strides, 0)
    steps = (extent - 1) * strides.astype(np.float64)  # exact below 2^53, and never overflows
    first = table.offset + np.minimum(steps, 0).sum(axis=1)
    last = table.offset + np.maximum(steps, 0).sum(axis=1) + item
    outside = full & ((first < 0) | (last > size))
    good = full & ~outside
    astride = good & ((table.offset % item != 0) | (strides % item[:, None] != 0).any(axis=1))
    problems: list[Problem] = []
    kinds: list[tuple[str, NDArray[np.bool_]]] = [
        ("a box has lo > hi, a negative start or an end beyond any tensor", odd),
        ("a box reaches outside its buffer", outside),
        ("a box begins or steps between elements of its buffer", astride),
        ("a box has two elements at the same bytes", good & _folded(extent, np.abs(strides), item, good)),
    ]
    for what, bad in kinds:
        for i in np.flatnonzero(bad)[:LISTED]:
            b = table.buffers[table.buffer[i]]
            where = f"tensor {table.names[table.tensor[i]]!r}, buffer {b.name!r} of rank {b.rank}"
            bytes_ = f"{describe(table.lo[i], table.hi[i])} at byte {table.offset[i]}, strides {table.strides[i].tolist()}"
            problems.append(Problem(what, where, bytes_, f"within {b.dtype} {list(b.shape)}, {b.nbytes} bytes"))
    return problems


def _folded(extent: Int, strides: Int, item: Int, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows in which a dimension steps less far than those below it reach. extent, strides: int64 [n, D]; item: int64 [n]."""
    found = np.zeros(len(extent), bool)

    def closer(rows: Int, e: Int, s: Int) -> Int:
        reach = np.cumsum((e - 1) * s, axis=1)
        bad: Int = rows[((e > 1) & (s < reach - (e - 1) * s + item[rows, None])).any(axis=1)]
        return bad

    rows = np.flatnonzero(good)
    rows = closer(rows, extent[rows, ::-1], strides[rows, ::-1])  # almost all tables are row-major
    order = np.argsort(strides[rows], axis=1, kind="stable")
    pick = np.arange(len(rows))[:, None]
    found[closer(rows, extent[rows][pick, order], strides[rows][pick, order])] = True
    return found
