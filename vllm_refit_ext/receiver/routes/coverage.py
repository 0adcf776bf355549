"""Proving that recorded writes tile a parameter: every element once, from one place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]
MAX_CELLS = 1_000_000
"""Cells of the grid that is searched for the first missing box; beyond it only the number of elements is given."""


def volumes(lo: Int, hi: Int) -> Int:
    """Elements of each box. lo, hi: int64 [n, D]."""
    found: Int = np.prod(hi - lo, axis=1, dtype=np.int64)
    return found


def overlaps(lo: Int, hi: Int) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of boxes that share an element. lo, hi: int64 [n, D]; near linear when boxes tile."""
    found: list[tuple[int, int]] = []
    todo: list[tuple[Int, int]] = [(np.flatnonzero((hi > lo).all(axis=1)), 0)]
    while todo:
        members, axis = todo.pop()
        if len(members) < 2:
            continue
        if axis == lo.shape[1]:
            first = np.maximum(lo[members][:, None], lo[members][None])
            last = np.minimum(hi[members][:, None], hi[members][None])
            rows, columns = np.nonzero(np.triu((first < last).all(axis=2), 1))
            pairs = np.sort(np.stack([members[rows], members[columns]], axis=1), axis=1)
            found.extend((int(a), int(b)) for a, b in pairs)
            continue
        members = members[np.argsort(lo[members, axis], kind="stable")]
        reach = np.maximum.accumulate(hi[members, axis])
        cuts = np.flatnonzero(lo[members[1:], axis] >= reach[:-1]) + 1
        todo.extend((part, axis + 1) for part in np.split(members, cuts))
    return sorted(found)


def missing(shape: Sequence[int], lo: Int, hi: Int) -> tuple[int, str]:
    """Elements of a tensor of `shape` in none of the boxes, and the first such box as text. lo, hi: int64 [n, D]."""
    total = int(np.prod(shape, dtype=np.int64))
    if not len(lo):
        return total, _text([0] * len(shape), shape) if total else ""
    cuts = [np.unique(np.concatenate([lo[:, d], hi[:, d], [0, shape[d]]])) for d in range(len(shape))]
    cells = [len(c) - 1 for c in cuts]
    if int(np.prod(cells, dtype=np.int64)) > MAX_CELLS:
        return total - int(volumes(lo, hi).sum()), ""
    covered = np.zeros(cells, np.bool_)
    for a, b in zip(lo, hi, strict=True):
        covered[tuple(slice(*np.searchsorted(c, (x, y))) for c, x, y in zip(cuts, a, b, strict=True))] = True
    if covered.all():
        return 0, ""
    sizes = np.ones(cells, np.int64)
    for d, c in enumerate(cuts):
        sizes *= np.diff(c).reshape([-1 if i == d else 1 for i in range(len(shape))])
    first = np.argwhere(~covered)[0]
    box = [(int(c[i]), int(c[i + 1])) for c, i in zip(cuts, first, strict=True)]
    return int(sizes[~covered].sum()), _text([a for a, _ in box], [b for _, b in box])


def _text(lo: Sequence[int], hi: Sequence[int]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo, hi, strict=True)) + "]"
