"""MXFP8 that is sent to engines which hold none: dequantised on arrival, in place or on the way to the engine's own reload."""

from __future__ import annotations

import pytest
import torch

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.engine.test_mxfp8 import live, weights
from tests.support.engine_bridge import bridge
from tests.support.engines import open_llm
from tests.support.quantised_jobs import hand_over
from vllm_refit_ext.core.mxfp8 import quantize

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model("qwen3_moe", tmp_path_factory.mktemp("dequantise"), seed=3, dtype="bfloat16")


def test_an_engine_without_mxfp8_dequantises(folder):
    """A stock CPU engine holds no MXFP8: what the configuration names is sent as MXFP8 and is dequantised on arrival."""
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    with (
        open_llm(folder, dtype="bfloat16", in_process=True, extension="tests.support.plain_cpu.PlainCpuExtension") as llm,
        bridge(llm) as url,
    ):
        results = run_ranks(hand_over, 2, str(folder), {"ep": 2}, url, {"quantise": (name,)})
        assert results[0]["coded"] == [name]
        w13 = next(t for n, t in live(llm).items() if n.startswith("model.layers.0.") and n.endswith("w13_weight"))
    codes, scales = quantize(weights(folder)[name].float().numpy())
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.exp2(
        torch.from_numpy(scales).float() - 127
    ).repeat_interleave(32, 1)
    assert torch.equal(w13[1, : values.shape[0]], values.bfloat16())


def test_a_stock_cpu_engine_reloads_what_it_dequantised(folder):
    """Packed kernels take the engine's own reload, which is fed with dequantised tensors."""
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    extension = "vllm_refit_ext.RefitWorkerExtension"
    with open_llm(folder, dtype="bfloat16", in_process=True, extension=extension) as llm, bridge(llm) as url:
        results = run_ranks(hand_over, 1, str(folder), {}, url, {"quantise": (name,)})
    assert results[0]["coded"] == [name]
    assert results[0]["compared"]
