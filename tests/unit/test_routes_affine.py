"""Copies between strided views, decomposed into boxes, against a brute-force count of every element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_refit_ext.core.affine import Box, TooManyBoxesError, decompose, row_major
from vllm_refit_ext.receiver.routes import coverage


def pairs_of_boxes(shape: tuple[int, ...], boxes: list[Box]) -> list[tuple[int, int]]:
    """(target element, source element) of every element of every box."""
    strides = row_major(shape)
    found = []
    for lo, hi, at, steps in boxes:
        assert all(0 <= a < b <= n for a, b, n in zip(lo, hi, shape, strict=True))
        for k in itertools.product(*(range(b - a) for a, b in zip(lo, hi, strict=True))):
            source = sum((a + i) * s for a, i, s in zip(lo, k, strides, strict=True))
            found.append((at + sum(i * s for i, s in zip(k, steps, strict=True)), source))
    return sorted(found)


def pairs_of_copy(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int]]:
    """The same of a copy between two views of arange tensors: their values are their places."""
    return sorted(zip(target.reshape(-1).tolist(), source.reshape(-1).tolist(), strict=True))


def dims_of(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int, int]]:
    return list(zip(target.shape, source.stride(), target.stride(), strict=True))


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.Tensor]:
    """A random tensor shape and a random chain of views of its arange."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    view = torch.arange(int(np.prod(shape))).view(shape)
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["narrow", "select", "step", "permute", "split", "flatten", "unsqueeze", "expand"]))
        axis = draw(st.integers(0, max(view.dim() - 1, 0)))
        if kind == "unsqueeze":
            view = view.unsqueeze(axis)
        elif kind == "expand":
            view = view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)
        elif kind == "permute" and view.dim():
            view = view.permute(*draw(st.permutations(range(view.dim()))))
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif view.dim() and kind in ("narrow", "select", "step"):
            n = view.shape[axis]
            start = draw(st.integers(0, n - 1))
            if kind == "select":
                view = view.select(axis, start)
            elif kind == "narrow":
                view = view.narrow(axis, start, draw(st.integers(1, n - start)))
            else:
                view = view[(slice(None),) * axis + (slice(start, n, draw(st.integers(1, 3))),)]
        elif view.dim() and kind == "split":
            n = view.shape[axis]
            part = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
            view = view.unflatten(axis, (part, n // part))
    return shape, view


@settings(max_examples=400, deadline=None)
@given(chains(), st.data())
def test_boxes_hold_every_element_of_a_copy_once(chain: tuple[tuple[int, ...], torch.Tensor], data: st.DataObject) -> None:
    shape, view = chain
    order = data.draw(st.permutations(range(view.dim())))
    room = torch.arange(view.numel() * 2).view(2, *(view.shape[i] for i in order))[1]
    target = room.permute(*(order.index(i) for i in range(view.dim()))) if view.dim() else room
    boxes = decompose(shape, int(view.storage_offset()), dims_of(view, target))
    moved = [(at + int(target.storage_offset()), source) for at, source in pairs_of_boxes(shape, boxes)]
    assert moved == pairs_of_copy(view, target)


@pytest.mark.parametrize(
    ("view", "boxes"),
    [
        (lambda t: t, 1),
        (lambda t: t.t(), 1),
        (lambda t: t.view(-1), 1),
        (lambda t: t.view(2, 6, 8)[1], 1),
        (lambda t: t.view(3, 2, 2, 8).transpose(1, 2), 6),
        (lambda t: t[::2], 6),
        (lambda t: t.view(-1)[3:90], 3),
        (lambda t: t.unsqueeze(0).expand(4, 12, 8), 4),
    ],
)
def test_a_copy_needs_no_more_boxes_than_its_shape(view: object, boxes: int) -> None:
    """The count is that of the largest runs: a plan carries every box."""
    source = view(torch.arange(96).view(12, 8))  # type: ignore[operator]
    target = torch.empty(source.shape)
    assert len(decompose((12, 8), source.storage_offset(), dims_of(source, target))) == boxes


def test_a_gather_beyond_the_limit_is_refused() -> None:
    source = torch.arange(4096)[::2]
    with pytest.raises(TooManyBoxesError, match="more than 100 boxes"):
        decompose((4096,), 0, dims_of(source, torch.empty(2048)), limit=100)


@st.composite
def box_sets(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    lo, hi = [], []
    for _ in range(draw(st.integers(0, 6))):
        corner = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        lo.append([a for a, _ in corner])
        hi.append([b for _, b in corner])
    return shape, np.array(lo, np.int64).reshape(-1, len(shape)), np.array(hi, np.int64).reshape(-1, len(shape))


@settings(max_examples=300, deadline=None)
@given(box_sets())
def test_overlaps_and_gaps_equal_a_count_of_every_element(boxes: tuple[tuple[int, ...], np.ndarray, np.ndarray]) -> None:
    shape, lo, hi = boxes
    filled = [np.zeros(shape, bool) for _ in lo]
    for grid, a, b in zip(filled, lo, hi, strict=True):
        grid[tuple(slice(x, y) for x, y in zip(a, b, strict=True))] = True
    expected = [(i, j) for i in range(len(lo)) for j in range(i + 1, len(lo)) if (filled[i] & filled[j]).any()]
    assert coverage.overlaps(lo, hi) == expected
    union = np.logical_or.reduce(filled) if filled else np.zeros(shape, bool)
    assert coverage.missing(shape, lo, hi)[0] == int((~union).sum())
    assert coverage.volumes(lo, hi).tolist() == [int(grid.sum()) for grid in filled]
