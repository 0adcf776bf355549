"""Digests by launches equal those of one box after another, on both sides, in every layout; one changed byte is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.test_kernel_writer import LAYOUTS, Memory, engine_param, experts_plan, single
from vllm_refit_ext.core.coded import PLAIN, Coding
from vllm_refit_ext.core.layouts import Stored
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.receiver.kernel_writer import KernelWriter
from vllm_refit_ext.receiver.stored_digests import StoredDigests
from vllm_refit_ext.wires import digests as digests_module
from vllm_refit_ext.wires.boxes import sum_by_tensor
from vllm_refit_ext.wires.coded import PlacedScales, ScaleMoves, sent_content
from vllm_refit_ext.wires.digests import SentDigests

CPU = torch.device("cpu")


def both(plan, params, stored, sources, rest=(0, 0)):
    """Write, then compare the launches of both sides with each other and with the boxes one by one. rest: moves that no launch
    digests, on each side."""
    memory, scales = Memory(sources), ScaleMoves(plan)
    writer = KernelWriter(plan, params, stored, CPU)
    writer.write(memory)
    sent, kept = SentDigests(plan, CPU, scales), StoredDigests(writer.plan, params, stored, CPU)
    assert (len(sent.rest), len(kept.rest)) == rest
    every = range(len(plan))
    want = sum_by_tensor(plan, every, lambda move: sent_content(plan, move, memory, scales))
    assert want == sum_by_tensor(writer.plan, every, writer.content)
    for _ in range(2):
        assert sent(memory, scales) == {0: want}
        assert kept(writer.content) == {0: want}
    return kept, writer, want


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("cuts", [1, 3])
def test_experts(layout, coded, cuts, monkeypatch):
    monkeypatch.setattr(digests_module, "SCRATCH_BYTES", 40_000)
    plan, sources, _ = experts_plan(coded, Coding(layout, "ceil"), cuts)
    one = engine_param(Coding(layout, "ceil"), copies=2)
    others = int(plan.is_scale.sum())
    kept, writer, want = both(plan, {}, {"m.w13_weight": one}, sources, (0, others))
    for tensor in (one.values, one.scales[0]):
        flat = tensor.view(-1)
        flat[77] ^= 1
        changed = kept(writer.content)[0]
        assert sum(changed[name] != want[name] for name in want) == 1
        flat[77] ^= 1


def test_scales_that_another_replica_sends():
    """A rank digests the scales that it holds itself."""
    plan, sources, _ = experts_plan(True, Coding("marlin", "ceil"), 2)
    rows = [
        Placement(plan.names[t], int(s), tuple(lo), tuple(np.add(lo, extent)), int(at), tuple(steps))
        for t, s, lo, extent, at, steps in zip(
            plan.tensor,
            plan.source,
            plan.lo.tolist(),
            plan.extent.tolist(),
            plan.source_offset,
            plan.source_strides.tolist(),
            strict=True,
        )
    ]
    placements = Placements.from_rows(plan.sources, rows)
    codes = plan.select(~plan.is_scale)
    scales = PlacedScales(codes, placements, sources)
    want = SentDigests(plan, CPU, ScaleMoves(plan))(Memory(sources), ScaleMoves(plan))
    assert SentDigests(codes, CPU, scales)(Memory(sources), scales) == want


def test_what_no_launch_digests_is_counted_and_right():
    """A cast, a scalar, a transposed checkpoint tensor."""
    x, scalar = torch.randn(6, 10), torch.tensor(3.0)
    specs = {"w": TensorSpec((6, 10), "float32"), "s": TensorSpec((), "float32")}
    sources = Placements.from_rows(
        [Buffer("a", 0, "float32", (6, 10)), Buffer("b", 0, "float32", ())],
        [Placement("w", 0, (0, 0), (6, 10), 0, (40, 4)), Placement("s", 1, (), (), 0, ())],
    )
    targets = Placements.from_rows(
        [Buffer("p", 0, "bfloat16", (6, 10), PLAIN), Buffer("q", 0, "float32", (), PLAIN)],
        [Placement("w", 0, (0, 0), (6, 10), 0, (20, 2)), Placement("s", 1, (), (), 0, ())],
    )
    params = {"p": torch.zeros(6, 10, dtype=torch.bfloat16), "q": torch.zeros(())}
    both(build_plan(Manifest(specs), sources, targets), params, {}, [x, scalar], (2, 1))
    box = Placement("w", 0, (0, 0), (128, 64), 0, (2, 256))
    across = torch.randn(128, 64).bfloat16()
    plan, one = single((64, 128), across, box, Coding("plain", "ceil"), Stored(64, 128), TensorSpec((128, 64), "bfloat16"))
    both(plan, {}, {"m.weight": one}, [across], (1, 1))
