"""The table writer into every layout, byte for byte against the reference: BF16 quantised on the way, and MXFP8 as it is sent."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from tests.support.mxfp8_layouts import stored_for, to_kernel
from vllm_refit_ext.core.coded import PLAIN, SCALE_OF, Coding
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import Stored, layout_of
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.mxfp8 import quantize
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.receiver import kernel_writer
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.receiver.kernel_moves import kernel_moves
from vllm_refit_ext.receiver.kernel_writer import KernelWriter
from vllm_refit_ext.wires import boxes
from vllm_refit_ext.wires.boxes import as_bytes

E, INNER, HIDDEN = 3, 128, 256
LAYOUTS = ("plain", "linear_128x4", "trtllm_moe", "marlin")


class Memory(boxes.Memory):
    """Sources in this process."""

    def __init__(self, tensors):
        self.tensors = tensors

    def memory(self, buffer):
        return as_bytes(self.tensors[buffer])


def experts_plan(coded: bool, coding: Coding, cuts: int = 1):
    """gate and up of every expert into one w13 [E, 2 I, H]; sources are rows of `cuts` shards. Returns plan, sources, whole
    tensors."""
    torch.manual_seed(coded)
    item = 1 if coded else 2
    specs, rows, buffers, sources, targets, names = {}, [], [], [], [], []
    whole = {}
    target = [Buffer("m.w13_weight", 0, "float8_e4m3fn" if coded else "bfloat16", (E, 2 * INNER, HIDDEN), str(coding))]
    for e in range(E):
        for half, part in enumerate(("gate", "up")):
            name = f"{e}.{part}.weight"
            values = torch.randn(INNER, HIDDEN).bfloat16()
            codes, scales = (torch.from_numpy(a) for a in quantize(values.float().numpy(), coding.rule))
            whole[name] = values, codes, scales
            at = (e * 2 * INNER + half * INNER) * HIDDEN * item
            targets.append(Placement(name, 0, (0, 0), (INNER, HIDDEN), at, (HIDDEN * item, item)))
            if coded:
                partner = name + "_s"
                specs[name] = TensorSpec((INNER, HIDDEN), "float8_e4m3fn", "mxfp8", partner)
                specs[partner] = TensorSpec((INNER, HIDDEN // 32), "uint8")
                target.append(Buffer(f"m.w13_weight{SCALE_OF}{partner}", 0, "uint8", (INNER, HIDDEN // 32), str(coding)))
                targets.append(Placement(partner, len(target) - 1, (0, 0), (INNER, HIDDEN // 32), 0, (HIDDEN // 32, 1)))
                parts = [(name, codes.view(torch.float8_e4m3fn), cuts), (partner, scales, cuts + 1)]
            else:
                specs[name] = TensorSpec((INNER, HIDDEN), "bfloat16")
                parts = [(name, values, cuts)]
            for label, tensor, pieces in parts:
                first = 0
                for piece in tensor.tensor_split(pieces):
                    strides = (piece.shape[1] * piece.element_size(), piece.element_size())
                    rows.append(Placement(label, len(buffers), (first, 0), (first + len(piece), piece.shape[1]), 0, strides))
                    buffers.append(Buffer(f"{label}.{first}", 0, str(piece.dtype).removeprefix("torch."), tuple(piece.shape)))
                    sources.append(piece.contiguous())
                    first += len(piece)
    del names
    plan = build_plan(Manifest(specs), Placements.from_rows(buffers, rows), Placements.from_rows(target, targets))
    return plan, sources, whole


def engine_param(coding: Coding, copies: int = 1) -> StoredParam:
    stored = stored_for(coding.layout, 2 * INNER, HIDDEN, gated=coding.layout == "trtllm_moe")
    form = layout_of(coding.layout)
    values = torch.zeros((E, *form.value_shape(stored)), dtype=torch.uint8)
    scales = [torch.full((E, *form.scale_shape(stored)), 9 * i, dtype=torch.uint8) for i in range(copies)]
    return StoredParam(coding, (E, 2 * INNER, HIDDEN), stored, values, scales)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["ceil", "floor"])
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("cuts", [1, 3])
def test_experts_equal_the_reference(layout, rule, coded, cuts):
    """Values and both copies of the scales, whatever the cut; what is read back is what was sent."""
    coding = Coding(layout, rule)
    plan, sources, whole = experts_plan(coded, coding, cuts)
    one = engine_param(coding, copies=2)
    writer = KernelWriter(plan, {}, {"m.w13_weight": one}, torch.device("cpu"))
    for _ in range(2):
        writer.write(Memory(sources))
    fused = [
        np.stack([np.concatenate([whole[f"{e}.{p}.weight"][i].numpy() for p in ("gate", "up")]) for e in range(E)])
        for i in (1, 2)
    ]
    values, scales = to_kernel(layout, *fused, gated=layout == "trtllm_moe")
    assert np.array_equal(one.values.numpy(), values)
    for stored in one.scales:
        assert np.array_equal(stored.numpy(), scales)
    for move in range(len(writer.plan)):
        content = writer.content(move)
        if content is not None:
            name, lo = plan.names[int(plan.tensor[move])], int(plan.lo[move, 0])
            rows = int(plan.extent[move, 0])
            assert torch.equal(content[0], whole[name][1][lo : lo + rows])
            assert torch.equal(content[1], whole[name][2][lo : lo + rows])


def single(
    shape, source: torch.Tensor, box: Placement, coding: Coding, stored: Stored, spec: TensorSpec
) -> tuple[Plan, StoredParam]:
    """One tensor into one linear."""
    buffer = Buffer("s", 0, str(source.dtype).removeprefix("torch."), tuple(source.shape))
    strides = tuple(s * source.element_size() for s in source.stride())
    sources = Placements.from_rows([buffer], [Placement("w", 0, (0, 0), spec.shape, 0, strides)])
    targets = Placements.from_rows([Buffer("m.weight", 0, spec.dtype, shape, str(coding))], [box])
    form = layout_of(coding.layout)
    values = torch.zeros(form.value_shape(stored), dtype=torch.uint8)
    scales = torch.zeros(form.scale_shape(stored), dtype=torch.uint8)
    plan = build_plan(Manifest({"w": spec}), sources, targets)
    return plan, StoredParam(coding, shape, stored, values, [scales])


@pytest.mark.parametrize(("n", "k", "rows", "cols"), [(8, 256, 64, 256), (96, 96, 128, 128), (64, 160, 64, 256)])
def test_marlin_pads(n, k, rows, cols):
    """Sizes that Marlin pads along rows and along K: the padding is left alone."""
    x = torch.randn(n, k).bfloat16()
    coding = Coding("marlin", "floor")
    box = Placement("w", 0, (0, 0), (n, k), 0, (2 * k, 2))
    plan, one = single((n, k), x, box, coding, Stored(rows, cols), TensorSpec((n, k), "bfloat16"))
    KernelWriter(plan, {}, {"m.weight": one}, torch.device("cpu")).write(Memory([x]))
    codes, scales = quantize(x.float().numpy(), "floor")
    values, wanted = to_kernel("marlin", codes, scales, stored=(rows, cols))
    assert np.array_equal(one.values.numpy(), values)
    assert np.array_equal(one.scales[0].numpy(), wanted)


def test_a_transposed_checkpoint_tensor():
    """A loader that transposes: blocks run along the engine's K, which is the checkpoint's first dimension."""
    n, k = 64, 128
    x = torch.randn(k, n).bfloat16()
    coding = Coding("plain", "ceil")
    box = Placement("w", 0, (0, 0), (k, n), 0, (2, 2 * k))
    plan, one = single((n, k), x, box, coding, Stored(n, k), TensorSpec((k, n), "bfloat16"))
    KernelWriter(plan, {}, {"m.weight": one}, torch.device("cpu")).write(Memory([x]))
    codes, scales = quantize(np.ascontiguousarray(x.float().numpy().T))
    assert np.array_equal(one.values.numpy(), codes)
    assert np.array_equal(one.scales[0].numpy(), scales)


def test_a_cut_inside_a_block_is_named_beforehand():
    """`kernel_moves` names it, and the writer refuses it."""
    n, k = 64, 128
    x = torch.randn(n, k).bfloat16()
    coding = Coding("plain", "ceil")
    half = Placement("w", 0, (0, 0), (n, 40), 0, (2 * k, 2))
    rest = Placement("w", 0, (0, 40), (n, k), 80, (2 * k, 2))
    sources = Placements.from_rows([Buffer("s", 0, "bfloat16", (n, k))], [Placement("w", 0, (0, 0), (n, k), 0, (2 * k, 2))])
    targets = Placements.from_rows([Buffer("m.weight", 0, "bfloat16", (n, k), str(coding))], [half, rest])
    plan = build_plan(Manifest({"w": TensorSpec((n, k), "bfloat16")}), sources, targets)
    stored = Stored(n, k)
    one = StoredParam(coding, (n, k), stored, torch.zeros(n, k, dtype=torch.uint8), [torch.zeros(n, k // 32, dtype=torch.uint8)])
    assert "32" in str(kernel_moves(plan, {"m.weight": one}).unfit["w"])
    with pytest.raises(LayoutError, match="32"):
        KernelWriter(plan, {}, {"m.weight": one}, torch.device("cpu"))
    assert x.shape == (n, k)


def test_nan_is_named():
    """The tensor's own name is in the error."""
    coding = Coding("marlin", "ceil")
    plan, sources, _ = experts_plan(False, coding)
    sources[4][7, 9] = float("inf")
    writer = KernelWriter(plan, {}, {"m.w13_weight": engine_param(coding)}, torch.device("cpu"))
    writer.write(Memory(sources))
    with pytest.raises(LayoutError, match=r"2\.gate\.weight"):
        writer.finish()
    sources[4][7, 9] = 1.0
    writer.write(Memory(sources))
    writer.finish()


