"""Reading recipes: every mistake is found at once and named by the full path of the setting."""

import copy
from pathlib import Path

import msgspec
import pytest
import yaml

from megatron_sender.config import Recipe
from megatron_sender.config_load import check_shape, find_recipes, load_recipe, parse_recipe
from vllm_refit_ext.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    "name": "tiny",
    "model": {
        "name": "tiny",
        "hf_config": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 320,
        },
    },
    "hardware": {"device": "cpu"},
    "trainer": {"world_size": 2, "parallelism": {"tp": 2}},
    "engines": [{"tp": 1}, {"tp": 2, "quantization": {"format": "mxfp8", "ignore": ["lm_head"]}}],
    "refit": {"placement": "disaggregated", "wire": "collective"},
}


def changed(path, value):
    """A copy of GOOD with the value at the dotted `path` (numbers index lists) replaced or added."""
    data = copy.deepcopy(GOOD)
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    at = data
    for key in way:
        at = at[key]
    at[last] = value
    return data


def problems_of(data):
    recipe, problems = parse_recipe(data)
    assert (recipe is None) == bool(problems)
    return problems


def wheres(data):
    return [problem.where for problem in problems_of(data)]


def written(tmp_path, data):
    path = tmp_path / "recipe.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_the_good_one_is_good():
    assert problems_of(GOOD) == []


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("models", "models"),
        ("model.hf_confg", "model.hf_confg"),
        ("hardware.gpus_per_hosts", "hardware.gpus_per_hosts"),
        ("trainer.worldsize", "trainer.worldsize"),
        ("trainer.parallelism.tpp", "trainer.parallelism.tpp"),
        ("engines.0.quantisation", "engines[0].quantisation"),
        ("engines.1.quantization.ignored", "engines[1].quantization.ignored"),
        ("refit.bucket_byte", "refit.bucket_byte"),
    ],
)
def test_unknown_key_at_each_level(path, shown):
    (problem,) = problems_of(changed(path, 1))
    assert problem.what == "unknown setting"
    assert problem.where == shown
    nearest = {"models": "model", "hf_confg": "hf_config", "gpus_per_hosts": "gpus_per_host", "worldsize": "world_size"}
    nearest |= {"tpp": "tp", "quantisation": "quantization", "ignored": "ignore", "bucket_byte": "bucket_bytes"}
    assert f"Did you mean `{nearest[path.split('.')[-1]]}`?" in problem.do


def test_unknown_key_without_a_near_one_lists_the_known():
    (problem,) = problems_of(changed("refit.zzz", 1))
    assert problem.do.startswith("Known: placement, wire,")


def test_a_key_that_is_no_text():
    assert wheres(changed("refit", GOOD["refit"] | {7: 1})) == ["refit.7"]


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("name", "", "name"),
        ("name", None, "name"),
        ("model.hf_config", 3, "model.hf_config"),
        ("hardware.device", "gpu", "hardware.device"),
        ("hardware.compute_capability", "9", "hardware.compute_capability"),
        ("hardware.compute_capability", 9.0, "hardware.compute_capability"),
        ("hardware.gpu_memory_bytes", 0, "hardware.gpu_memory_bytes"),
        ("hardware.copy_bytes_per_second", float("inf"), "hardware.copy_bytes_per_second"),
        ("trainer.world_size", 0, "trainer.world_size"),
        ("trainer.world_size", "8", "trainer.world_size"),
        ("trainer.world_size", True, "trainer.world_size"),
        ("trainer.world_size", 1 << 80, "trainer.world_size"),
        ("trainer.parallelism.vpp", 1.5, "trainer.parallelism.vpp"),
        ("trainer.parallelism", [], "trainer.parallelism"),
        ("trainer.parallelism.pipeline_layout", [["t"], 3], "trainer.parallelism.pipeline_layout"),
        ("trainer.dtype", "bf16", "trainer.dtype"),
        ("engines", [], "engines"),
        ("engines", {"tp": 1}, "engines"),
        ("engines.1", "tp2", "engines[1]"),
        ("engines.1.quantization.format", "mxfp4", "engines[1].quantization.format"),
        ("engines.1.quantization.ignore", "lm_head", "engines[1].quantization.ignore"),
        ("engines.1.quantization.ignore", ["lm_head", 4], "engines[1].quantization.ignore[1]"),
        ("engines.0.eplb", "false", "engines[0].eplb"),
        ("engines.0.sleep_level", 3, "engines[0].sleep_level"),
        ("engines.0.gpu_memory_utilization", float("nan"), "engines[0].gpu_memory_utilization"),
        ("engines.0.gpu_memory_utilization", 1.1, "engines[0].gpu_memory_utilization"),
        ("refit.wire", "nccl", "refit.wire"),
        ("refit.deadline_s", 0, "refit.deadline_s"),
    ],
)
def test_a_value_that_does_not_fit(path, value, where):
    (problem,) = problems_of(changed(path, value))
    assert problem.where == where
    assert problem.got
    assert problem.wanted


