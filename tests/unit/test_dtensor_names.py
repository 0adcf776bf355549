"""What the DTensor source calls a model's tensors, through wrappers, adapters and transformers' fused experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from examples.support.tiny_model import save_model
from tests.support.dtensor_jobs import Block, check
from vllm_refit_ext.core.errors import ConfigError, WireError
from vllm_refit_ext.sender.dtensor import DTensorSource

NAMES = {"up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias", "bias"}


class Adapted(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora_A = base, nn.Linear(base.in_features, 2)
        self.merged = True


class PeftLike(nn.Module):
    """The two modules that PEFT puts around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model, self.peft_config = nn.Module(), {"default": None}
        self.base_model.model = model


def test_wrappers_leave_no_trace() -> None:
    model = Block()
    model.up = checkpoint_wrapper(model.up)  # type: ignore[assignment]
    model.down = torch.compile(model.down)  # type: ignore[assignment]
    wrapped = PeftLike(torch.compile(model))  # type: ignore[arg-type]
    named = [(f"module.{name}", tensor) for name, tensor in wrapped.state_dict().items()]
    given: Any
    for given in (model, torch.compile(model), wrapped, wrapped.state_dict(), named):
        assert set(DTensorSource(given).specs) == NAMES


def test_names_that_fall_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"_orig_mod.a'.*has the name of 'a'"):
        DTensorSource({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)})


def test_adapters_are_merged_or_refused() -> None:
    model = Block()
    model.up = Adapted(model.up)  # type: ignore[assignment]
    source = DTensorSource(model)
    assert set(source.specs) == NAMES
    model.up.merged = False  # type: ignore[assignment]
    with pytest.raises(WireError, match="up: its adapter is not merged"):
        source.refresh()
    with pytest.raises(ConfigError, match="up: its adapter is not merged"):
        DTensorSource(model)


def test_flattened_parameters_are_refused_by_name() -> None:
    model = Block()
    model.up.weight.ds_tensor = torch.ones(3)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"up.weight: DeepSpeed keeps it as a flat slice"):
        DTensorSource(model)
    flat = type("FullyShardedDataParallel", (nn.Module,), {})()
    with pytest.raises(ConfigError, match="FSDP1 keeps its parameters flattened"):
        DTensorSource(nn.Sequential(flat))


def test_tied_tensors_are_sent_once() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    model.head.weight = model.embed.weight
    source = DTensorSource(model)
    assert (set(source.specs), dict(source.aliases)) == ({"embed.weight"}, {"head.weight": "embed.weight"})
    assert len(source.tensors) == 1


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_tied"])
def test_a_transformers_model_is_its_checkpoint(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    values = load_file(save_model(kind, tmp_path) / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    source = DTensorSource(model)
    boxes = check(source, values)
    assert {name: spec.shape for name, spec in source.specs.items()} == {name: tuple(t.shape) for name, t in values.items()}
    assert {name for name, _, _ in boxes} == set(values)
    assert dict(source.aliases) == ({"lm_head.weight": "model.embed_tokens.weight"} if kind == "qwen3_tied" else {})


def test_a_conversion_of_another_library() -> None:
    def to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"experts.{i}.weight": w.t() for i, w in enumerate(state["experts"])}

    whole = torch.arange(24.0).reshape(2, 3, 4)
    source = DTensorSource({"experts": whole}, convert=to_hf)
    assert len(check(source, {f"experts.{i}.weight": whole[i].t() for i in range(2)})) == 2
    with pytest.raises(ConfigError, match=r"tensor 'x': the conversion computes it \(got aten.exp"):
        DTensorSource({"experts": whole}, convert=lambda state: {"x": state["experts"].exp()})
