"""The kernels on a GPU: the shared suite, real shapes of large models, offsets beyond 2^31, and vLLM's Marlin conversion."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.mxfp8_tensors import quantize, to_canonical  # noqa: E402
from tests.unit.kernels import checks  # noqa: E402
from tests.unit.kernels.suite import *  # noqa: E402, F403
from vllm_refit_ext.core import layouts, mxfp8  # noqa: E402
from vllm_refit_ext.core.layouts import Stored  # noqa: E402
from vllm_refit_ext.kernels.moves import At, CopyMove, DigestMove, QuantizeMove, Stack, StoredBox, contiguous  # noqa: E402
from vllm_refit_ext.kernels.table import Table  # noqa: E402
from vllm_refit_ext.kernels.verify import verify  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPES = [
    ("qwen3-30b", 768, 2048, True),
    ("qwen3-30b tp2", 384, 2048, True),
    ("qwen3-30b tp4", 192, 2048, True),
    ("qwen3-235b", 1536, 4096, True),
    ("qwen3-235b tp4", 384, 4096, True),
    ("qwen3-235b tp8", 192, 4096, True),
    ("deepseek-v3", 2048, 7168, True),
    ("deepseek-v3 tp16", 128, 7168, True),
    ("deepseek-v3 tp32", 64, 7168, True),
    ("non-gated", 1856, 2688, False),
]
"""(name, intermediate size of a rank, hidden size, gated): real local shapes of expert matrices."""


@pytest.fixture
def way():
    return checks.Way("cuda", "triton")


@pytest.mark.parametrize(("name", "inner", "hidden", "gated"), SHAPES)
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_real_shapes(name, inner, hidden, gated, layout):
    """w13 and w2 of two experts: Triton equals torch on every byte and numpy on one expert; read back, it is the input."""
    for rows, cols, halves in ((2 * inner if gated else inner, hidden, gated), (hidden, inner, False)):
        step = layouts.layout_of(layout).row_multiple
        stored = Stored(-(-rows // step) * step, cols, halves and rows % step == 0)
        x = torch.randn(2, rows, cols, device="cuda", dtype=torch.bfloat16)
        stack = Stack(layout, At(1), At(2), stored, 2)
        moves = [QuantizeMove(contiguous(At(0), "bfloat16", (2, rows, cols)), stack, (0, 0, 0), name=name)]
        results = []
        for backend in ("triton", "torch"):
            _, values, scales = checks.engine(layout, stored, 2, "cuda")
            table = Table(moves, "cuda", backend=backend)
            table.bind([x, values, scales])
            table.launch()
            results.append((values, scales))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        verify(
            [QuantizeMove(contiguous(At(0), "bfloat16", (rows, cols)), stack, (0, 0))], [x, *results[0]], sample=1
        ).raise_if_wrong()
        codes, scales = to_canonical(layout, *results[0], gated=stored.gated)
        plain = quantize([x])[0]
        assert torch.equal(codes[:, :rows], plain[0])
        assert torch.equal(scales[:, :rows], plain[1])


def test_hardware_rounds_like_the_reference_for_every_bfloat16():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.isfinite()]
    x = torch.cat([x, x.flip(0)[: -len(x) % 32]]).view(-1, 32)
    shuffled = x.view(-1)[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))].view(-1, 32)
    for rule in mxfp8.RULES:
        for part in (x, shuffled):
            codes, scales = quantize([part.cuda()], rule=rule)[0]
            want = mxfp8.quantize(part.float().numpy(), rule)
            np.testing.assert_array_equal(codes.cpu().numpy(), want[0])
            np.testing.assert_array_equal(scales.cpu().numpy(), want[1])


def test_one_matrix_beyond_2_to_the_31_elements():
    rows, cols = 589_824, 4096
    x = torch.empty(rows, cols, device="cuda", dtype=torch.bfloat16).normal_()
    for layout in ("plain", "trtllm_moe", "marlin"):
        stack, values, scales = checks.engine(layout, Stored(rows, cols), 1, "cuda")
        moves = [QuantizeMove(contiguous(At(0), "bfloat16", (rows, cols)), stack, (0, 0))]
        table = Table(moves, "cuda")
        table.bind([x, values, scales])
        table.launch()
        check = Table([DigestMove(StoredBox(stack, (0, 0), (rows, cols)), (rows, cols), (0, 0))], "cuda")
        check.bind([x, values, scales])
        check.launch()
        tail = QuantizeMove(contiguous(At(0, (rows - 256) * cols * 2), "bfloat16", (256, cols)), stack, (rows - 256, 0))
        verify([tail], [x, values, scales], sample=1).raise_if_wrong()
        if layout == "plain":
            digest = check.digest_values()
            codes, plain_scales = values, scales
        else:
            assert check.digest_values() == digest
            back = to_canonical(layout, values, scales)
            assert torch.equal(back[0], codes)
            assert torch.equal(back[1], plain_scales)
        del values, scales


def test_a_copy_of_more_than_4_gib_and_rebinding():
    n = 5 * 2**30 + 48
    x = torch.empty(n // 8, device="cuda", dtype=torch.int64).random_()
    moves = [CopyMove(contiguous(At(0), "int64", (n // 8,)), contiguous(At(1), "int64", (n // 8,)))]
    table = Table(moves, "cuda")
    for _ in range(2):
        y = torch.zeros_like(x)
        table.bind([x, y])
        table.launch()
        assert torch.equal(x, y)
        del y


def test_verify_finds_one_wrong_byte():
    x = torch.randn(3, 256, 256, device="cuda", dtype=torch.bfloat16)
    stack, values, scales = checks.engine("trtllm_moe", Stored(256, 256, True), 3, "cuda")
    moves = [
        QuantizeMove(contiguous(At(0, m * 256 * 512), "bfloat16", (256, 256)), stack, (m, 0, 0), name=f"expert {m}")
        for m in range(3)
    ]
    table = Table(moves, "cuda")
    table.bind([x, values, scales])
    table.launch()
    assert not verify(moves, [x, values, scales], sample=3).wrong
    values[1, 9, 9] ^= 1
    report = verify(moves, [x, values, scales], sample=3)
    assert len(report.wrong) == 1
    assert "expert 1: 1 of" in report.wrong[0]


@pytest.mark.parametrize(("inner", "hidden"), [(768, 2048), (384, 2048), (128, 512)])
def test_marlin_equals_the_installed_vllm(inner, hidden):
    """vLLM's own conversion of an MXFP8 MoE layer and of a linear one, on the same codes."""
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_fp8")
    if not hasattr(fp8, "prepare_mxfp8_moe_layer_for_marlin"):
        pytest.skip("this vLLM has no MXFP8 Marlin")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = torch.nn.Module()
        w13, w2 = (torch.randn(2, *s, device="cuda", dtype=torch.bfloat16) for s in ((2 * inner, hidden), (hidden, inner)))
        canonical = quantize([w13, w2])
        theirs = fp8.prepare_mxfp8_moe_layer_for_marlin(
            layer, *(c.view(torch.float8_e4m3fn) for c, _ in canonical), *(s.clone() for _, s in canonical)
        )
        ours = quantize([w13, w2], layout="marlin")
        for i in range(2):
            assert torch.equal(ours[i][0].view(torch.int32), theirs[i])
            assert torch.equal(ours[i][1], theirs[2 + i].view(torch.uint8))
        linear = torch.nn.Module()
        linear.weight = torch.nn.Parameter(canonical[0][0][0].view(torch.float8_e4m3fn), requires_grad=False)
        linear.weight_scale = torch.nn.Parameter(canonical[0][1][0].clone(), requires_grad=False)
        linear.output_size_per_partition, linear.input_size_per_partition = 2 * inner, hidden
        fp8.prepare_mxfp8_layer_for_marlin(linear)
        assert torch.equal(ours[0][0][0].view(torch.int32), linear.weight)
        assert torch.equal(ours[0][1][0], linear.weight_scale.view(torch.uint8))
    finally:
        torch.set_default_dtype(before)
