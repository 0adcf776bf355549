"""From a recipe to the report of its plan: both sides made without a GPU, then intersected engine by engine."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.hosts import distances
from vllm_refit_ext.core.manifest import Manifest, whole_tensors
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.tools.plan_report import PlanReport, Tally, grouped
from vllm_refit_ext.tools.plan_traffic import direct, hosts_of, published

if TYPE_CHECKING:
    from megatron_sender.config import Engine, Recipe
    from vllm_refit_ext.receiver.routes.table import Routes

ROWS_AT_ONCE = 1 << 19
"""Target rows that are planned together. Engines of one shape are alike, and the trainer's side is then sorted less often."""


Progress = Callable[[str], None]
"""Told what is done next."""


def plan_recipe(path: Path, progress: Progress = lambda what: None) -> PlanReport:
    """The plan of the recipe in `path` at full size. Needs Megatron and vLLM, no GPU. Raises ConfigError, PlanError,
    RouteError.
    """
    from megatron_sender.config_load import load_recipe
    from megatron_sender.offline import trainer_placements
    from vllm_refit_ext.tools.plan_check import violations

    recipe = load_recipe(path)
    progress("looking at one period of the layers")
    if problems := violations(recipe):
        raise ConfigError.of(problems, f"this refit can't work: {len(problems)} violation(s)")
    with hushed():
        progress("building the trainer's stages without storage")
        offered = trainer_placements(recipe)
        return report(recipe, offered.manifest, offered.sources, progress)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """What vLLM and Megatron have to say about a machine without a GPU is no news here, and standard output is the report's."""
    from vllm_refit_ext.core.stand_ins import quiet

    with quiet(logging.ERROR), contextlib.redirect_stdout(sys.stderr):
        yield


def report(recipe: Recipe, manifest: Manifest, sources: Placements, progress: Progress = lambda what: None) -> PlanReport:
    """The report for trainer ranks that hold `sources`."""
    from megatron_sender.config_sender import wire_name
    from vllm_refit_ext.tools.plan_quantised import quantised

    ranks = sum(e.count * e.dp * e.tp * e.pp for e in recipe.engines)
    tally = Tally(recipe.trainer.world_size, ranks)
    h, place, wire = recipe.hardware, _gpus(recipe, ranks), wire_name(recipe.refit)
    hosts = hosts_of(place, h.gpus_per_host)
    away = distances(hosts.trainers, dict(enumerate(hosts.engines)))
    first, read, alike = 0, set[str](), list[tuple[int, int]]()
    dropped: dict[str, str] = {}
    for e, engine in enumerate(recipe.engines):
        progress(f"recording vLLM's loader for each rank of engines[{e}]")
        routes = engine_routes_of(recipe, engine, manifest)
        computed = {name: why for r in routes for name, why in r.computed.items()}
        held = quantised(recipe, engine, routes)
        tables = [targets_of(r, manifest) for r in routes]
        path_of = functools.partial(_path, computed=computed, held=held, recipe=recipe, engine=engine)
        coded = held if recipe.refit.prequantize else _nothing
        alike += [(e, r) for _ in range(engine.count) for r in range(len(tables))]
        left, together = engine.count, max(1, ROWS_AT_ONCE // max(1, sum(map(len, tables))))
        while left:
            now = min(left, together)
            progress(f"planning from engine rank {first} on, of {ranks}")
            places = [table.as_rank(first + i) for i, table in enumerate(tables * now)]
            plan = build_plan(manifest, sources, concatenate(places), away)
            tally.add(plan, path_of, coded)
            read |= {plan.names[t] for t in np.unique(plan.tensor)}
            first, left = first + len(places), left - now
        for r in routes:
            dropped |= r.dropped
    for why, names in grouped({n: dropped.get(n, "no engine reads it") for n in manifest.tensors if n not in read}).items():
        tally.note("goes nowhere", why, names)
    traffic, taken = direct(tally.bytes, place, h.gpus_per_host), published(tally.bytes, place, h.gpus_per_host, alike)
    speeds = [h.copy_bytes_per_second, h.host_bytes_per_second, h.network_bytes_per_second]
    return tally.report(recipe.name, recipe.model.name, wire, traffic, taken, speeds)


def _gpus(recipe: Recipe, engines: int) -> tuple[Sequence[int], Sequence[int]]:
    """GPUs of both sides: the same in turn when colocated, engines on hosts of their own when not."""
    trainers = recipe.trainer.world_size
    if recipe.refit.placement == "colocated":
        return range(trainers), range(engines)
    per_host = recipe.hardware.gpus_per_host
    behind = -(-trainers // per_host) * per_host
    return range(trainers), range(behind, behind + engines)


def engine_routes_of(recipe: Recipe, engine: Engine, manifest: Manifest) -> list[Routes]:
    """Routes of each rank of one engine. Data parallel copies of a model without experts are alike."""
    from megatron_sender.preflight import model_of
    from vllm_refit_ext.engine.offline import engine_routes

    e, config = engine, recipe.model.hf_config
    model, _ = model_of(recipe)
    if e.dp > 1 and model is not None and not model.experts:
        return engine_routes_of(recipe, msgspec.structs.replace(e, dp=1), manifest) * e.dp
    entries = {name: (spec.shape, spec.dtype) for name, spec in manifest.tensors.items()}
    return [
        engine_routes(config, entries, tp=e.tp, ep=e.ep > 1, pp=e.pp, dp=e.dp, rank=rank, dtype=e.dtype)
        for rank in range(e.tp * e.pp * e.dp)
    ]


def targets_of(routes: Routes, manifest: Manifest) -> Placements:
    """A rank's boxes; what its loader computes is needed whole."""
    names = [name for name in routes.computed if name in manifest.tensors]
    if not names:
        return routes.placements
    whole = whole_tensors(Manifest({name: manifest.tensors[name] for name in names}))
    return concatenate([routes.placements, whole])


def _path(name: str, computed: dict[str, str], held: Callable[[str], bool], recipe: Recipe, engine: Engine) -> tuple[str, str]:
    if name in computed:
        return "the engine's own reload", next(iter(grouped({name: computed[name]})))
    if held(name):
        if recipe.refit.prequantize:
            return "is sent as MXFP8", "the engine holds it as MXFP8 and the sender quantises"
        return "quantised by the writer", "the engine holds it as MXFP8"
    if recipe.trainer.dtype != engine.dtype:
        return "copied, cast on the way", f"{recipe.trainer.dtype} in the trainer, {engine.dtype} in the engine"
    return "copied", f"{engine.dtype} on both sides"


def _nothing(name: str) -> bool:
    return False
