"""The shipped recipes: found, read, accepted by the real preflight, and covering what they must."""

from pathlib import Path

import msgspec
import pytest

from megatron_sender.config import Engine, Recipe
from megatron_sender.config_load import find_recipes, load_recipe, parse_recipe
from megatron_sender.config_sender import wire_name
from megatron_sender.preflight import model_of
from megatron_sender.preflight_rules import hand_violations
from vllm_refit_ext.core.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "recipes"
FILES = find_recipes(FOLDER)
RECIPES = {file.stem: load_recipe(file) for file in FILES}


def not_shard_to_shard(recipes: list[Recipe]) -> list[str]:
    """Names of the asynchronous recipes with an MXFP8 engine that do not use the shard-to-shard wire."""
    return [r.name for r in asynchronous_mxfp8(recipes) if r.refit.wire != "collective"]


def asynchronous_mxfp8(recipes: list[Recipe]) -> list[Recipe]:
    return [r for r in recipes if r.refit.placement == "disaggregated" and any(is_mxfp8(engine) for engine in r.engines)]


def is_mxfp8(engine: Engine) -> bool:
    return engine.quantization is not None and engine.quantization.format == "mxfp8"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_the_rules_by_hand(name):
    """The planner's part of the preflight is asked in tests/engine/test_plan_check."""
    recipe = RECIPES[name]
    model, problems = model_of(recipe)
    assert problems == []
    assert hand_violations(recipe, model) == []
    assert recipe.name == name
    assert recipe.summary
    assert parse_recipe(msgspec.to_builtins(recipe)) == (recipe, [])


def test_every_file_in_the_folder_is_a_recipe_or_used_by_one():
    used = {
        Path(line.split(":", 1)[1].strip()) for file in FILES for line in file.read_text().splitlines() if "hf_config:" in line
    }
    assert {path.relative_to(FOLDER) for path in FOLDER.rglob("*.json")} == used


def test_asynchronous_mxfp8_recipes_use_the_shard_to_shard_wire():
    recipes = list(RECIPES.values())
    assert len(asynchronous_mxfp8(recipes)) >= 7
    assert not_shard_to_shard(recipes) == []


def test_a_recipe_on_another_wire_is_seen_whatever_its_name():
    recipe = RECIPES["qwen3-30b-a3b-mxfp8-async"]
    other = msgspec.structs.replace(recipe, name="sync-bf16", refit=msgspec.structs.replace(recipe.refit, wire="shm"))
    assert not_shard_to_shard([recipe, other]) == ["sync-bf16"]


def test_who_quantises_is_as_in_the_reference():
    """Synchronous Qwen3 recipes quantise in the trainer, where the reference does too; on a wire from shard to shard it has the
    receiver quantise. One more recipe shows prequantised bytes on such a wire."""
    prequantized = {recipe.name for recipe in RECIPES.values() if recipe.refit.prequantize}
    colocated = [r for r in RECIPES.values() if r.refit.placement == "colocated"]
    synchronous = {r.name for r in colocated if r.model.name.startswith("Qwen/Qwen3-")}
    assert len(synchronous) == 4
    assert prequantized == synchronous | {"qwen3-30b-a3b-mxfp8-ep8-to-tp2-ep2"}


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize(
    "model",
    ["Qwen3-30B-A3B", "Qwen3-32B", "Qwen3-235B-A22B", "DeepSeek-V3", "Nemotron-3-Super"],
)
def test_every_model_has_a_recipe_of_each_placement(model, placement):
    assert [
        r.name
        for r in RECIPES.values()
        if model in r.model.name and r.refit.placement == placement and all(is_mxfp8(engine) for engine in r.engines)
    ]


@pytest.mark.parametrize("ep", [1, 2])
def test_ep8_to_tp2_with_and_without_expert_parallelism(ep):
    assert [
        r.name
        for r in RECIPES.values()
        if r.trainer.parallelism.ep == 8 and r.trainer.world_size == 8 and [(e.tp, e.ep) for e in r.engines] == [(2, ep)]
    ]


def test_no_recipe_found_is_an_error(tmp_path):
    (tmp_path / "README.md").write_text("no recipe")
    (tmp_path / "models.json").write_text("{}")
    with pytest.raises(ConfigError, match="no recipe found"):
        find_recipes(tmp_path)
    with pytest.raises(ConfigError, match="no recipe found"):
        find_recipes(tmp_path / "absent")


def test_recipes_are_found_under_both_endings(tmp_path):
    for name in ("b.yml", "a.yaml", "c.yamlx", "d.json"):
        (tmp_path / name).write_text("")
    assert [path.name for path in find_recipes(tmp_path)] == ["a.yaml", "b.yml"]


@pytest.mark.parametrize("name", [name for name, r in RECIPES.items() if r.refit.placement == "colocated"])
def test_colocated_recipes_use_the_wire_that_reaches(name):
    """On one host direct reads; over several the wire that reads memory of another host."""
    recipe = RECIPES[name]
    wanted = "nixl" if recipe.trainer.world_size > recipe.hardware.gpus_per_host else "ipc"
    assert wire_name(recipe.refit) == wanted