def test_plain_parameters_cast():
    """A float32 source into a BF16 parameter, beside the others in one table."""
    x = torch.randn(6, 10)
    sources = Placements.from_rows([Buffer("s", 0, "float32", (6, 10))], [Placement("w", 0, (0, 0), (6, 10), 0, (40, 4))])
    targets = Placements.from_rows([Buffer("p", 0, "bfloat16", (6, 10), PLAIN)], [Placement("w", 0, (0, 0), (6, 10), 0, (20, 2))])
    plan = build_plan(Manifest({"w": TensorSpec((6, 10), "float32")}), sources, targets)
    param = torch.zeros(6, 10, dtype=torch.bfloat16)
    KernelWriter(plan, {"p": param}, {}, torch.device("cpu")).write(Memory([x]))
    assert torch.equal(param, x.bfloat16())


@pytest.mark.parametrize("coded", [False, True])
def test_sources_on_the_host_come_in_parts(coded, monkeypatch):
    """As into a GPU from shared memory: uploaded a few at a time, scales with their codes, the same bytes."""
    coding = Coding("trtllm_moe", "ceil")
    plan, sources, _ = experts_plan(coded, coding, 2)
    whole, parts = engine_param(coding), engine_param(coding)
    KernelWriter(plan, {}, {"m.w13_weight": whole}, torch.device("cpu")).write(Memory(sources))
    monkeypatch.setattr(kernel_writer, "UPLOAD_BYTES", 100_000)
    monkeypatch.setattr(KernelWriter, "_on_host", lambda self, reader: isinstance(reader, Memory))
    writer = KernelWriter(plan, {}, {"m.w13_weight": parts}, torch.device("cpu"))
    uploads = []

    class Fresh(Memory):
        """What is brought to a device is memory of its own."""

        def memory(self, buffer):
            found = super().memory(buffer).clone()
            uploads.append(weakref.ref(found))
            return found

    writer.write(Fresh(sources))
    assert len(writer._parts) > 1
    assert uploads
    assert not any(upload() is not None for upload in uploads), "no uploaded part stays on the device"
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales[0], parts.scales[0])


