"""The rules that stand by hand; neither torch nor Megatron nor vLLM is needed. The planner has tests/engine/test_plan_check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_sender import preflight
from megatron_sender.config_load import parse_recipe
from megatron_sender.preflight import check_refit_support, find_violations, model_of
from megatron_sender.preflight_rules import hand_violations
from tests.support.preflight_cases import BY_HAND, BY_PLAN, BY_SHAPE, MOE, WORKS, recipe
from vllm_refit_ext.core.errors import ConfigError, Problem


def by_hand(config: dict[str, Any]) -> list[Problem]:
    parsed, problems = parse_recipe(config)
    assert parsed is not None, problems
    model, problems = model_of(parsed)
    return problems if model is None else hand_violations(parsed, model)


@pytest.fixture
def no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PLANNER_NEEDS", ("megatron_that_is_not_installed",))


@pytest.mark.parametrize("name", [*WORKS, *BY_PLAN])
def test_what_the_rules_do_not_refuse(name: str) -> None:
    config = WORKS[name] if name in WORKS else BY_PLAN[name][0]
    assert [str(p) for p in by_hand(config)] == []


@pytest.mark.parametrize("name", [*BY_HAND, *BY_SHAPE])
def test_what_can_not_work_is_refused_by_the_name_of_the_setting(name: str) -> None:
    config, where = (BY_HAND | BY_SHAPE)[name]
    problems = by_hand(config)
    assert [p.where for p in problems] == where
    for p in problems:
        assert p.got or "lacks" in p.what or "missing" in p.what
        assert p.wanted or p.do


def test_all_violations_come_at_once(no_planner: None) -> None:
    config = recipe(
        MOE,
        trainer={"world_size": 12, "fp8_storage": "delayed"},
        parallelism={"tp": 5, "etp": 3},
        engines=[{"tp": 3, "eplb": True}, {"ep": 2, "draft": "mtp"}],
        refit={"mode": "direct", "prequantize": True},
    )
    with pytest.raises(ConfigError, match="not checked: sizes that Megatron") as caught:
        check_refit_support(config)
    assert {p.where for p in caught.value.problems} == {
        "trainer.world_size",
        "trainer.fp8_storage",
        "engines[0].eplb",
        "engines[1].ep",
        "engines[1].draft",
        "refit.mode",
        "refit.prequantize",
    }


def test_what_could_not_be_checked_is_said(no_planner: None) -> None:
    checked = check_refit_support(recipe())
    assert checked.name == "tiny"
    (said,) = checked.unchecked
    assert "memory" in said
    assert said.endswith("megatron_that_is_not_installed not installed here")


def test_problems_of_shape_come_before_problems_of_sense() -> None:
    config = recipe(parallelism={"tp": 3}) | {"surprise": 1}
    assert [p.where for p in find_violations(config).problems] == ["surprise"]


def test_a_path_is_relative_to_base(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    config = recipe("model.json")
    assert "can't be read" in find_violations(config).problems[0].what
    assert {p.where for p in find_violations(config, tmp_path).problems} >= {"model.hf_config.model_type"}


def test_a_planner_that_dies_is_no_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.sys, "executable", "/bin/false")
    monkeypatch.setattr(preflight, "PLANNER_NEEDS", ())
    with pytest.raises(preflight.RefitError, match="the planner failed"):
        check_refit_support(recipe())


def test_the_preflight_needs_neither_torch_nor_vllm_nor_megatron() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'megatron', 'triton', 'transformers'): sys.modules[name] = None\n"
        "import megatron_sender.preflight, vllm_refit_ext.tools.doctor\n"
        "from tests.support.preflight_cases import recipe\n"
        "assert 'vllm' in megatron_sender.preflight.check_refit_support(recipe()).unchecked[0]\n"
        "assert vllm_refit_ext.tools.doctor.run()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
