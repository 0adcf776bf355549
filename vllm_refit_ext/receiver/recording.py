"""The routes of a manifest on one rank, with what is sent as MXFP8 offered to the loader in the form that it takes."""

from __future__ import annotations

import msgspec

from vllm_refit_ext.core.manifest import Manifest
from vllm_refit_ext.receiver.engine import Engine
from vllm_refit_ext.receiver.routes.table import Routes

CODES = "float8_e4m3fn"


class Recording(msgspec.Struct):
    """It stays good while the same manifest is planned anew.

    `routes`: where the loader puts each tensor; sent scales are not in it. `partners`: HF name -> the name of its
    sent scales. `rerouted`: names that the loader takes as E4M3 only. `usual`: the engine's dtype.
    """

    routes: Routes
    partners: dict[str, str]
    rerouted: frozenset[str]
    usual: str


def record(view: Engine, manifest: Manifest, rank: int) -> Recording:
    """Run the model's own loader on `manifest` without data; again where a loader takes E4M3 and is offered something else.

    What was found last is kept: a trainer that quantises asks first what to quantise, and then offers the same tensors with their
    scales, and one that prepares again offers what it did. `rank` is this rank's number in the plan. Raises RouteError with every
    tensor that the engine's loaders refuse.
    """
    partners = {name: spec.scale for name, spec in manifest.tensors.items() if spec.format == "mxfp8"}
    scales = set(partners.values())
    usual = view.dtype
    entries = {
        name: (spec.shape, usual if name in partners else spec.dtype)
        for name, spec in manifest.tensors.items()
        if name not in scales
    }

    def routes_of(coded: frozenset[str]) -> Routes:
        offered = {name: (shape, CODES if name in coded else dtype) for name, (shape, dtype) in entries.items()}
        return view.record(offered, rank)

    model = view.model
    live = [(name, t.data_ptr(), t.shape, t.dtype) for name, t in (*model.named_parameters(), *model.named_buffers())]
    asked = rank, list(entries.items()), live
    if view.recorded is not None and view.recorded[0] == asked:
        return Recording(view.recorded[1], partners, view.recorded[2], usual)
    routes = routes_of(frozenset())
    rerouted: frozenset[str] = frozenset()
    if routes.computed and view.has_mxfp8:
        computed = frozenset(routes.computed)
        rerouted = computed - frozenset(routes_of(computed).computed)
        routes = routes_of(rerouted) if rerouted else routes
    view.recorded = asked, routes, rerouted
    return Recording(routes, partners, rerouted, usual)
