"""Placements: boxes of checkpoint tensors at bytes of buffers of ranks. Both ends of a plan are written in this form.

A trainer's shard and an engine's parameter are described by the same sentence: "the box lo..hi of Hugging Face tensor T lies
in buffer B of rank R, at this byte offset, with these byte strides along the tensor's dimensions". So the source map and the
routes are both `Placements`, and the plan is their intersection. The table is a struct of arrays, because a large model has
millions of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.dtypes import ITEMSIZE

Int = NDArray[np.int64]


class Buffer(msgspec.Struct, frozen=True, gc=False):
    """One tensor's memory on one rank: a trainer's parameter, or an engine's parameter.

    `name` is the owner's own name for it; `shape` its own shape (not the checkpoint's); `layout` says where a canonical
    element lives ("plain": row-major at its own place; otherwise a name of `core.layouts`).
    """

    name: str
    rank: int
    dtype: str
    shape: tuple[int, ...]
    layout: str = "plain"

    @property
    def nbytes(self) -> int:
        """Canonical bytes: elements times item size."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Placement(msgspec.Struct, frozen=True):
    """One row, for building and reading tables. `lo`, `hi` [ndim of the tensor] elements; `offset` and `strides` bytes."""

    tensor: str
    buffer: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Placements:
    """A table of placements.

    Attributes
    ----------
    names: list of tensor names; `tensor[i]` indexes it. buffers: list of Buffer; `buffer[i]` indexes it.
    tensor, buffer: int64 [n]. lo, hi: int64 [n, D] element ranges, padded with 0..1 beyond a tensor's own dimensions.
    offset: int64 [n] bytes from the buffer's start. strides: int64 [n, D] bytes, padded with 0.
    """

    def __init__(
        self,
        names: Sequence[str],
        buffers: Sequence[Buffer],
        tensor: Int,
        buffer: Int,
        lo: Int,
        hi: Int,
        offset: Int,
        strides: Int,
    ) -> None:
        self.names, self.buffers = list(names), list(buffers)
        self.tensor, self.buffer, self.offset = tensor, buffer, offset
        self.lo, self.hi, self.strides = lo, hi, strides
        self.buffer_rank: Int = np.array([b.rank for b in self.buffers], dtype=np.int64)

    @classmethod
    def from_rows(cls, buffers: Sequence[Buffer], rows: Iterable[Placement], names: Sequence[str] = ()) -> Placements:
        """A table of `rows`; `names` fixes the first entries of the name list."""
        rows = list(rows)
        index = {name: i for i, name in enumerate(names)}
        tensor = np.fromiter((index.setdefault(r.tensor, len(index)) for r in rows), np.int64, len(rows))
        depth = max((len(r.lo) for r in rows), default=0)
        lo = np.zeros((len(rows), depth), np.int64)
        hi = np.ones((len(rows), depth), np.int64)
        strides = np.zeros((len(rows), depth), np.int64)
        for i, r in enumerate(rows):
            n = len(r.lo)
            lo[i, :n], hi[i, :n], strides[i, :n] = r.lo, r.hi, r.strides
        buffer = np.fromiter((r.buffer for r in rows), np.int64, len(rows))
        offset = np.fromiter((r.offset for r in rows), np.int64, len(rows))
        return cls(list(index), buffers, tensor, buffer, lo, hi, offset, strides)

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def rank(self) -> Int:
        """Rank of each row, int64 [n]."""
        return self.buffer_rank[self.buffer] if len(self) else np.zeros(0, np.int64)

    def rows(self) -> Iterable[Placement]:
        """The table row by row. Padded dimensions are kept; meant for tests and printing."""
        for i in range(len(self)):
            yield Placement(
                self.names[self.tensor[i]],
                int(self.buffer[i]),
                tuple(self.lo[i].tolist()),
                tuple(self.hi[i].tolist()),
                int(self.offset[i]),
                tuple(self.strides[i].tolist()),
            )

    def select(self, keep: NDArray[np.bool_] | Int) -> Placements:
        """The rows in `keep` (mask or indices), with the same names and buffers."""
        return Placements(
            self.names,
            self.buffers,
            self.tensor[keep],
            self.buffer[keep],
            self.lo[keep],
            self.hi[keep],
            self.offset[keep],
            self.strides[keep],
        )

    def as_rank(self, rank: int) -> Placements:
        """The same table with all its buffers on `rank`."""
        buffers = [msgspec.structs.replace(b, rank=rank) for b in self.buffers]
        return Placements(self.names, buffers, self.tensor, self.buffer, self.lo, self.hi, self.offset, self.strides)

    def widened(self, depth: int) -> Placements:
        """The same table with at least `depth` padded dimensions."""
        extra = depth - self.lo.shape[1]
        if extra <= 0:
            return self
        pad = ((0, 0), (0, extra))
        return Placements(
            self.names,
            self.buffers,
            self.tensor,
            self.buffer,
            np.pad(self.lo, pad),
            np.pad(self.hi, pad, constant_values=1),
            self.offset,
            np.pad(self.strides, pad),
        )


def concatenate(tables: Sequence[Placements]) -> Placements:
    """One table of all rows. Names are merged; buffers are appended in order."""
    depth = max((t.lo.shape[1] for t in tables), default=0)
    tables = [t.widened(depth) for t in tables]
    index: dict[str, int] = {}
    buffers: list[Buffer] = []
    tensor, buffer = [], []
    for t in tables:
        remap = np.fromiter((index.setdefault(n, len(index)) for n in t.names), np.int64, len(t.names))
        tensor.append(remap[t.tensor] if len(t) else t.tensor)
        buffer.append(t.buffer + len(buffers))
        buffers.extend(t.buffers)

    def join(parts: list[Int], width: int | None = None) -> Int:
        if parts:
            return np.concatenate(parts)
        return np.zeros((0,) if width is None else (0, width), np.int64)

    return Placements(
        list(index),
        buffers,
        join(tensor),
        join(buffer),
        join([t.lo for t in tables], depth),
        join([t.hi for t in tables], depth),
        join([t.offset for t in tables]),
        join([t.strides for t in tables], depth),
    )
