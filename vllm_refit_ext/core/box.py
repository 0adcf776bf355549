"""Half-open boxes: one (lo, hi) range a dimension. Vectorised over rows, plus the two proofs that the plan rests on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


def volume(lo: Int, hi: Int) -> Int:
    """Elements in each box; lo, hi int64 [n, D] -> int64 [n]. An empty range anywhere makes it 0."""
    size: Int = np.prod(np.maximum(hi - lo, 0), axis=-1, dtype=np.int64)
    return size


def cells(lo: Int, hi: Int) -> tuple[list[Int], Int]:
    """How often each cell of the boxes' common grid is covered.

    lo, hi: int64 [n, D]. Returns the sorted distinct edges per dimension and a count array with one entry per cell between
    neighbouring edges. Exact for any boxes; the grid has at most (2n - 1)^D cells, and far fewer for cuts along few
    dimensions, which is what parallelism makes.
    """
    depth = lo.shape[1]
    edges = [np.unique(np.concatenate([lo[:, d], hi[:, d]])) for d in range(depth)]
    first = [np.searchsorted(edges[d], lo[:, d]) for d in range(depth)]
    last = [np.searchsorted(edges[d], hi[:, d]) for d in range(depth)]
    # Inclusion-exclusion at the 2^D corners of each box, then a running sum along every dimension.
    count = np.zeros([len(e) for e in edges], np.int64)
    for corner in range(2**depth):
        picks = tuple(last[d] if corner >> d & 1 else first[d] for d in range(depth))
        np.add.at(count, picks, -1 if corner.bit_count() % 2 else 1)
    for d in range(depth):
        np.cumsum(count, axis=d, out=count)
    return edges, count[tuple(slice(0, -1) for _ in range(depth))]


def disjoint(lo: Int, hi: Int) -> bool:
    """Whether no two boxes share an element. lo, hi: int64 [n, D]."""
    if len(lo) < 2:
        return True
    full = volume(lo, hi) > 0
    _, count = cells(lo[full], hi[full])
    return count.size == 0 or bool(count.max() <= 1)


def uncovered(shape_lo: Sequence[int], shape_hi: Sequence[int], lo: Int, hi: Int) -> list[tuple[tuple[int, int], ...]]:
    """The parts of box shape_lo..shape_hi that no box covers, as boxes on the common grid (each a tuple of ranges)."""
    outer_lo, outer_hi = np.array([shape_lo], np.int64), np.array([shape_hi], np.int64)
    if volume(outer_lo, outer_hi)[0] == 0:
        return []
    lo, hi = np.maximum(lo, outer_lo), np.minimum(hi, outer_hi)
    keep = volume(lo, hi) > 0
    # The outer box itself is counted once, so cells counted once are covered by nothing else.
    edges, count = cells(np.concatenate([outer_lo, lo[keep]]), np.concatenate([outer_hi, hi[keep]]))
    holes = np.argwhere(count == 1)
    return [tuple((int(edges[d][i]), int(edges[d][i + 1])) for d, i in enumerate(hole)) for hole in holes]


def describe(lo: Sequence[int], hi: Sequence[int]) -> str:
    """A box for people: `[0:128, 64:96]`."""
    return "[" + ", ".join(f"{int(a)}:{int(b)}" for a, b in zip(lo, hi, strict=True)) + "]"
