"""What can't be described exactly is refused by name, all at once; memory that moved is noticed.

The models are real ones, each broken in one way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support import source_faults

pytestmark = pytest.mark.engine

LAYERS = [f"chunk0.decoder.layers.{layer}" for layer in range(2)]
REFUSED: dict[str, list[str]] = {
    "unknown_mapping_class": [
        "ConfigError: 2 tensor(s)",
        *(f"{layer}.self_attention.linear_proj.weight: its mapping class" for layer in LAYERS),
        "HalvingMapping is unknown",
    ],
    "computed_mapping_class": ["ConfigError", "chunk0.decoder.final_layernorm.weight", "adds one to every element"],
    "no_mapping": ["ConfigError: 2 tensor(s)", *(f"{layer}.mlp.router.weight: the bridge has no mapping" for layer in LAYERS)],
    "new_parameter_and_buffer": ["ConfigError: 2 tensor(s)", "chunk0.decoder.extra", "chunk0.decoder.table"],
    "name_not_in_checkpoint": ["ConfigError", "chunk0.decoder.final_layernorm.weight", "no tensor 'model.nrom.weight'"],
    "other_shape_than_checkpoint": [
        "ConfigError: 2 tensor(s)",
        "another shape of 'model.layers.0.post_attention_layernorm.weight'",
        "(got (64,); wanted (128,))",
        f"{LAYERS[0]}.self_attention.linear_qkv.weight: its rows don't fit",
    ],
    "quantised_and_strided": ["ConfigError: 2 tensor(s)", "torch.float8_e4m3fn", "linear_qkv.weight: it is not contiguous"],
    "adapter": ["ConfigError: 2 tensor(s)", "linear_proj.adapter.weight", "Merge the adapters"],
    "export_that_computes": ["ConfigError", "changes weights after the mappings made them"],
    "two_parameters_for_one_name": [
        "ConfigError: 2 tensor(s)",
        f"{LAYERS[1]}.self_attention.k_layernorm.weight: it is mapped to the same part of",
        "'model.layers.1.self_attn.q_norm.weight' as " + f"{LAYERS[1]}.self_attention.q_layernorm.weight",
    ],
    "no_chunks": ["ConfigError", "no model chunks"],
    "moved": ["WireError: 1 tensor(s)", "chunk0.decoder.final_layernorm.weight: its memory moved"],
    "replaced_parameter": ["WireError: 1 tensor(s)", "chunk0.decoder.final_layernorm.weight: its memory moved"],
    "given_back": ["WireError: 1 tensor(s)", "chunk0.decoder.final_layernorm.weight: its memory was given back"],
    "cast": ["WireError: 1 tensor(s)", "its shape or dtype changed", "bfloat16", "float32"],
}
ALLOWED = {
    "moved_then_refreshed": "(['chunk0.decoder.final_layernorm.weight'], True, True)",
    "one_module_and_a_given_rank": "({5}, 69)",
    "without_a_checkpoint": "(True, None)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("moe"), seed=5)


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    """Each fault in a process of its own, since a fault changes classes that later ones would see."""
    names = [*REFUSED, *ALLOWED]
    return {name: run_ranks(source_faults.run_faults, 1, str(folder), [name], timeout=120)[0][0] for name in names}


@pytest.mark.parametrize("fault", REFUSED)
def test_it_is_refused_by_name(fault: str, said: dict[str, str]) -> None:
    missing = [piece for piece in REFUSED[fault] if piece not in said[fault]]
    assert not missing, said[fault]


@pytest.mark.parametrize("case", ALLOWED)
def test_it_is_allowed(case: str, said: dict[str, str]) -> None:
    assert said[case] == ALLOWED[case]


def test_a_mapping_that_forgets_the_split_is_refused_on_every_rank(folder: Path) -> None:
    for (text,) in run_ranks(source_faults.run_faults, 2, str(folder), ["replicated_by_mistake"], timeout=120):
        assert "linear_proj.weight: its mapping ReplicatedMapping and Megatron's own mark disagree" in text
        assert "got replicated; wanted split along dimension 1" in text


def test_a_router_bias_that_was_cast_is_sent_as_float32(tmp_path: Any) -> None:
    latent = save_model("deepseek_v3", tmp_path, seed=5)
    assert run_ranks(source_faults.run_faults, 1, str(latent), ["cast_router_bias"], timeout=120) == [
        ["({'float32'}, {'bfloat16'})"]
    ]
