"""A real MXFP8 engine on a CPU: quantised in the receiver, or sent as MXFP8; equal to a fresh engine in every byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.support.tiny_model import save_model
from tests.support.engines import open_llm
from tests.support.loose_sender import LooseSender
from tests.support.mxfp8_tensors import quantize
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.coded import SENT_SCALE
from vllm_refit_ext.core.errors import PlanError
from vllm_refit_ext.core.manifest import TensorSpec

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.mxfp8_cpu.Mxfp8CpuExtension"
SETTINGS = {"dtype": "bfloat16", "quantization": "mxfp8", "extension": EXTENSION, "in_process": True}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def live(llm) -> dict[str, torch.Tensor]:
    """Copies of every tensor of the engine, parameters, buffers and derived ones."""
    from vllm_refit_ext.engine.inventory import tensors

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return {n: t.detach().clone() for n, t in tensors(model).items()}


def addresses(llm) -> dict[str, int]:
    from vllm_refit_ext.engine.inventory import tensors

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return {n: t.data_ptr() for n, t in tensors(model).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a byte."""
    assert a.keys() == b.keys()
    return [
        n
        for n in a
        if not torch.equal(a[n].contiguous().view(-1).view(torch.uint8), b[n].contiguous().view(-1).view(torch.uint8))
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("mxfp8")
    return [save_model("qwen3_moe", base / str(seed), seed=seed, dtype="bfloat16") for seed in (0, 1)]


@pytest.fixture(scope="module")
def fresh(folders):
    with open_llm(folders[1], **SETTINGS) as llm:
        return live(llm)


@pytest.fixture(scope="module")
def engine(folders, fresh):
    with open_llm(folders[0], **SETTINGS) as llm:
        yield llm


def test_receiver_quantises(engine, folders, fresh):
    """BF16 is sent; every byte equals a fresh engine's, addresses stay, a second refit changes nothing."""
    before = addresses(engine)
    sender = LooseSender(LLMClient(engine), weights(folders[1]), cuts={"model.layers.0.mlp.experts.3.down_proj.weight": (0, 3)})
    replies = sender.prepare()
    assert replies[0].reload == {}
    assert {name.split(":")[0] for name in replies[0].layouts} == {"plain", "mxfp8"}
    assert same(live(engine), fresh)
    for version in ("a", "b"):
        report = sender.refit(version)[0]
        assert report.writer == "in place"
        assert same(live(engine), fresh) == []
        assert sender.verify() == len(weights(folders[1]))
    assert addresses(engine) == before
    sender.close()


def test_mxfp8_is_sent(engine, folders):
    """Codes and scales, cut differently from each other, land as they were quantised."""
    given = weights(folders[1])
    plain = LooseSender(LLMClient(engine), given)
    names = plain.prepare({"prequantize": True})[0].quantise
    assert names
    assert all(n.endswith("weight") and given[n].ndim == 2 for n in names)
    offered, specs, cuts = {}, {}, {}
    for name, tensor in given.items():
        if name not in names:
            offered[name] = tensor
            continue
        ((codes, scales),) = quantize([tensor])
        offered[name], offered[name + SENT_SCALE] = codes.view(torch.float8_e4m3fn), scales
        specs[name] = TensorSpec(tuple(codes.shape), "float8_e4m3fn", "mxfp8", name + SENT_SCALE)
        cuts |= {name: (0, 2), name + SENT_SCALE: (1, 2)}
    sender = LooseSender(LLMClient(engine), offered, specs=specs, cuts=cuts)
    assert sender.prepare({"prequantize": True})[0].reload == {}
    sender.refit("coded")
    assert sender.verify() == len(given)
    held = live(engine)
    codes = held["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(codes.view(torch.uint8), offered["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8))
    sender.close()


def test_a_cut_through_a_block_takes_the_reload(engine, folders, fresh):
    """A trainer that cuts K inside a block can't be quantised in one pass: the tensor is reloaded, and the report says why."""
    name = "model.layers.1.self_attn.o_proj.weight"
    sender = LooseSender(LLMClient(engine), weights(folders[1]), cuts={name: (1, 7)})
    replies = sender.prepare()
    assert set(replies[0].reload) == {name}
    assert "32" in replies[0].reload[name]
    sender.refit("cut")
    assert same(live(engine), fresh) == []
    sender.close()


def test_nan_is_named_and_tears(engine, folders):
    """NaN in a tensor to quantise is an error with its name; the engine is torn until a good refit."""
    given = {n: t.clone() for n, t in weights(folders[1]).items()}
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    given[name][3, 40] = float("nan")
    sender = LooseSender(LLMClient(engine), given)
    sender.prepare()
    with pytest.raises(Exception, match=r"experts\.2\.up_proj"):
        sender.refit("nan")
    assert LLMClient(engine).status()[0].state == "torn"
    for buffer in sender.buffers:
        buffer.nan_to_num_()
    sender.refit("good")
    assert LLMClient(engine).status()[0].state == "ready"
    sender.close()


def test_a_missing_partner_is_refused(engine, folders):
    """Codes without their scales make no plan."""
    given = weights(folders[1])
    name = "model.layers.0.self_attn.o_proj.weight"
    ((codes, _),) = quantize([given[name]])
    offered = {**given, name: codes.view(torch.float8_e4m3fn)}
    spec = TensorSpec(tuple(codes.shape), "float8_e4m3fn", "mxfp8", name + SENT_SCALE)
    with pytest.raises(PlanError, match="scale tensor is missing"):
        LooseSender(LLMClient(engine), offered, specs={name: spec}).prepare({"prequantize": True})