def test_a_misspelt_value_gets_the_nearest():
    (problem,) = problems_of(changed("engines.1.quantization.format", "mxfp"))
    assert problem.do == "Did you mean `mxfp8`?"
    assert problem.wanted == "one of mxfp8"


@pytest.mark.parametrize("path", ["name", "model", "model.name", "model.hf_config", "trainer", "trainer.world_size", "engines"])
def test_a_missing_key(path):
    data = copy.deepcopy(GOOD)
    *way, last = path.split(".")
    at = data
    for key in way:
        at = at[key]
    del at[last]
    assert wheres(data) == [path]


def test_all_mistakes_are_reported_at_once():
    data = changed("refit.wire", "nccl")
    data["engines"][0]["tpp"] = 2
    data["engines"][1]["quantization"]["format"] = "fp8"
    del data["trainer"]["world_size"]
    expected = {"refit.wire", "engines[0].tpp", "engines[1].quantization.format", "trainer.world_size"}
    assert set(wheres(data)) == expected


@pytest.mark.parametrize("value", [None, 3, "text", [], [GOOD]])
def test_a_recipe_is_a_mapping(value):
    (problem,) = problems_of(value)
    assert problem.where == "the recipe"


def test_long_values_are_cut():
    (problem,) = problems_of(changed("refit.wire", "x" * 5000))
    assert len(str(problem)) < 500


def test_a_path_of_a_configuration_is_read_beside_the_recipe(tmp_path):
    (tmp_path / "model.json").write_text('{"model_type": "qwen3"}')
    recipe = load_recipe(written(tmp_path, changed("model.hf_config", "model.json")))
    assert recipe.model.hf_config == {"model_type": "qwen3"}


@pytest.mark.parametrize("content", [None, "", "[1]", "{", "nul"])
def test_a_configuration_file_that_is_missing_or_wrong(tmp_path, content):
    if content is not None:
        (tmp_path / "model.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.hf_config") as caught:
        load_recipe(written(tmp_path, changed("model.hf_config", "model.json")))
    assert len(caught.value.problems) == 1


def test_a_key_written_twice(tmp_path):
    text = yaml.safe_dump(GOOD) + "name: other\n"
    with pytest.raises(ConfigError, match="a key is written twice") as caught:
        load_recipe(written(tmp_path, text))
    assert "recipe.yaml: line" in caught.value.problems[0].where


@pytest.mark.parametrize("text", ["a: [", "\x00", "- a\nb: c", "!!python/object:os.system {}", "&a [*a]", "? [1, 2]\n: 3"])
def test_text_that_is_no_recipe(tmp_path, text):
    with pytest.raises(ConfigError):
        load_recipe(written(tmp_path, text))


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="can't be read") as caught:
        load_recipe(tmp_path / "absent.yaml")
    assert str(tmp_path) in str(caught.value)


def test_errors_of_a_file_name_the_file(tmp_path):
    path = written(tmp_path, changed("refit.wire", "nccl"))
    with pytest.raises(ConfigError, match=r"refit\.wire") as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("file", find_recipes(ROOT / "examples" / "recipes"), ids=lambda file: Path(file).stem)
def test_each_shipped_recipe_refuses_an_unknown_key_everywhere(file):
    plain = msgspec.to_builtins(load_recipe(file))
    seen = []

    def spoil(value, path):
        if isinstance(value, dict) and path != "model.hf_config":
            value["surprise"] = 1
            seen.append(f"{path}.surprise".lstrip("."))
            for key in [key for key in value if key != "surprise"]:
                spoil(value[key], f"{path}.{key}".lstrip("."))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                spoil(item, f"{path}[{i}]")

    spoil(plain, "")
    assert len(seen) >= 8
    assert sorted(problem.where for problem in check_shape(Recipe, plain)) == sorted(seen)
