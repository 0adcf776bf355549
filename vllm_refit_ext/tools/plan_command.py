"""From a recipe to the report of its plan: both sides made without a GPU, then intersected engine by engine."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.hosts import distances
from vllm_refit_ext.core.manifest import Manifest, whole_tensors
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.tools.plan_report import PlanReport, Tally, grouped, sent_bytes
from vllm_refit_ext.tools.plan_traffic import Traffic, direct, forwarded, hosts_of, merged, relayed

if TYPE_CHECKING:
    from megatron_sender.config import Engine, Recipe
    from vllm_refit_ext.receiver.routes.table import Routes

ROWS_AT_ONCE = 1 << 19
"""Target rows that are planned together. Engines of one shape are alike, and the trainer's side is then sorted less often."""


def plan_recipe(path: Path) -> PlanReport:
    """The plan of the recipe in `path` at full size. Needs Megatron and vLLM, no GPU. Raises ConfigError, PlanError,
    RouteError.
    """
    from megatron_sender.config_load import load_recipe
    from megatron_sender.offline import trainer_placements
    from megatron_sender.preflight import check_refit_support

    recipe = check_refit_support(load_recipe(path))
    with hushed():
        offered = trainer_placements(recipe)
        return report(recipe, offered.manifest, offered.sources)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """What vLLM and Megatron have to say about a machine without a GPU is no news here, and standard output is the report's."""
    from vllm_refit_ext.core.stand_ins import quiet

    with quiet(logging.ERROR), contextlib.redirect_stdout(sys.stderr):
        yield


def report(recipe: Recipe, manifest: Manifest, sources: Placements) -> PlanReport:
    """The report for trainer ranks that hold `sources`."""
    from megatron_sender.config_sender import wire_name

    sizes = [e.tp * e.pp for e in recipe.engines for _ in range(e.count * e.dp)]
    tally = Tally(recipe.trainer.world_size, sum(sizes))
    h, place, wire = recipe.hardware, _gpus(recipe, sum(sizes)), wire_name(recipe.refit)
    hosts = hosts_of(place, h.gpus_per_host)
    away = distances(hosts.trainers, dict(enumerate(hosts.engines)))
    parts: list[Traffic] = []
    first, read = 0, set[str]()
    dropped: dict[str, str] = {}
    for index, engine in enumerate(recipe.engines):
        if engine.dp > 1 and engine.ep > 1:
            do = "plan it on the running engine, whose own ranks record"
            raise ConfigError(
                "expert parallelism over data parallel ranks can't be planned offline",
                where=f"engines[{index}].dp",
                got=engine.dp,
                do=do,
            )
        routes = _routes(recipe, engine, manifest)
        computed = {name: why for r in routes for name, why in r.computed.items()}
        held = _quantised(recipe, engine)
        tables = [_targets(r, manifest) for r in routes]
        path_of = functools.partial(_path, computed=computed, held=held, recipe=recipe, engine=engine)
        coded = held if recipe.refit.prequantize else _nothing
        left, together = engine.count * engine.dp, max(1, ROWS_AT_ONCE // max(1, sum(map(len, tables))))
        together = -(-together // (whole := max(1, h.gpus_per_host // len(tables)))) * whole  # hosts are planned whole
        while left:
            now = min(left, together)
            places = [table.as_rank(first + i) for i, table in enumerate(tables * now)]
            plan = build_plan(manifest, sources, concatenate(places), away)
            tally.add(plan, path_of, coded)
            if wire == "collective":
                bucket, bytes_of = recipe.refit.bucket_bytes, functools.partial(sent_bytes, coded=coded)
                parts.append(forwarded(plan, hosts, place, h.gpus_per_host, bucket, bytes_of))
            read |= {plan.names[t] for t in np.unique(plan.tensor)}
            first, left = first + len(places), left - now
        for r in routes:
            dropped |= r.dropped
    for why, names in grouped({n: dropped.get(n, "no engine reads it") for n in manifest.tensors if n not in read}).items():
        tally.note("goes nowhere", why, names)
    if parts:
        traffic = merged(parts)
    elif wire == "ring":
        traffic = relayed(tally.edges(), hosts, place, h.gpus_per_host)
    else:
        traffic = direct(tally.bytes, place, h.gpus_per_host)
    speeds = [h.copy_bytes_per_second, h.host_bytes_per_second, h.network_bytes_per_second]
    return tally.report(recipe.name, recipe.model.name, wire, traffic, speeds)


def _gpus(recipe: Recipe, engines: int) -> tuple[Sequence[int], Sequence[int]]:
    """GPUs of both sides: the same in turn when colocated, engines on hosts of their own when not."""
    trainers = recipe.trainer.world_size
    if recipe.refit.placement == "colocated":
        return range(trainers), range(engines)
    per_host = recipe.hardware.gpus_per_host
    behind = -(-trainers // per_host) * per_host
    return range(trainers), range(behind, behind + engines)


def _routes(recipe: Recipe, engine: Engine, manifest: Manifest) -> list[Routes]:
    """Routes of each rank of one engine; engines of one shape share them."""
    from vllm_refit_ext.engine.offline import engine_routes

    entries = {name: (spec.shape, spec.dtype) for name, spec in manifest.tensors.items()}
    return [
        engine_routes(
            recipe.model.hf_config, entries, tp=engine.tp, ep=engine.ep > 1, pp=engine.pp, rank=rank, dtype=engine.dtype
        )
        for rank in range(engine.tp * engine.pp)
    ]


def engine_targets(recipe: Recipe, engine: Engine, manifest: Manifest) -> list[Placements]:
    """What each rank of one engine needs."""
    return [_targets(routes, manifest).as_rank(rank) for rank, routes in enumerate(_routes(recipe, engine, manifest))]


def _targets(routes: Routes, manifest: Manifest) -> Placements:
    """A rank's boxes; what its loader computes is needed whole."""
    names = [name for name in routes.computed if name in manifest.tensors]
    if not names:
        return routes.placements
    whole = whole_tensors(Manifest({name: manifest.tensors[name] for name in names}))
    return concatenate([routes.placements, whole])


def _quantised(recipe: Recipe, engine: Engine) -> Callable[[str], bool]:
    """name -> whether the engine holds it as MXFP8."""
    from megatron_sender.preflight_engine import quantized
    from megatron_sender.preflight_model import read_model

    shape, _ = read_model(recipe.model.hf_config)  # type: ignore[arg-type]
    matrices = quantized(engine, shape) if shape is not None else []
    modules = {m.module for m in matrices} | {m.name for m in matrices}

    def held(name: str) -> bool:
        module = name.removesuffix(".weight")
        experts = module.partition(".experts.")
        return module in modules or bool(experts[1] and f"{experts[0]}.experts" in modules)

    return held


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
