"""The plan against a brute-force oracle, over random geometries of both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.geometry import sources_and_targets
from vllm_refit_ext.core.errors import PlanError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.replicas import deal


def execute(plan, source_memory, target_memory):
    """Run the moves byte by byte in numpy."""
    for i in range(len(plan)):
        src, dst = plan.sources[plan.source[i]], plan.targets[plan.target[i]]
        item = src.nbytes // max(1, math.prod(src.shape))
        extent = tuple(plan.extent[i])
        read = np.lib.stride_tricks.as_strided(
            source_memory[plan.source[i]][plan.source_offset[i] :], (*extent, item), (*plan.source_strides[i], 1)
        )
        write = np.lib.stride_tricks.as_strided(
            target_memory[plan.target[i]][plan.target_offset[i] :], (*extent, item), (*plan.target_strides[i], 1)
        )
        assert dst.dtype == src.dtype
        write[...] = read


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plan_equals_oracle(data):
    case = data.draw(sources_and_targets())
    plan = build_plan(case.manifest, case.sources, case.targets)
    source_memory = case.fill_sources()
    target_memory = [np.full(b.nbytes, 0xEE, np.uint8) for b in case.targets.buffers]
    written = [np.zeros(b.nbytes, np.int64) for b in case.targets.buffers]
    execute(plan, source_memory, target_memory)
    case.check_targets(target_memory)
    # Every target byte exactly once, and the accounting is what was moved.
    for i in range(len(plan)):
        item = 4
        view = np.lib.stride_tricks.as_strided(
            written[plan.target[i]][plan.target_offset[i] :], (*plan.extent[i], item), (*(plan.target_strides[i] * 8), 8)
        )
        view += 1
    for count in written:
        assert (count == 1).all()
    assert sum(e.nbytes for e in plan.edges()) == sum(b.nbytes for b in case.targets.buffers)
    for edge in plan.edges():
        mine = (plan.source_rank == edge.source) & (plan.target_rank == edge.target)
        assert int(plan.nbytes[mine].sum()) == edge.nbytes
        assert plan.for_target(edge.target).by_source[edge.source] == edge.nbytes
    assert sum(plan.by_source.values()) == sum(e.nbytes for e in plan.edges())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_rank_plans_for_itself_what_the_sender_plans_for_it(data):
    case = data.draw(sources_and_targets())
    joint = build_plan(case.manifest, case.sources, case.targets)
    for rank in range(case.target_ranks):
        own = build_plan(case.manifest, case.sources, case.targets_of(rank))
        assert own.digest(rank) == joint.digest(rank)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_missing_source_is_named(data):
    case = data.draw(sources_and_targets())
    lost = data.draw(st.integers(0, len(case.sources) - 1))
    keep = np.ones(len(case.sources), bool)
    row = case.sources
    same = (row.tensor == row.tensor[lost]) & (row.lo == row.lo[lost]).all(axis=1) & (row.hi == row.hi[lost]).all(axis=1)
    keep[same] = False
    name = row.names[row.tensor[lost]]
    reduced = row.select(keep)
    # Partly replicated neighbours may still cover the box; the oracle decides.
    if case.covered(reduced):
        build_plan(case.manifest, reduced, case.targets)
        return
    with pytest.raises(PlanError) as error:
        build_plan(case.manifest, reduced, case.targets)
    assert name in str(error.value)


def one(name="w", shape=(4, 6), dtype="float32", rank=0, lo=None, hi=None):
    lo, hi = lo or (0,) * len(shape), hi or shape
    local = tuple(b - a for a, b in zip(lo, hi, strict=True))
    strides = tuple(int(4 * math.prod(local[d + 1 :])) for d in range(len(local)))
    return Placements.from_rows([Buffer(f"{name}@{rank}", rank, dtype, local)], [Placement(name, 0, lo, hi, 0, strides)])


def manifest(**specs):
    return Manifest({name: TensorSpec(*spec) for name, spec in specs.items()})


def test_problems_are_reported_together():
    from vllm_refit_ext.core.placement import concatenate

    targets = concatenate([one("known"), one("norm.weight_sale"), one("bytes", dtype="uint8")])
    sources = concatenate([one("known", dtype="bfloat16"), one("norm.weight_scale"), one("bytes")])
    with pytest.raises(PlanError) as error:
        build_plan(
            manifest(known=((4, 6), "float32"), bytes=((4, 6), "float32"), **{"norm.weight_scale": ((4, 6), "float32")}),
            sources,
            targets,
        )
    text = str(error.value)
    assert "Did you mean 'norm.weight_scale'?" in text
    assert "'known'" in text
    assert "bfloat16" in text
    assert "'bytes'" in text
    assert len(error.value.problems) == 3


def test_box_outside_the_shape_is_refused():
    with pytest.raises(PlanError, match="outside the shape"):
        build_plan(manifest(w=((4, 5), "float32")), one(), one())


def test_casts_are_listed_and_others_refused():
    build_plan(manifest(w=((4, 6), "bfloat16")), one(dtype="bfloat16"), one(dtype="float32"))
    with pytest.raises(PlanError, match="may not convert"):
        build_plan(manifest(w=((4, 6), "bfloat16")), one(dtype="bfloat16"), one(dtype="float8_e4m3fn"))


def test_replicas_are_balanced():
    """64 equal tensors on 8 replicas, read by 4 ranks: each source gives the same bytes to each and in all."""
    tables = []
    for rank in range(8):
        tables += [one(f"t{i}", rank=rank) for i in range(64)]
    from vllm_refit_ext.core.placement import concatenate

    sources = concatenate(tables)
    targets = concatenate([one(f"t{i}", rank=rank) for rank in range(4) for i in range(64)])
    plan = build_plan(manifest(**{f"t{i}": ((4, 6), "float32") for i in range(64)}), sources, targets)
    assert {e.nbytes for e in plan.edges()} == {8 * 96}
    assert len(plan.edges()) == 32


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=40),
    st.integers(1, 8).flatmap(
        lambda n: st.lists(
            st.tuples(st.lists(st.integers(0, 60), min_size=n, max_size=n), st.integers(0, 9)), min_size=1, max_size=3
        )
    ),
)
def test_boxes_are_dealt_to_the_holder_with_the_least(sizes, readers):
    sizes = sorted(sizes, reverse=True)
    mine, wanted = [list(load) for load, _ in readers], []
    for load, (_, first) in zip(mine, readers, strict=True):
        picks = []
        for size in sizes:
            picks.append(min(range(len(load)), key=lambda h: (load[h], (h - first) % len(load))))
            load[picks[-1]] += size
        wanted.append(picks)
    had = np.array([load for load, _ in readers], np.int64)
    assert deal(np.array(sizes, np.int64), had, np.array([first for _, first in readers])).tolist() == wanted
    assert had.tolist() == mine


def test_readers_that_see_different_holders_near_are_dealt_to_by_themselves():
    """Tensors with two and with three holders, of which each reader has two near: it reads one of those."""
    from vllm_refit_ext.core.placement import concatenate

    sources = concatenate([one(name, rank=rank) for name, ranks in (("a", 2), ("b", 3)) for rank in range(ranks)])
    targets = concatenate([one("a", rank=0), one("b", rank=1), one("b", rank=2)])
    distance = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], np.int8)
    plan = build_plan(manifest(a=((4, 6), "float32"), b=((4, 6), "float32")), sources, targets, distance)
    assert len(plan) == 3
    assert all(distance[e.source, e.target] == 0 for e in plan.edges())


def test_what_one_rank_alone_holds_is_counted():
    """Rank 0 alone holds half of all; the copies come from the others."""
    from vllm_refit_ext.core.placement import concatenate

    sources = concatenate([one("own", rank=0), *(one(n, rank=r) for r in range(3) for n in ("a", "b"))])
    targets = concatenate([one(n, rank=0) for n in ("own", "a", "b")])
    plan = build_plan(manifest(**dict.fromkeys(("own", "a", "b"), ((4, 6), "float32"))), sources, targets)
    assert plan.by_source == {0: 96, 1: 96, 2: 96}


def test_nearest_replica_is_used():
    from vllm_refit_ext.core.placement import concatenate

    sources = concatenate([one(rank=r) for r in range(3)])
    targets = concatenate([one(rank=r) for r in range(2)])
    distance = np.array([[2, 2], [2, 0], [1, 2]], np.int8)
    plan = build_plan(manifest(w=((4, 6), "float32")), sources, targets, distance)
    assert dict(zip(plan.target_rank.tolist(), plan.source_rank.tolist(), strict=True)) == {0: 2, 1: 1}


def test_partly_overlapping_sources_are_cut_on_their_grid():
    from vllm_refit_ext.core.placement import concatenate

    sources = concatenate([one(shape=(6, 2), rank=0, lo=(0, 0), hi=(4, 2)), one(shape=(6, 2), rank=1, lo=(2, 0), hi=(6, 2))])
    plan = build_plan(manifest(w=((6, 2), "float32")), sources, one(shape=(6, 2)))
    assert sorted((int(a), int(e)) for a, e in zip(plan.lo[:, 0], plan.extent[:, 0], strict=True)) == [(0, 2), (2, 2), (4, 2)]
