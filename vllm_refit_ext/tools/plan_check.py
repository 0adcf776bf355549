"""Whether a recipe can work: the preflight's rules, then the real source map and the real routes on one period of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllm_refit_ext.core.coverage import unread_parts
from vllm_refit_ext.core.errors import PlanError, Problem, RefitError
from vllm_refit_ext.core.placement import concatenate
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.tools.plan_command import engine_targets, hushed

if TYPE_CHECKING:
    from megatron_sender.config import Engine, Recipe
    from megatron_sender.offline import Offered

T = TypeVar("T")
MAX_SAID = 300
"""Characters of another library's message that a problem repeats."""


def check_recipe(path: Path) -> list[Problem]:
    """Every reason why the recipe in `path` can't work, each under the setting that the user wrote; empty when it can.

    Needs Megatron and vLLM, no GPU. Takes seconds. Raises ConfigError for a file that is no recipe.
    """
    from megatron_sender.config_load import load_recipe
    from megatron_sender.preflight import find_violations

    recipe = load_recipe(path)
    problems = find_violations(recipe)
    if any(p.where.startswith("model.") for p in problems):
        return problems  # of such a model nothing can be built
    named = {p.where for p in problems}
    return problems + [p for p in planned_violations(recipe) if p.where not in named]


def planned_violations(recipe: Recipe) -> list[Problem]:
    """What Megatron, the source map, vLLM's loader and the plan refuse of `recipe`, cut to one period of its layers.

    What depends on all layers is left to `find_violations` and the plan at full size: pipeline stages, hosts and memory.
    """
    from megatron_sender.offline import trainer_placements
    from megatron_sender.one_period import one_period, with_sizes

    small = one_period(recipe)
    p = small.trainer.parallelism

    def offer(sizes: Mapping[str, int]) -> Offered:
        trainer = with_sizes(small.trainer, **sizes)
        return trainer_placements(msgspec.structs.replace(small, trainer=trainer))

    with hushed():
        offered, problems = _tried("trainer.parallelism", {"tp": p.tp, "ep": p.ep, "etp": p.etp}, offer)
        if offered is None:
            return problems
        found: dict[bytes, list[Problem]] = {}
        for index, engine in enumerate(small.engines):
            shape = msgspec.msgpack.encode((engine.tp, engine.ep, engine.dtype))
            if shape not in found:  # engines of one shape are refused alike
                found[shape] = _tried("", {"tp": engine.tp, "ep": engine.ep}, partial(_plan, small, engine, offered))[1]
            problems += [
                p if p.where.startswith("model.") else msgspec.structs.replace(p, where=f"engines[{index}]{p.where}")
                for p in found[shape]
            ]
    return list(dict.fromkeys(problems))


def _plan(recipe: Recipe, engine: Engine, offered: Offered, sizes: Mapping[str, int]) -> Plan:
    targets = concatenate(engine_targets(recipe, msgspec.structs.replace(engine, **sizes), offered.manifest))
    if problems := unread_parts(offered.manifest, targets):
        raise PlanError.of(problems)
    return build_plan(offered.manifest, offered.sources, targets)


def _tried(prefix: str, sizes: Mapping[str, int], attempt: Callable[[Mapping[str, int]], T]) -> tuple[T | None, list[Problem]]:
    """What `attempt` makes with these sizes, or with all of them 1, and what it refuses.

    A refusal goes to the setting that causes it: to `model.hf_config` if it stays with every size 1, to each size that is
    refused alone, to `prefix` if only sizes together are.
    """
    made, refused = _once(attempt, sizes)
    if made is not None:
        return made, []
    ones = dict.fromkeys(sizes, 1)
    made, always = _once(attempt, ones)
    if made is None:
        return None, _under("model.hf_config", always)
    problems = []
    for name, value in sizes.items():
        if value > 1:
            problems += _under(f"{prefix}.{name}", _once(attempt, {**ones, name: value})[1])
    return made, problems or _under(prefix, refused)


def _once(attempt: Callable[[Mapping[str, int]], T], sizes: Mapping[str, int]) -> tuple[T | None, list[Problem]]:
    try:
        return attempt(sizes), []
    except RefitError as error:
        return None, error.problems
    except Exception as error:  # noqa: BLE001 - models refuse a size by whatever their layers raise
        return None, [Problem("it can't be built", got=f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_SAID]}")]


def _under(where: str, problems: Sequence[Problem]) -> list[Problem]:
    """The problems under the name of a setting; what they were about goes into the sentence."""
    return [
        msgspec.structs.replace(p, where=where, what=f"{p.what} ({p.where})" if p.where and p.where != where else p.what)
        for p in problems
    ]
