"""The planner refuses by the names of settings what Megatron, vLLM and the plan itself refuse, on one period of the layers."""

from __future__ import annotations

from typing import Any

import pytest

from examples.support.launch import run_ranks
from tests.unit.test_preflight import DENSE, MOE, REFUSED, UNKNOWN, WORKS, engine, recipe

pytestmark = pytest.mark.engine

ALIKE = MOE | {"mlp_only_layers": []}


def alike(config: dict[str, Any]) -> dict[str, Any]:
    """The recipe without dense layers among its layers with experts: Megatron-Bridge builds experts in every one."""
    model = config["model"] | {"hf_config": config["model"]["hf_config"] | {"mlp_only_layers": []}}
    return config | {"model": model}


SAME = ("trainer heads", "trainer experts", "trainer expert ffn", "engine heads", "engine experts")
"""Cases of the preflight's own rules that the planner finds too, under the same name."""
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "moe": (alike(WORKS["engines of different tp"]), []),
    "kv heads repeated": (alike(WORKS["kv heads repeated on both sides"]), []),
    "dense pipeline": (WORKS["dense"], []),
    "no family that is known": (recipe(UNKNOWN), ["model.hf_config"]),
    "both sides at once": (
        recipe(ALIKE | {"moe_intermediate_size": 130, "num_experts": 12}, parallelism={"etp": 4, "ep": 8}, engines=engine(tp=4)),
        ["trainer.parallelism.ep", "trainer.parallelism.etp", "engines[0].tp"],
    ),
    "engines of one shape": (recipe(DENSE, engines=[{"tp": 16}, {}, {"tp": 16}]), ["engines[0].tp", "engines[2].tp"]),
    "a dense layer that the trainer builds with experts": (recipe(engines=[{}, {"tp": 2}]), ["model.hf_config"]),
    **{name: (alike(REFUSED[name][0]), REFUSED[name][1]) for name in SAME},
}


def planned() -> dict[str, list[str]]:
    """Name of the case -> settings that the planner refuses, all in one process."""
    from megatron_sender.config_load import parse_recipe
    from vllm_refit_ext.tools.plan_check import planned_violations

    found = {}
    for name, (config, _) in CASES.items():
        parsed, problems = parse_recipe(config)
        assert parsed is not None, problems
        found[name] = [f"{p.where}: {p.what} {p.got}" for p in planned_violations(parsed)]
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return dict(run_ranks(planned, 1, timeout=500, init_process_group=False)[0])


@pytest.mark.parametrize("name", CASES)
def test_the_planner_names_the_setting(found: dict[str, list[str]], name: str) -> None:
    where = [line.partition(":")[0] for line in found[name]]
    assert list(dict.fromkeys(where)) == CASES[name][1], found[name]
