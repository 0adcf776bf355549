"""A recipe cut to one period of its layers keeps every kind of layer and every cut."""

import json
from pathlib import Path

import pytest

from megatron_sender.config_load import find_recipes, load_recipe
from megatron_sender.one_period import Layers, one_period, period

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted((ROOT / "examples" / "recipes" / "models").glob("*.json"))
CASES = {
    "equal layers": ({"num_hidden_layers": 48}, 1),
    "one dense layer first": ({"num_hidden_layers": 61, "first_k_dense_replace": 3, "moe_layer_freq": 1}, 4),
    "every second has experts": ({"num_hidden_layers": 24, "decoder_sparse_step": 2}, 2),
    "named dense layers": ({"num_hidden_layers": 24, "mlp_only_layers": [0, 2]}, 2),
    "letters": ({"num_hidden_layers": 6, "hybrid_override_pattern": "MEM*EM"}, 4),
    "a list of kinds": ({"num_hidden_layers": 6, "layer_types": ["s", "s", "f", "s", "s", "f"]}, 3),
    "every fourth attends to all": ({"num_hidden_layers": 12, "full_attention_interval": 4}, 4),
    "text as long as the layers are many": ({"num_hidden_layers": 9, "model_type": "qwen3_moe"}, 1),
    "a setting about layers that is not known": ({"num_hidden_layers": 12, "num_kv_shared_layers": 4}, 12),
    "layer numbers that are not known": ({"num_hidden_layers": 12, "attn_layer_indices": [3, 7]}, 12),
}


@pytest.mark.parametrize("name", CASES)
def test_the_period_has_every_kind_of_layer(name):
    config, layers = CASES[name]
    assert period(config) == layers


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_shipped_models_are_cut_to_a_few_layers(path):
    assert period(json.loads(path.read_text())) <= 8


@pytest.mark.parametrize("path", find_recipes(ROOT / "examples" / "recipes"), ids=lambda path: path.stem)
def test_the_cuts_stay(path):
    recipe = load_recipe(path)
    small = one_period(recipe)
    was, now = recipe.trainer.parallelism, small.trainer.parallelism
    assert (now.tp, now.ep, now.etp, now.pp) == (was.tp, was.ep, was.etp, 1)
    assert small.trainer.world_size % (now.tp * now.cp) == small.trainer.world_size % (now.ep * now.etp) == 0
    assert [(e.tp, e.dtype, e.ep > 1) for e in small.engines] == [(e.tp, e.dtype, e.ep > 1) for e in recipe.engines]
    config = small.model.hf_config
    assert config == {**recipe.model.hf_config, **config}
    if "hybrid_override_pattern" in config:
        assert len(config["hybrid_override_pattern"]) == config["num_hidden_layers"]


def test_names_of_the_period_stand_for_names_of_the_model():
    layers = Layers({"num_hidden_layers": 6, "first_k_dense_replace": 1})
    assert layers.period == 2
    assert layers.full_names("model.layers.0.mlp") == ["model.layers.0.mlp"]
    assert layers.full_names("model.layers.1.mlp") == [f"model.layers.{i}.mlp" for i in range(1, 6)]
    assert layers.full_names("model.layers.2.mlp") == ["model.layers.6.mlp"], "a prediction layer comes after all others"
    assert layers.full_names("mtp.layers.0.mixer") == ["mtp.layers.0.mixer"]
    assert layers.full_names("lm_head") == ["lm_head"]
    assert [layers.predicts(f"model.layers.{i}.mlp") for i in range(3)] == [False, False, True]
    assert layers.copies("chunk0.decoder.layers.1.mlp.linear_fc1.weight") == 5
    letters = Layers({"num_hidden_layers": 4, "hybrid_override_pattern": "MEME"})
    assert letters.full_names("backbone.layers.0.norm") == ["backbone.layers.0.norm", "backbone.layers.2.norm"]
