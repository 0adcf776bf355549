"""The DTensor source on four gloo ranks: every layout, held element by element to the tensors it was cut from."""

from __future__ import annotations

import numpy as np
import pytest

from examples.support.launch import run_ranks
from tests.support.dtensor_jobs import LAYOUTS, PRELOAD, Box, distributed, layouts, outside, refused, unsharded


def copies(found: list[list[Box]]) -> dict[str, set[int]]:
    """How often the elements of each tensor are held by the ranks."""
    shapes: dict[str, np.ndarray] = {}
    for name, _, hi in (box for boxes in found for box in boxes):
        shapes[name] = np.maximum(shapes.get(name, 0), hi)
    held = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for name, lo, hi in (box for boxes in found for box in boxes):
        held[name][tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] += 1
    return {name: set(np.unique(count).tolist()) for name, count in held.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[Box]]]:
    """Of each rank, by layout."""
    return run_ranks(layouts, 4, preload=PRELOAD)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, found: list[dict[str, list[Box]]]) -> None:
    held = copies([rank[name] for rank in found])
    buffers = {n for n in held if n.split(".")[-1] == "bias" and n.split(".")[-2:-1] not in (["up"], ["down"], ["norm"])}
    once = {n: c for n, c in held.items() if n not in buffers}
    if name.startswith("tp-"):
        assert once["up.weight"] == once["down.weight"] == {1}
    else:
        assert set(map(frozenset, once.values())) == {frozenset({2 if name == "hsdp" else 1})}
    assert all(held[n] == {4} for n in buffers), "a plain tensor is whole on every rank"
    assert all(len(rank[name]) == len({b[0] for b in rank[name]}) for rank in found), "one box a tensor and rank"


def test_random_placements_of_any_mesh() -> None:
    found = run_ranks(distributed, 4, 7, preload=PRELOAD)
    for boxes in zip(*found, strict=True):
        assert all(min(c) >= 1 for c in copies(list(boxes)).values())
    assert max(len(b) for boxes in found for b in boxes) > 1, "a lone _StridedShard is several boxes"


def test_what_is_no_box_is_refused_by_name() -> None:
    found = run_ranks(refused, 4, preload=PRELOAD)
    for said in found:
        assert "t: its placement P(sum) does not say which elements" in said["partial"]
        assert "whose bytes are not the weights" in said["dtype"]
        assert "Give the model itself" in said["whole"]
    assert any("its local shape is not what its placements make" in said["local"] for said in found)


def test_ranks_outside_the_mesh_hold_nothing() -> None:
    assert run_ranks(outside, 4, preload=PRELOAD) == [0, 1, 0, 1]


def test_unsharded_modules_are_resharded_or_refused() -> None:
    for said in run_ranks(unsharded, 4, preload=PRELOAD):
        assert "Refit between steps" in said["inside"]
        assert "up.weight: its memory was given back" in said["freed"]
