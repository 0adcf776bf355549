"""Engines of serialised MXFP8 checkpoints, as ModelOpt and compressed-tensors write them: BF16 and MXFP8 trainers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.support.tiny_model import save_model
from tests.engine.test_mxfp8 import EXTENSION, addresses, live, same, weights
from tests.support.engines import open_llm
from tests.support.loose_sender import LooseSender
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.coded import SENT_SCALE
from vllm_refit_ext.core.errors import PlanError, RefitError
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.mxfp8 import quantize

pytestmark = pytest.mark.engine

SETTINGS = {"dtype": "bfloat16", "extension": EXTENSION, "in_process": True}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "MXFP8",
    "kv_cache_quant_algo": None,
    "ignore": ["lm_head", "*mlp.gate", "*embed_tokens*"],
    "producer": {"name": "modelopt"},
}
_GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "scale_dtype": "torch.uint8",
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp8-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_GROUP, "dynamic": False},
            "input_activations": {**_GROUP, "dynamic": True},
        }
    },
}


def serialise(folder: Path, out: Path, config: dict) -> Path:
    """A checkpoint of the projections as E4M3 codes with uint8 scales, quantised by the reference."""
    shutil.copytree(folder, out)
    tensors = {}
    for name, tensor in weights(folder).items():
        tensors[name] = tensor
        if tensor.ndim == 2 and "_proj" in name:
            codes, scales = (torch.from_numpy(a) for a in quantize(tensor.float().numpy()))
            tensors |= {name: codes.view(torch.float8_e4m3fn), name + "_scale": scales}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return out


@pytest.fixture(scope="module", params=[MODELOPT, COMPRESSED], ids=lambda config: config["quant_method"])
def folders(request, tmp_path_factory):
    base = tmp_path_factory.mktemp("serialised")
    plain = [save_model("qwen3_moe", base / f"plain-{seed}", seed=seed, dtype="bfloat16") for seed in (0, 1)]
    return plain, [serialise(folder, base / f"coded-{i}", request.param) for i, folder in enumerate(plain)]


@pytest.fixture(scope="module")
def fresh(folders):
    with open_llm(folders[1][1], **SETTINGS) as llm:
        return live(llm)


@pytest.fixture(scope="module")
def engine(folders, fresh):
    with open_llm(folders[1][0], **SETTINGS) as llm:
        yield llm


def test_a_bf16_trainer(engine, folders, fresh):
    """BF16 is sent, the receiver quantises by the checkpoint's rule; every byte equals a fresh engine's, every address stays."""
    before = addresses(engine)
    sender = LooseSender(LLMClient(engine), weights(folders[0][1]), cuts={"model.layers.0.self_attn.k_proj.weight": (0, 2)})
    reply = sender.prepare()[0]
    assert reply.reload == {}
    assert any(name.startswith("mxfp8:plain:ceil") for name in reply.layouts)
    assert same(live(engine), fresh)
    for i in range(2):
        sender.refit(f"bf16-{i}")
        assert same(live(engine), fresh) == []
    assert addresses(engine) == before
    assert sender.verify() == len(weights(folders[0][1]))
    sender.close()


def test_an_mxfp8_trainer(engine, folders, fresh):
    """Codes and scales are sent as the checkpoint holds them, under the names of sent scales."""
    given = weights(folders[1][1])
    offered, specs = {}, {}
    for name, tensor in given.items():
        if name.endswith("_scale"):
            offered[name.removesuffix("_scale") + SENT_SCALE] = tensor
            continue
        offered[name] = tensor
        if tensor.dtype == torch.float8_e4m3fn:
            specs[name] = TensorSpec(tuple(tensor.shape), "float8_e4m3fn", "mxfp8", name + SENT_SCALE)
    other = LooseSender(LLMClient(engine), {n: 2 * t for n, t in weights(folders[0][0]).items()})
    other.prepare()
    other.refit("other")
    other.close()
    assert same(live(engine), fresh)
    sender = LooseSender(LLMClient(engine), offered, specs=specs)
    sender.prepare({"prequantize": True})
    sender.refit("coded")
    assert same(live(engine), fresh) == []
    sender.close()


def test_a_cut_through_a_block_needs_the_trainer_to_quantise(engine, folders):
    """The loader takes E4M3 only, so a BF16 tensor that can't be quantised in one pass has no way in: it is refused by name."""
    name = "model.layers.1.self_attn.o_proj.weight"
    sender = LooseSender(LLMClient(engine), weights(folders[0][1]), cuts={name: (1, 7)})
    with pytest.raises(PlanError, match=r"[Ll]et the trainer quantise") as caught:
        sender.prepare()
    assert [p for p in caught.value.problems if name in p.where]


def test_the_engines_own_reload_in_between(engine, folders, fresh):
    """vLLM's own reload may leave scales twice: the next refit notices or writes both, and the engine equals a fresh one
    again."""
    sender = LooseSender(LLMClient(engine), weights(folders[0][1]))
    sender.prepare()
    sender.refit("before")
    engine.collective_rpc("reload_weights")
    assert same({n: t for n, t in live(engine).items() if n in fresh}, fresh), "the folder holds other weights"
    asked = ""
    try:
        sender.refit("after")
    except RefitError as error:
        asked = str(error)
        sender.prepare()
        sender.refit("prepared anew")
    assert not asked or "prepare" in asked
    now = live(engine)
    assert same({n: t for n, t in now.items() if n in fresh}, fresh) == []
    sender.close()
