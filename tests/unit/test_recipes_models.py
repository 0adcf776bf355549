"""The matrices that the preflight derives from a configuration, held against the models that transformers builds from it."""

import itertools
import json

import pytest

from megatron_sender.config_docs import ROOT
from megatron_sender.preflight_ignore import is_ignored
from megatron_sender.preflight_model import FAMILIES, read_model

MODELS = sorted((ROOT / "examples" / "recipes" / "models").glob("*.json"))

PUBLISHED = {
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-32b": 32.8e9,
    "qwen3-235b-a22b": 235e9,
    "deepseek-v3": 671e9,
    "nemotron-3-super": 120.6e9,
}


def meta_model(config):
    import torch
    import transformers

    built = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_size_is_the_published_one(path):
    model, problems = read_model(json.loads(path.read_text()))
    assert problems == []
    assert model.model_type in FAMILIES
    total = sum(m.elements for m in model.matrices if m.layer is None or m.layer < model.layers)
    assert total == pytest.approx(PUBLISHED[path.stem], rel=0.002)


@pytest.mark.engine
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_matrices_are_those_of_the_transformers_model(path):
    config = json.loads(path.read_text())
    shape, _ = read_model(config)
    real = meta_model(config)
    mine = {m.name: (m.rows, m.columns) for m in shape.matrices if m.layer is None or m.layer < shape.layers}
    # transformers calls Nemotron-H's stack "model", its checkpoints call it "backbone".
    if shape.model_type == "nemotron_h":
        mine = {name.replace("backbone.", "model."): size for name, size in mine.items()}
    theirs = {name.removesuffix(".weight"): tuple(p.shape) for name, p in real.named_parameters() if p.ndim == 2}
    experts = {name: size for name, size in mine.items() if ".experts.0." in name}
    assert {name: size for name, size in mine.items() if name not in experts} == theirs
    # transformers stacks the experts of a layer; the elements are the same.
    stacked = sum(p.numel() for name, p in real.named_parameters() if p.ndim == 3 and "experts" in name)
    assert sum(m.elements for m in shape.matrices if ".experts.0." in m.name and m.layer < shape.layers) == stacked


@pytest.mark.engine
def test_nemotron_pattern_survives_transformers():
    import transformers

    config = json.loads((ROOT / "examples/recipes/models/nemotron-3-super.json").read_text())
    built = transformers.AutoConfig.for_model(**config)
    assert built.hybrid_override_pattern == config["hybrid_override_pattern"]
    assert built.num_hidden_layers == 88


PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
L1 = "model.layers.1"
NAMES = (
    "lm_head",
    f"{L1}.mlp.gate",
    f"{L1}.mlp.gate_up_proj",
    f"{L1}.mlp.down_proj",
    "model.layers.10.mlp.down_proj",
    f"{L1}.self_attn.qkv_proj",
    f"{L1}.self_attn.o_proj",
    f"{L1}.mlp.experts",
    f"{L1}.mlp.shared_experts.gate_up_proj",
    f"{L1}.mlp.shared_experts.down_proj",
)


def shards(name):
    """The checkpoint's names of the parts of `name`."""
    head, _, last = name.rpartition(".")
    if last == "experts":
        return [f"{name}.0.gate_proj", f"{name}.0.up_proj", f"{name}.0.down_proj"]
    return [f"{head}.{part}" for part in PACKED.get(last, [last])] if head else [name]


@pytest.mark.parametrize(
    ("name", "patterns", "expected"),
    [
        ("lm_head", ["lm_head"], True),
        (f"{L1}.mlp.gate", ["*mlp.gate"], True),
        (f"{L1}.mlp.gate_up_proj", ["*mlp.gate"], False),
        (f"{L1}.mlp.gate_up_proj", ["mlp.gate"], True),
        ("model.layers.10.mlp.down_proj", ["model.layers.1.mlp*"], False),
        (f"{L1}.mlp.down_proj", ["model.layers.1.mlp*"], True),
        (f"{L1}.self_attn.qkv_proj", ["*self_attn*"], True),
        (f"{L1}.self_attn.qkv_proj", ["*.q_proj", "*.k_proj", "*.v_proj"], False),
        (f"{L1}.self_attn.qkv_proj", [f"{L1}.self_attn.{part}" for part in PACKED["qkv_proj"]], True),
        (f"{L1}.self_attn.qkv_proj", [f"{L1}.self_attn.q_proj"], None),
        (f"{L1}.mlp.experts", [f"{L1}.mlp.experts.0.up_proj"], True),
        (f"{L1}.mlp.experts", ["*shared_experts*"], False),
        (f"{L1}.mlp.down_proj", ["", "other"], False),
        (f"{L1}.mlp.down_proj", [], False),
    ],
)
def test_ignore_patterns(name, patterns, expected):
    assert is_ignored(name, shards(name), patterns) is expected


@pytest.mark.engine
def test_ignore_patterns_mean_what_vllm_means():
    """The same names and patterns, alone and in pairs, asked of vLLM's own ModelOpt configuration."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
    from vllm.model_executor.models.utils import WeightsMapper

    patterns = [
        "*mlp.gate",
        "mlp.gate",
        "*self_attn*",
        "model.layers.1*",
        "model.layers.1.*",
        "lm_head",
        "*shared_experts*",
        "*o_proj",
    ]
    patterns += ["*q_proj", "*.down_proj", "*gate_proj", "experts", f"{L1}.mlp.experts.0.up_proj"]
    patterns += [shard for name in NAMES for shard in shards(name)[:2]]

    def vllm_says(name, chosen):
        config = ModelOptMxFp8Config(True, None, list(chosen))
        config.packed_modules_mapping = PACKED
        config.apply_vllm_mapper(WeightsMapper())
        try:
            return config.is_layer_excluded(name)
        except ValueError:
            return None

    for chosen in [*itertools.combinations(patterns, 1), *itertools.combinations(patterns, 2)]:
        for name in NAMES:
            assert vllm_says(name, chosen) == is_ignored(name, shards(name), chosen), (name, chosen)