@pytest.mark.parametrize("coded", [False, True])
def test_moves_of_a_plan_are_those_of_its_moves_one_by_one(coded):
    """All at once or each alone with its scales: the same table, whatever stands beside a move."""
    coding = Coding("trtllm_moe", "ceil")
    plan, _, _ = experts_plan(coded, coding, 3)
    stored = {"m.w13_weight": engine_param(coding, copies=2)}
    together = kernel_moves(plan, stored).moves
    alone = []
    for move in np.flatnonzero(~plan.is_scale).tolist():
        mask = np.arange(len(plan)) == move
        alone += kernel_moves(plan.select(plan.with_scales(mask)), stored).moves
    assert together == alone
    assert len(together) >= 2 * 18


def test_a_missing_scale_names_its_tensor_and_no_other():
    """A part of the scales is not sent: the tensor's name is in `unfit`, others have their moves."""
    coding = Coding("plain", "ceil")
    plan, _, _ = experts_plan(True, coding, 1)
    lost = plan.names.index("1.up.weight_s")
    first = int(np.flatnonzero(plan.tensor == lost)[0])
    made = kernel_moves(plan.select(np.arange(len(plan)) != first), {"m.w13_weight": engine_param(coding)})
    assert list(made.unfit) == ["1.up.weight"]
    assert "are not sent" in str(made.unfit["1.up.weight"])
    assert {m.name for m in made.moves} == {f"{e}.{p}.weight" for e in range(E) for p in ("gate", "up")} - {"1.up.weight"}
