"""Quantising in the trainer: real Megatron ranks, a real MXFP8 engine on a CPU, wires `shm` and `ring`."""

from __future__ import annotations

import pytest
import torch

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.engine.test_mxfp8 import SETTINGS, live, weights
from tests.support.engine_bridge import bridge
from tests.support.engines import open_llm
from tests.support.quantised_jobs import hand_over, refused
from vllm_refit_ext.core.mxfp8 import quantize

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model("qwen3_moe", tmp_path_factory.mktemp("prequantize"), seed=3, dtype="bfloat16")


@pytest.fixture(scope="module")
def engine(folder):
    with open_llm(folder, **SETTINGS) as llm, bridge(llm) as url:
        yield llm, url


@pytest.mark.parametrize(("geometry", "wire"), [({"tp": 2}, "shm"), ({"ep": 2}, "shm"), ({"tp": 2, "ep": 2}, "ring")])
def test_trainer_quantises(folder, engine, geometry, wire):
    """Codes and scales of every rank's own shards arrive as the reference quantises the whole tensors; half the bytes move."""
    llm, url = engine
    results = run_ranks(hand_over, 2, str(folder), geometry, url, {"wire": wire})
    given = weights(folder)
    assert results[0]["compared"] == len(given)
    assert results[0]["coded"]
    plain = sum(t.nbytes for n, t in given.items() if n not in results[0]["coded"])
    coded = sum(t.numel() + t.numel() // 32 for n, t in given.items() if n in results[0]["coded"])
    assert results[0]["nbytes"] == plain + coded
    held = live(llm)
    codes, scales = quantize(given["model.layers.1.self_attn.o_proj.weight"].float().numpy())
    assert torch.equal(held["model.layers.1.self_attn.o_proj.weight"].view(torch.uint8), torch.from_numpy(codes))
    assert torch.equal(held["model.layers.1.self_attn.o_proj.weight_scale"], torch.from_numpy(scales))
    gate, _ = quantize(given["model.layers.0.mlp.experts.5.gate_proj.weight"].float().numpy())
    w13 = next(t for n, t in held.items() if n.startswith("model.layers.0.") and n.endswith("w13_weight"))
    assert torch.equal(w13[5, : gate.shape[0]].view(torch.uint8), torch.from_numpy(gate))


def test_a_cut_through_a_block_is_refused(folder, engine):
    """Experts of 96 cut in two leave 48 columns: every such tensor is named."""
    text = run_ranks(refused, 2, str(folder), {"tp": 2, "etp": 2}, engine[1], {})[0]
    assert text.startswith("ConfigError")
    assert "through a block" in text
    assert "experts.0.down_proj" in text


def test_an_unknown_name_is_refused(folder, engine):
    """A name in the configuration that nobody offers."""
    text = run_ranks(refused, 1, str(folder), {}, engine[1], {"quantise": ("model.layers.0.self_attn.o_proj.weigth",)})[0]
    assert "not offered" in text
    assert "Did you mean" in text
