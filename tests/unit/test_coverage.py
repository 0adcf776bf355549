"""Coverage in both directions: what is offered and read by nobody, and what one rank offers twice."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.geometry import sources_and_targets
from vllm_refit_ext.client import FunctionClient, raise_problems
from vllm_refit_ext.core.coverage import check_consumed, unread_parts
from vllm_refit_ext.core.errors import PlanError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import PrepareReply, to_rpc
from vllm_refit_ext.core.placement import Buffer, Placement, Placements, concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.table import pack_placements


def boxes(*parts, name="w", dtype="float32"):
    """A table of (rank, lo, hi), each box row-major in a buffer of its own."""
    buffers, rows = [], []
    for i, (rank, lo, hi) in enumerate(parts):
        local = tuple(b - a for a, b in zip(lo, hi, strict=True))
        strides = tuple(4 * math.prod(local[d + 1 :]) for d in range(len(local)))
        buffers.append(Buffer(f"{name}@{i}", rank, dtype, local))
        rows.append(Placement(name, i, tuple(lo), tuple(hi), 0, strides))
    return Placements.from_rows(buffers, rows)


def offered(shape, name="w"):
    return Manifest({name: TensorSpec(tuple(shape), "float32")})


def test_unread_tensors_are_found():
    manifest = Manifest({n: TensorSpec((1,), "float32") for n in "abc"})
    assert [p.where for p in check_consumed(manifest, read=["a"], unused=["c"])] == ["tensor 'b'"]


@pytest.mark.parametrize(
    ("shape", "parts", "box"),
    [
        ((136, 128), [(0, (0, 0), (64, 128)), (1, (64, 0), (128, 128))], "[128:136, 0:128]"),
        ((128, 512), [(0, (0, 0), (128, 128)), (1, (0, 128), (128, 256))], "[0:128, 256:512]"),
        ((16, 8, 8), [(0, (0, 0, 0), (8, 8, 8))], "[8:16, 0:8, 0:8]"),
        ((9,), [(0, (0,), (4,)), (1, (5,), (9,))], "[4:5]"),
        # twice the overlap makes up for the hole in the number of elements, and not in their set
        ((9,), [(0, (0,), (5,)), (1, (4,), (8,))], "[8:9]"),
    ],
)
def test_a_part_that_nobody_reads_is_named(shape, parts, box):
    (problem,) = unread_parts(offered(shape), boxes(*parts))
    assert problem.where == "tensor 'w'"
    assert box in problem.got
    assert "trainer" in problem.do
    assert "engine" in problem.do
    assert unread_parts(offered(shape), boxes(*parts), ["w"]) == []


def test_replicated_and_overlapping_reads_cover():
    assert unread_parts(offered((8, 2)), boxes((0, (0, 0), (5, 2)), (1, (3, 0), (8, 2)), (2, (0, 0), (8, 1)))) == []
    assert unread_parts(offered(()), boxes((0, (), ()))) == []
    assert unread_parts(offered((0, 4)), boxes((0, (0, 0), (0, 4)))) == []


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_unread_elements_equal_the_oracle(data):
    case = data.draw(sources_and_targets())
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(case.targets), max_size=len(case.targets))))
    targets = case.targets.select(np.flatnonzero(keep))
    read = {name: np.zeros(spec.shape, bool) for name, spec in case.manifest.tensors.items()}
    for row in targets.rows():
        n = read[row.tensor].ndim
        read[row.tensor][tuple(slice(a, b) for a, b in zip(row.lo[:n], row.hi[:n], strict=True))] = True
    wanted = [f"tensor {name!r}" for name, mask in read.items() if mask.any() and not mask.all()]
    assert [p.where for p in unread_parts(case.manifest, targets)] == wanted


def test_the_client_finds_it_for_any_trainer():
    """All ranks of an engine come together in the client: whoever drives it learns what no rank reads."""
    tables = [boxes((r, (64 * r, 0), (64 * r + 64, 128))) for r in range(2)]
    replies = [to_rpc(PrepareReply(rank=r, targets=pack_placements(t), digest="d")) for r, t in enumerate(tables)]
    client = FunctionClient(lambda method, args, timeout_s: replies)
    with pytest.raises(PlanError, match=r"engine rank 0, 1 · tensor 'w'.*\[128:136, 0:128\]"):
        raise_problems(client.prepare({"w": [[136, 128], "float32"]}))
    assert not any(r.problems for r in client.prepare({"w": [[128, 128], "float32"]}))
    assert not any(r.problems for r in client.prepare({"w": [[136, 128], "float32"]}, unused=["w"]))


@pytest.mark.parametrize(
    "second",
    [(0, (0, 0), (8, 4)), (0, (4, 0), (8, 4)), (0, (0, 2), (8, 3))],
    ids=["the same box", "a part of it", "an overlap"],
)
def test_one_rank_that_offers_elements_twice_is_refused(second):
    sources = boxes((0, (0, 0), (8, 4)), second)
    with pytest.raises(PlanError, match="from two places") as error:
        build_plan(offered((8, 4)), sources, boxes((0, (0, 0), (8, 4))))
    assert "trainer rank 0" in str(error.value)
    assert "'w@0'" in str(error.value)
    assert "'w@1'" in str(error.value)


def test_one_buffer_with_two_places_is_refused_and_one_place_named_twice_is_not():
    table = boxes((0, (0,), (8,)))
    wide = [msgspec.structs.replace(table.buffers[0], shape=(16,))]
    rows = list(table.rows())
    targets = boxes((0, (0,), (8,)))
    again = Placements.from_rows(wide, [*rows, *rows])
    assert len(build_plan(offered((8,)), again, targets)) == 1
    moved = [msgspec.structs.replace(rows[0], offset=32), msgspec.structs.replace(rows[0], strides=(8,))]
    for other in moved:
        with pytest.raises(PlanError, match="from two places"):
            build_plan(offered((8,)), Placements.from_rows(wide, [*rows, other]), targets)


def test_equal_boxes_on_other_ranks_are_replicas():
    sources = concatenate([boxes((r, (0, 0), (8, 4))) for r in range(3)])
    assert len(build_plan(offered((8, 4)), sources, boxes((0, (0, 0), (8, 4))))) == 1
