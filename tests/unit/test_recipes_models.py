"""The matrices that the preflight derives from a configuration, and which of them an ignore pattern names."""

import json

import pytest

from megatron_sender.preflight_ignore import is_ignored
from megatron_sender.preflight_model import FAMILIES, read_model
from tools.recipe_pages import ROOT

MODELS = sorted((ROOT / "examples" / "recipes" / "models").glob("*.json"))

PUBLISHED = {
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-32b": 32.8e9,
    "qwen3-235b-a22b": 235e9,
    "deepseek-v3": 671e9,
    "nemotron-3-super": 120.6e9,
}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_size_is_the_published_one(path):
    model, problems = read_model(json.loads(path.read_text()))
    assert problems == []
    assert model.model_type in FAMILIES
    total = sum(m.elements for m in model.matrices if m.layer is None or m.layer < model.layers)
    assert total == pytest.approx(PUBLISHED[path.stem], rel=0.002)


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
