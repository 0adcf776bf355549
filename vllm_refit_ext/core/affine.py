"""Turning strided copies into boxes: pure integers, no torch.

A view of a row-major tensor is an affine map: index k maps to element `offset + sum(k[i] * stride[i])`. A copy between two
such views is a list of dimensions (n, s, d): n steps, each s elements in the source tensor and d elements in the target.
`decompose` rewrites a copy as boxes lo..hi of the source tensor, each with its place and strides in the target.
"""

from __future__ import annotations

from collections.abc import Sequence

Dim = tuple[int, int, int]
"""(n, s, d): n steps, each s elements in the source and d elements in the target."""

Box = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""(lo, hi, at, strides): the box lo..hi of the source; its first element lies at element `at` of the target; `strides` are
elements of the target for one step along each dimension of the source (0 where the box is one element wide)."""

MAX_BOXES = 8192
"""Boxes that one copy may need. More means a gather, element by element, that no plan should carry."""


class TooManyBoxesError(Exception):
    """A copy that needs more boxes than the limit."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def unravel(offset: int, strides: Sequence[int]) -> list[int]:
    """The index of the element at `offset` of a row-major tensor with `strides`."""
    index = []
    for stride in strides:
        step, offset = divmod(offset, stride)
        index.append(step)
    return index


def decompose(shape: Sequence[int], offset: int, dims: Sequence[Dim], limit: int = MAX_BOXES) -> list[Box]:
    """Boxes of the row-major source tensor of `shape` that the copy reads, in the order of the copy.

    `offset` is the first element read; the first element written is 0. The boxes together hold every (source, target) pair
    of the copy once: a broadcast gives the same box several times, a split dimension with gaps one box for each part.
    Raises TooManyBoxesError beyond `limit` boxes.
    """
    if any(n == 0 for n, _, _ in dims):
        return []
    strides = row_major(shape)
    boxes: list[Box] = []
    todo: list[tuple[int, int, list[Dim]]] = [(offset, 0, sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1]))]
    while todo:
        start, at, rest = todo.pop()
        found = _box(shape, strides, start, at, rest)
        if isinstance(found, tuple):
            boxes.append(found)
        else:
            todo.extend(reversed(found))
        if len(boxes) + len(todo) > limit:
            raise TooManyBoxesError(f"more than {limit} boxes")
    return boxes


def _box(
    shape: Sequence[int], strides: Sequence[int], start: int, at: int, dims: list[Dim]
) -> Box | list[tuple[int, int, list[Dim]]]:
    """The one box that these dims describe, or smaller copies that together equal them. `dims` fall by source stride."""
    axes: dict[int, list[int]] = {}
    for i, (_, s, _) in enumerate(dims):
        axis = next((j for j, t in enumerate(strides) if shape[j] > 1 and t <= s), None)
        if axis is None or s % strides[axis]:
            return _each(start, at, dims, i)  # a broadcast, or a diagonal
        axes.setdefault(axis, []).append(i)
    index = unravel(start, strides)
    for axis, members in axes.items():
        if index[axis] + sum((dims[i][0] - 1) * (dims[i][1] // strides[axis]) for i in members) >= shape[axis]:
            if len(members) > 1:
                return _each(start, at, dims, members[0])
            return _unwrapped(start, at, dims, members[0], shape[axis], index[axis], strides[axis])
    hi, steps = [i + 1 for i in index], [0] * len(shape)
    for axis, members in axes.items():
        n, s, d = dims[members[-1]]
        for i in reversed(members[:-1]):
            if dims[i][1] != n * s or dims[i][2] != n * d:
                return _each(start, at, dims, i)
            n *= dims[i][0]
        if s != strides[axis]:
            return _each(start, at, dims, members[-1])
        hi[axis], steps[axis] = index[axis] + n, d
    return tuple(index), tuple(hi), at, tuple(steps)


def _each(start: int, at: int, dims: list[Dim], i: int) -> list[tuple[int, int, list[Dim]]]:
    """One copy for each step of dimension `i`."""
    n, s, d = dims[i]
    rest = dims[:i] + dims[i + 1 :]
    return [(start + k * s, at + k * d, rest) for k in range(n)]


def _unwrapped(
    start: int, at: int, dims: list[Dim], i: int, extent: int, index: int, stride: int
) -> list[tuple[int, int, list[Dim]]]:
    """Copies in which dimension `i`, which runs over the end of the source's axis, no longer does."""
    n, s, d = dims[i]
    step = s // stride
    period = extent // step
    if extent % step == 0 and index < step and n >= period:
        whole = n // period
        inner = [(m, t, e) for m, t, e in ((whole, s * period, d * period), (period, s, d)) if m > 1]
        cut = whole * period
        parts = [(start, at, sorted(dims[:i] + inner + dims[i + 1 :], key=lambda x: -x[1]))]
    else:
        cut = -(-(extent - index) // step)
        parts = [(start, at, [*dims[:i], *([(cut, s, d)] if cut > 1 else []), *dims[i + 1 :]])]
    if cut < n:
        tail = [(n - cut, s, d)] if n - cut > 1 else []
        parts.append((start + cut * s, at + cut * d, [*dims[:i], *tail, *dims[i + 1 :]]))
    return parts
