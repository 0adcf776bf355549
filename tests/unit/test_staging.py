"""Rounds and their order: every byte of every plan arrives, within the bounds, whatever the geometry and the bucket."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.geometry import sources_and_targets
from tests.support.rendezvous import by_rank, run_transfer
from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.wires.collective_move import Buffers, Unpacker
from vllm_refit_ext.wires.staging import ALIGN, cut_moves, rounds

BUCKETS = (4, 12, 40, 1 << 20)


@given(sources_and_targets(), st.sampled_from(BUCKETS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_geometry_arrives(case, bucket):
    plan = build_plan(case.manifest, case.sources, case.targets)
    trainers = 1 + max(b.rank for b in case.source.buffers)
    plan, sources = by_rank(plan, [torch.from_numpy(c.copy()) for c in case.source.contents])
    memory = [torch.zeros(b.shape) for b in plan.targets]
    hosts = Hosts.single(trainers, case.target_ranks)
    sent = run_transfer(plan, hosts, sources, {b.name: m for b, m in zip(plan.targets, memory, strict=True)}, bucket)
    assert sent == {(e.source, trainers + e.target): e.nbytes for e in plan.edges()}, (
        "each edge carries the plan's bytes and no more"
    )
    case.check_targets([m.numpy().view(np.uint8).reshape(-1) for m in memory])


@given(sources_and_targets(), st.sampled_from(BUCKETS))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rounds_keep_their_bounds(case, bucket):
    plan = build_plan(case.manifest, case.sources, case.targets)
    for target in {b.rank for b in case.target.buffers}:
        share = plan.for_target(target)
        r = rounds(share, bucket)
        assert int(r.plan.nbytes.sum()) == int(share.nbytes.sum())
        assert (np.diff(r.number) >= 0).all(), "pieces come in the order of their rounds"
        for number, messages in enumerate(r.messages):
            payload = sum(m.nbytes for m in messages)
            assert payload <= max(bucket, 4)
            assert [m.source for m in messages] == sorted({m.source for m in messages})
            assert payload == int(r.plan.nbytes[r.number == number].sum())
        most = max(len(m) for m in r.messages) if r.messages else 0
        room = 2 * (max(bucket, 4) + ALIGN * (most + 1))
        assert Buffers(r, torch.device("cpu")).staging_bytes <= room, "two buckets, whatever the plan"


@pytest.mark.parametrize("limit", [1, 4, 5, 8, 24, 100, 10**6])
def test_a_large_move_is_cut_without_gap_or_overlap(limit):
    shape = (3, 5, 7)
    manifest = Manifest({"t": TensorSpec(shape, "float32"), "s": TensorSpec((), "float32")})
    strides = (140, 28, 4)
    sources = Placements.from_rows(
        [Buffer("t", 0, "float32", shape), Buffer("s", 0, "float32", ())],
        [Placement("t", 0, (0, 0, 0), shape, 0, strides), Placement("s", 1, (), (), 0, ())],
    )
    targets = Placements.from_rows(
        [Buffer("t", 0, "float32", (7, 5, 3)), Buffer("s", 0, "float32", ())],
        [Placement("t", 0, (0, 0, 0), shape, 0, (4, 12, 60)), Placement("s", 1, (), (), 0, ())],
    )
    plan = build_plan(manifest, sources, targets)
    cut = cut_moves(plan, limit)
    assert (cut.nbytes <= max(limit, 4)).all()
    seen = np.zeros(shape, int)
    for i in range(len(cut)):
        if cut.names[int(cut.tensor[i])] == "s":
            continue
        lo, extent = cut.lo[i], cut.extent[i]
        seen[tuple(slice(a, a + n) for a, n in zip(lo, extent, strict=True))] += 1
        assert cut.source_offset[i] == (lo * strides).sum()
        assert cut.target_offset[i] == (lo * (4, 12, 60)).sum()
    assert (seen == 1).all()


def test_mixed_dtypes_lie_aligned_and_arrive():
    specs = {
        "a": ("bfloat16", (3,)),
        "b": ("float32", (2,)),
        "c": ("uint8", (1,)),
        "d": ("bfloat16", (5,)),
        "e": ("float8_e4m3fn", (33,)),
        "f": ("float32", (1,)),
    }
    manifest = Manifest({n: TensorSpec(s, d) for n, (d, s) in specs.items()})
    item = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8_e4m3fn": 1}
    buffers = [Buffer(n, 0, d, s) for n, (d, s) in specs.items()]
    rows = [Placement(n, i, (0,), s, 0, (item[d],)) for i, (n, (d, s)) in enumerate(specs.items())]
    table = Placements.from_rows(buffers, rows)
    plan = build_plan(manifest, table, table)
    sources = [torch.randint(0, 120, s, dtype=torch.uint8).to(torch.float32).to(getattr(torch, d)) for d, s in specs.values()]
    for bucket in (8, 17, 64, 1000):
        memory = {n: torch.zeros(s, dtype=getattr(torch, d)) for n, (d, s) in specs.items()}
        run_transfer(plan, Hosts.single(1, 1), sources, memory, bucket)
        for name, want in zip(specs, sources, strict=True):
            assert torch.equal(memory[name].view(torch.uint8), want.view(torch.uint8)), (name, bucket)


def test_scales_come_first_and_stay():
    manifest = Manifest(
        {
            "a": TensorSpec((4, 32), "float8_e4m3fn", "mxfp8", "z"),
            "b": TensorSpec((4, 4), "float32"),
            "z": TensorSpec((4, 1), "uint8"),
        }
    )
    dtypes = {"a": "float8_e4m3fn", "b": "float32", "z": "uint8"}
    shapes = {n: s.shape for n, s in manifest.tensors.items()}
    item = {"a": 1, "b": 4, "z": 1}
    buffers = [Buffer(n, 0, dtypes[n], shapes[n]) for n in manifest.tensors]
    rows = [Placement(n, i, (0, 0), shapes[n], 0, (shapes[n][1] * item[n], item[n])) for i, n in enumerate(manifest.tensors)]
    table = Placements.from_rows(buffers, rows)
    r = rounds(build_plan(manifest, table, table), 64)
    assert r.kept == 1
    assert r.plan.names[int(r.plan.tensor[0])] == "z"
    reader = Buffers(r, torch.device("cpu"))
    assert len(reader.steps) == len(r.messages) - 1
    found = [{step.names[t] for t in step.tensor.tolist()} for step in reader.steps]
    assert {"a", "z"} in found
    assert all(("z" in names) == ("a" in names) for names in found), "a step's codes find their scales in the same plan"


def test_a_round_that_was_given_up_is_not_read():
    manifest = Manifest({"t": TensorSpec((8,), "float32")})
    table = Placements.from_rows([Buffer("t", 0, "float32", (8,))], [Placement("t", 0, (0,), (8,), 0, (4,))])
    cut = rounds(build_plan(manifest, table, table), 8)
    reader = Unpacker(Buffers(cut, torch.device("cpu")))

    class Quiet:
        device = torch.device("cpu")
        independent = False

        def post(self, sends, receives):
            return self

        def wait(self, deadline):
            return None

    reader.begin(Quiet(), 0.0)
    reader.memory(2)
    reader.memory(2)
    with pytest.raises(WireError, match="after a later one"):
        reader.memory(1)
