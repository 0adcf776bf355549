"""Everything that is refused, by the planner and by hand: all of it in one list, under the names of the settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.support.launch import run_ranks
from megatron_sender.config_load import find_recipes, load_recipe, parse_recipe
from tests.support.preflight_cases import BY_HAND, BY_PLAN, WORKS, engine, recipe

pytestmark = pytest.mark.engine

RECIPES = find_recipes(Path(__file__).resolve().parents[2] / "examples" / "recipes")
SHIPPED = {path.stem: path for path in RECIPES if "qwen3" in path.stem}
LARGE = {path.stem: path for path in RECIPES if path.stem not in SHIPPED}
"""Five to ten seconds each, quiet: ranks of TP16 and more with hundreds of experts."""
STAGES: list[tuple[dict[str, Any], int, list[list[int]]]] = [
    ({"pp": 2}, 4, [[0, 1], [2, 3]]),
    ({"pp": 2, "vpp": 2}, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ({"pp": 3, "first_stage_layers": 1, "last_stage_layers": 2}, 5, [[0], [1, 2], [3, 4]]),
    ({"pp": 2, "embedding_counts_as_layer": True}, 5, [[0, 1], [2, 3, 4]]),
    ({"pp": 2, "vpp": 2, "embedding_counts_as_layer": True, "loss_counts_as_layer": True}, 6, [[0, 3, 4], [1, 2, 5]]),
    ({"pp": 2, "pipeline_layout": "Et|tt|t|mL"}, 4, [[0, 3], [1, 2]]),
    ({"pp": 2, "pipeline_layout": [["embedding", "decoder"], ["decoder", "loss"]]}, 2, [[0], [1]]),
]
TOGETHER = (
    "world and tp",
    "deep gemm without gates",
    "fp16 with marlin",
    "prequantise for engines that differ",
    "caches while asleep",
)
"""Of the rules by hand, which tests/unit/test_preflight.py goes through: some that the planner must have nothing to add to."""
CASES = {name: (config, []) for name, config in WORKS.items()} | {name: BY_HAND[name] for name in TOGETHER} | BY_PLAN


def every() -> dict[str, list[str]]:
    """Name of the case or recipe -> what is refused, all in one process."""
    from vllm_refit_ext.tools.plan_check import violations

    found = {}
    for name, (config, _) in CASES.items():
        parsed, problems = parse_recipe(config)
        assert parsed is not None, problems
        found[name] = [str(p) for p in violations(parsed)]
    for name, path in SHIPPED.items():
        whole = load_recipe(path)
        found[name] = [str(p) for p in violations(whole)]
        if whole.refit.placement == "colocated" and "30b" in name:
            for wire, mode in (("ipc", "direct"), ("shm", None)):
                refit = msgspec.structs.replace(whole.refit, wire=wire, mode=mode)
                found[f"{name} {wire}"] = [str(p) for p in violations(msgspec.structs.replace(whole, refit=refit))]
    return found | {"30b": memory(), "stages": stages()}


def stages() -> list[str]:
    """The layers of each rank of STAGES."""
    from megatron_sender.config import Parallelism
    from megatron_sender.stages import stage_layers

    return [str(stage_layers(Parallelism(**p), layers, 1)) for p, layers, _ in STAGES]


def memory() -> list[str]:
    """What Qwen3-30B-A3B takes, of a GPU that has one megabyte."""
    from vllm_refit_ext.tools.plan_check import violations

    whole = load_recipe(SHIPPED["qwen3-30b-a3b-mxfp8-async"])
    hardware = msgspec.structs.replace(whole.hardware, gpu_memory_bytes=1 << 20)
    return [p.got for p in violations(msgspec.structs.replace(whole, hardware=hardware))]


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return dict(run_ranks(every, 1, timeout=280, init_process_group=False)[0])


@pytest.mark.parametrize("name", CASES)
def test_each_violation_is_under_the_name_of_its_setting(found: dict[str, list[str]], name: str) -> None:
    assert list(dict.fromkeys(line.partition(": ")[0] for line in found[name])) == CASES[name][1], found[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_work(found: dict[str, list[str]], name: str) -> None:
    assert found[name] == []


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_large_shipped_recipes_work(name: str) -> None:
    assert run_ranks(one, 1, str(LARGE[name]), timeout=280, init_process_group=False)[0] == []


def one(path: str) -> list[str]:
    """What is refused of a shipped recipe."""
    from vllm_refit_ext.tools.plan_check import violations

    return [str(p) for p in violations(load_recipe(path))]


def test_over_hosts_a_shipped_recipe_needs_the_wire_that_reaches(found: dict[str, list[str]]) -> None:
    refused = {
        name: [line.partition(": ")[0] for line in lines]
        for name, lines in found.items()
        if name.startswith("qwen3") and name.endswith((" ipc", " shm"))
    }
    assert refused == {
        "qwen3-30b-a3b-mxfp8-colocated ipc": ["refit.wire"],
        "qwen3-30b-a3b-mxfp8-colocated shm": ["refit.wire"],
        "qwen3-30b-a3b-mxfp8-colocated-h200 ipc": [],
        "qwen3-30b-a3b-mxfp8-colocated-h200 shm": [],
    }


def test_stages_are_megatrons(found: dict[str, list[str]]) -> None:
    assert found["stages"] == [str(held) for _, _, held in STAGES]


def test_memory_of_30b_is_the_arithmetic(found: dict[str, list[str]]) -> None:
    trainer, held = (int(re.findall(r"\d+", text)[which]) for text, which in zip(found["30b"], (0, -1), strict=True))
    experts = 48 * 128 * 3 * 768 * 2048
    attention = 48 * (2048 * 4096 * 2 + 2048 * 512 * 2)
    router, ends, norms = 48 * 128 * 2048, 2 * 151936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    rest = attention + router + ends + norms
    bucket = load_recipe(SHIPPED["qwen3-30b-a3b-mxfp8-async"]).refit.bucket_bytes
    assert trainer == 2 * (experts // 8 + rest) + 2 * bucket
    assert held == experts * 33 // 32 + 2 * rest


def test_the_entry_asks_the_planner_in_a_process_of_its_own() -> None:
    """Where nothing of a trainer on a CPU was installed before, unlike in the processes that `run_ranks` forks."""
    from megatron_sender.preflight import find_violations

    found = find_violations(recipe(engines=engine(tp=16), refit={"mode": "direct"}))
    assert [p.where for p in found.problems] == ["refit.mode", "engines[0].tp"]
    assert found.unchecked == []
