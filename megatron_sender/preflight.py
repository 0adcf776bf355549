"""Everything that can't work, found before anything is allocated: all violations at once, each with the path of its setting.

Most of it is found by planning: the real source map and the real routes on one period of the model's layers, in seconds and
without a GPU (`vllm-refit plan --check`, which a process of its own runs here: a trainer's own process stays as it is). What no
plan can say stands in `preflight_rules`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_sender.config import Recipe
from megatron_sender.config_load import parse_recipe
from megatron_sender.config_model import ModelConfig, read_model
from megatron_sender.preflight_reference import PRECONDITIONS as PRECONDITIONS
from megatron_sender.preflight_reference import check_nccl_reshard_refit_support as check_nccl_reshard_refit_support
from megatron_sender.preflight_rules import hand_violations
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError

PLANNER_NEEDS = ("megatron.core", "megatron.bridge", "transformers", "vllm")
PLANNER_SAYS = (
    "sizes that Megatron or vLLM can't cut, pipeline stages, MXFP8 blocks and ignore patterns, what lies on another host, memory"
)
PLANNER_S = 600.0
"""Seconds within which the planner must answer. It takes ten to thirty, most of them for imports."""


class Violations(msgspec.Struct, frozen=True):
    """problems: every reason why a refit can't work. unchecked: what could not be looked at, and why; empty when all was."""

    problems: list[Problem]
    unchecked: list[str]


class CheckedRecipe(Recipe, frozen=True, kw_only=True):
    """A recipe that can work. unchecked: what could not be looked at where it was checked, and why; empty when all was."""

    unchecked: tuple[str, ...] = ()


def check_refit_support(config: Recipe | Mapping[str, Any], base: str | Path | None = None) -> CheckedRecipe:
    """The recipe that `config` describes, if its refit can work.

    `config` is a `Recipe` or plain nested data with the same keys. `base` is the folder that a path in `model.hf_config` is
    relative to (default: the working directory). No engine or trainer is touched, and no GPU is needed. Where Megatron or vLLM
    is not installed the rules by hand alone are looked at, and `unchecked` of the result says so.

    Raises ConfigError whose `problems` are all violations found.
    """
    found = find_violations(config, base)
    if found.problems:
        summary = f"this refit can't work: {len(found.problems)} violation(s)"
        raise ConfigError.of(found.problems, "\n".join([summary, *(f"not checked: {text}" for text in found.unchecked)]))
    recipe, _ = parse_recipe(config, None if base is None else Path(base))
    assert recipe is not None
    return CheckedRecipe(**{f: getattr(recipe, f) for f in Recipe.__struct_fields__}, unchecked=tuple(found.unchecked))


def find_violations(config: Recipe | Mapping[str, Any], base: str | Path | None = None) -> Violations:
    """Every reason why the refit that `config` describes can't work, and what could not be looked at. Arguments as above."""
    recipe, problems = parse_recipe(config, None if base is None else Path(base))
    if recipe is None:
        return Violations(problems, [])
    model, problems = model_of(recipe)
    if model is None:
        return Violations(problems, [])
    problems = hand_violations(recipe, model)
    missing = [name for name in PLANNER_NEEDS if not _installed(name)]
    if missing:
        return Violations(problems, [f"{PLANNER_SAYS}: {', '.join(missing)} not installed here"])
    return Violations(list(dict.fromkeys(problems + _planned(recipe))), [])


def model_of(recipe: Recipe) -> tuple[ModelConfig | None, list[Problem]]:
    """The sizes of the recipe's model, or what is wrong with them."""
    config = recipe.model.hf_config
    if isinstance(config, str):
        return None, [Problem("the configuration was not read in", where="model.hf_config", got=config, do="Use load_recipe.")]
    return read_model(config)


def _planned(recipe: Recipe) -> list[Problem]:
    """What the planner refuses, asked of a process of its own."""
    command = [sys.executable, "-m", "vllm_refit_ext.tools.plan_check"]
    try:
        done = subprocess.run(command, input=msgspec.json.encode(recipe), capture_output=True, timeout=PLANNER_S, check=False)
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=list[Problem])  # libraries print what they like
    except subprocess.TimeoutExpired:
        raise RefitError("the planner did not answer", where=" ".join(command), wanted=f"within {PLANNER_S:g} s") from None
    except msgspec.DecodeError:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise RefitError("the planner failed", where=" ".join(command), got=f"status {done.returncode}: {said}") from None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
