"""The preflight's planner: the real source map and the real routes on one period of a recipe's layers, and what they refuse.

`python -m vllm_refit_ext.tools.plan_check` reads a recipe as JSON and writes the problems as JSON, on the last line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vllm_refit_ext.core.coverage import unread_parts
from vllm_refit_ext.core.errors import PlanError, Problem, RefitError
from vllm_refit_ext.core.placement import concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.tools.plan_command import engine_routes_of, hushed, targets_of
from vllm_refit_ext.tools.plan_quantised import block_violations, modules_of, pattern_violations

if TYPE_CHECKING:
    from megatron_sender.config import Engine, Recipe
    from megatron_sender.offline import Offered
    from vllm_refit_ext.engine.offline_modules import WorkerModules
    from vllm_refit_ext.receiver.routes.table import Routes

T = TypeVar("T")
MAX_SAID = 300
"""Characters of another library's message that a problem repeats."""
MAX_NAMED = 4
"""Tensors that are named where a setting makes many of them impossible."""


def violations(recipe: Recipe) -> list[Problem]:
    """Every reason why the recipe can't work, each under the setting that the user wrote; empty when it can.

    Needs Megatron and vLLM, no GPU. Takes seconds.
    """
    from megatron_sender.preflight import model_of
    from megatron_sender.preflight_rules import hand_violations

    model, problems = model_of(recipe)
    return problems if model is None else list(dict.fromkeys(hand_violations(recipe, model) + planned_violations(recipe)))


def planned_violations(recipe: Recipe) -> list[Problem]:
    """What Megatron, the source map, vLLM's loader and the plan refuse of `recipe`, cut to one period of its layers."""
    from megatron_sender.offline import trainer_placements, with_defaults
    from megatron_sender.one_period import Layers, one_period, with_sizes
    from megatron_sender.preflight import model_of
    from megatron_sender.stages import stage_violations
    from vllm_refit_ext.tools.plan_limits import host_violations, memory_violations

    with hushed():
        recipe, problems = with_defaults(recipe)
        model, _ = model_of(recipe)
        if problems or model is None:
            return problems
        small, layers = one_period(recipe), Layers(recipe.model.hf_config)  # type: ignore[arg-type]
        p = small.trainer.parallelism

        def offer(sizes: Mapping[str, int]) -> Offered:
            trainer = with_sizes(small.trainer, **sizes)
            return trainer_placements(msgspec.structs.replace(small, trainer=trainer))

        offered, whole, problems = _tried("trainer.parallelism.", {"tp": p.tp, "ep": p.ep, "etp": p.etp}, offer)
        problems += stage_violations(recipe.trainer.parallelism, model.layers, model.num_nextn_predict_layers or 0)
        if offered is None:
            return problems
        found: dict[bytes, tuple[list[Problem], list[Routes]]] = {}
        for index, engine in enumerate(small.engines):
            kind = _kind(engine)
            if kind not in found:  # engines of one kind are refused alike
                mine, routes = _engine(small, engine, offered)
                if engine.quantization is not None and routes:
                    mine += pattern_violations(small, engine, offered, layers)
                    if whole and len(routes) == engine.tp * engine.dp:
                        mine += block_violations(small, engine, offered, routes[0], layers)
                found[kind] = mine, routes
            for x in found[kind][0]:
                at = x.where if x.where.startswith(("model.", "trainer.")) else f"engines[{index}].{x.where}".rstrip(".")
                problems.append(msgspec.structs.replace(x, where=at))
        problems = list(dict.fromkeys(problems))
        if not problems:  # what lies where, and how much, is only known of sizes that divide
            tables = [[targets_of(r, offered.manifest) for r in found[_kind(e)][1]] for e in small.engines]
            problems = host_violations(recipe, offered, tables) + memory_violations(recipe, small, offered, layers, tables)
    return problems


def _kind(engine: Engine) -> bytes:
    return msgspec.msgpack.encode((engine.tp, engine.dp, engine.ep, engine.dtype, engine.quantization))


def _engine(recipe: Recipe, engine: Engine, offered: Offered) -> tuple[list[Problem], list[Routes]]:
    """What vLLM or the plan refuses of one engine, under names below the engine's, and the routes of its ranks."""

    def routes(sizes: Mapping[str, int]) -> list[Routes]:
        return engine_routes_of(recipe, msgspec.structs.replace(engine, **sizes), offered.manifest)

    def build(sizes: Mapping[str, int]) -> WorkerModules:
        return modules_of(recipe, msgspec.structs.replace(engine, **sizes))

    sizes = {"tp": engine.tp, "dp": engine.dp, "ep": engine.ep}
    built, whole, problems = _tried("", sizes, build)
    if built is None:
        return problems, []
    made, _, refused_too = _tried("", sizes if whole else dict.fromkeys(sizes, 1), routes)
    problems += refused_too
    refused = _once(partial(_plan, offered, made))[1] if made is not None else []
    return problems + _under("model.hf_config", refused), made or []


def _plan(offered: Offered, routes: Sequence[Routes]) -> None:
    joined = concatenate([targets_of(r, offered.manifest).as_rank(rank) for rank, r in enumerate(routes)])
    if problems := unread_parts(offered.manifest, joined):
        raise PlanError.of(problems)
    build_plan(offered.manifest, offered.sources, joined)


def _tried(
    prefix: str, sizes: Mapping[str, int], attempt: Callable[[Mapping[str, int]], T]
) -> tuple[T | None, bool, list[Problem]]:
    """What `attempt` makes with these sizes, or with all of them 1; whether it was these; and what it refuses.

    A refusal goes to the setting that causes it: to `model.hf_config` if it stays with every size 1, to each size that is
    refused alone, else to the first that is refused together with those before it.
    """
    made, _ = _once(partial(attempt, sizes))
    if made is not None:
        return made, True, []
    ones = dict.fromkeys(sizes, 1)
    made, always = _once(partial(attempt, ones))
    if made is None:
        return None, False, _under("model.hf_config", always)
    problems = []
    for name, value in sizes.items():
        if value > 1:
            problems += _under(f"{prefix}{name}", _once(partial(attempt, {**ones, name: value}))[1])
    together = dict(ones)
    for name, value in sizes.items():
        together[name] = value
        if not problems:
            problems += _under(f"{prefix}{name}", _once(partial(attempt, together))[1])
    return made, False, problems


def _once(attempt: Callable[[], T]) -> tuple[T | None, list[Problem]]:
    try:
        return attempt(), []
    except RefitError as error:
        return None, error.problems
    except Exception as error:  # noqa: BLE001 - models refuse a size by whatever their layers raise
        return None, [Problem("it can't be built", got=f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_SAID]}")]


def _under(where: str, problems: Sequence[Problem]) -> list[Problem]:
    """The problems under the name of a setting; what they were about goes into the sentence. Of many tensors a few are named."""
    under = [
        msgspec.structs.replace(p, where=where, what=f"{p.what} ({p.where})" if p.where and p.where != where else p.what)
        for p in problems[:MAX_NAMED]
    ]
    more = len(problems) - MAX_NAMED
    return under + ([Problem(f"{more} more such problems, of other tensors", where=where)] if more > 0 else [])


def main() -> None:
    """Recipe in, problems out, as JSON."""
    from megatron_sender.config import Recipe

    recipe = msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(planned_violations(recipe)))


if __name__ == "__main__":
    main()
