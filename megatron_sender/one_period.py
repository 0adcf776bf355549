"""A recipe cut to one period of its model's layers: every kind of layer once, every cut as it was, planned in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_sender.config import Parallelism, Recipe, Trainer

STEPS = ("_step", "_freq", "_interval", "_period", "_pattern")
"""How settings end that say which layers are of a kind: every how many, or one letter a layer."""
KNOWN = frozenset(
    {"num_hidden_layers", "num_nextn_predict_layers", "first_k_dense_replace", "mlp_only_layers", "max_window_layers"}
)
"""Settings that number or count layers and are understood here."""


def one_period(recipe: Recipe) -> Recipe:
    """The recipe of one trainer stage and one engine stage that hold the first layers of the model, as many as it takes to
    have each kind. `model.hf_config` was read in.

    Stages, replicas and data parallel ranks go: they add no shape and no cut. An engine that shares experts over data parallel
    ranks too shares them over its tensor parallel ranks.
    """
    config = recipe.model.hf_config
    assert isinstance(config, Mapping)
    nested = config.get("text_config")
    cut = _cut(nested if isinstance(nested, Mapping) else config)
    model = {**config, "text_config": cut} if isinstance(nested, Mapping) else cut
    p = recipe.trainer.parallelism
    return msgspec.structs.replace(
        recipe,
        model=msgspec.structs.replace(recipe.model, hf_config=model),
        trainer=with_sizes(recipe.trainer, tp=p.tp, ep=p.ep, etp=p.etp),
        engines=[msgspec.structs.replace(e, count=1, pp=1, dp=1, ep=e.tp if e.ep > 1 else 1) for e in recipe.engines],
    )


def with_sizes(trainer: Trainer, *, tp: int, ep: int, etp: int) -> Trainer:
    """The trainer with one pipeline stage, cut so, on as few ranks as that takes."""
    parallelism = Parallelism(tp=tp, ep=ep, etp=etp)
    return msgspec.structs.replace(trainer, world_size=math.lcm(tp, ep * etp), parallelism=parallelism)


def period(config: Mapping[str, Any]) -> int:
    """How many of the first layers have every kind of layer; all of them where a setting about layers is not understood."""
    layers = _layers(config)
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or []
    by_layer = [config[name] for name in _by_layer(config, layers)]
    steps = [n for name, n in config.items() if name.endswith(STEPS) and type(n) is int and 1 < n <= layers]
    for name, value in config.items():
        counts = type(value) is int or (isinstance(value, list) and len(value) not in (0, layers))
        if "layer" in name and counts and name not in KNOWN and not name.endswith(STEPS):
            return layers
    kinds = [(i < first, i in dense, *(i % n for n in steps), *(str(v[i]) for v in by_layer)) for i in range(layers)]
    return 1 + max((kinds.index(kind) for kind in kinds), default=0)


def _layers(config: Mapping[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or len(config["hybrid_override_pattern"]))


def _by_layer(config: Mapping[str, Any], layers: int) -> list[str]:
    """Settings with one entry a layer: lists, and the letters of a pattern."""
    lists = {n: v for n, v in config.items() if isinstance(v, list) or (isinstance(v, str) and n.endswith("_pattern"))}
    return [name for name, value in lists.items() if name not in KNOWN and len(value) == layers]


def _cut(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, keep = _layers(config), period(config)
    cut = {**config, "num_hidden_layers": keep}
    cut |= {name: config[name][:keep] for name in _by_layer(config, layers)}
    if "mlp_only_layers" in config:
        cut["mlp_only_layers"] = [i for i in config["mlp_only_layers"] or [] if i < keep]
    return cut
