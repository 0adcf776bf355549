"""Everything that can't work, found before anything is allocated: all violations at once, each with the path of its setting.

These rules stand by hand because they answer where neither torch nor Megatron nor vLLM is installed, for all layers and for all
settings at once; Megatron and vLLM stop at the first. `vllm-refit plan --check` adds what their own code refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_sender.config import Recipe
from megatron_sender.config_load import parse_recipe
from megatron_sender.preflight_engine import check_engine
from megatron_sender.preflight_model import ModelShape, read_model
from megatron_sender.preflight_reach import check_reach
from megatron_sender.preflight_reference import PRECONDITIONS, Precondition, check_nccl_reshard_refit_support
from megatron_sender.preflight_refit import Memory, check_refit
from megatron_sender.preflight_refit import refit_memory as _refit_memory
from megatron_sender.preflight_trainer import check_trainer
from vllm_refit_ext.core.errors import ConfigError, Problem

__all__ = [
    "PRECONDITIONS",
    "Memory",
    "Precondition",
    "check_nccl_reshard_refit_support",
    "check_refit_support",
    "find_violations",
    "refit_memory",
]


def find_violations(config: Recipe | Mapping[str, Any], base: str | Path | None = None) -> list[Problem]:
    """Every reason why the refit that `config` describes can't work; empty when it can.

    `config` is a `Recipe` or plain nested data with the same keys. `base` is the folder that a path in `model.hf_config` is
    relative to (default: the working directory). Pure: no GPU, engine or trainer is touched.
    """
    recipe, problems = parse_recipe(config, None if base is None else Path(base))
    if recipe is None:
        return problems
    model, problems = _model(recipe)
    if model is None:
        return problems
    problems = check_trainer(recipe, model)
    for index in range(len(recipe.engines)):
        problems += check_engine(recipe, index, model)
    problems += check_refit(recipe, model)
    if not problems:
        # Who holds what is only known of sizes that divide.
        problems = check_reach(recipe, model.experts, model.kv_heads)
    return list(dict.fromkeys(problems))


def check_refit_support(config: Recipe | Mapping[str, Any], base: str | Path | None = None) -> Recipe:
    """The recipe that `config` describes, if its refit can work. Arguments as in `find_violations`.

    Raises ConfigError whose `problems` are all violations found.
    """
    problems = find_violations(config, base)
    if problems:
        raise ConfigError.of(problems, f"this refit can't work: {len(problems)} violation(s)")
    recipe, _ = parse_recipe(config, None if base is None else Path(base))
    assert recipe is not None
    return recipe


def refit_memory(recipe: Recipe) -> list[Memory]:
    """Bytes a trainer rank and a rank of each engine need at a refit, at least; the trainer first.

    Raises ConfigError for a bad model.
    """
    model, problems = _model(recipe)
    if model is None:
        raise ConfigError.of(problems)
    return _refit_memory(recipe, model)


def _model(recipe: Recipe) -> tuple[ModelShape | None, list[Problem]]:
    config = recipe.model.hf_config
    if isinstance(config, str):
        return None, [Problem("the configuration was not read in", where="model.hf_config", got=config, do="Use load_recipe.")]
    return read_model(config)
