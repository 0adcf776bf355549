"""A recipe cut to one period of its model's layers: every kind of layer once, every cut as it was, planned in seconds."""

from __future__ import annotations

import math
import re
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
LAYER = re.compile(r"(?<=\blayers\.)\d+")
"""The number of a layer in a name of the checkpoint, of Megatron or of vLLM."""
MTP = "mtp."
"""What names of prediction layers have in them where these are not numbered as the decoder's are."""


def one_period(recipe: Recipe) -> Recipe:
    """The recipe of one trainer stage and one engine stage that hold the first layers of the model, as many as it takes to
    have each kind. `model.hf_config` was read in.

    Stages and replicas go: they add no shape and no cut.
    """
    config = recipe.model.hf_config
    assert isinstance(config, Mapping)
    cut = _cut(_text(config))
    model = cut if _text(config) is config else {**config, "text_config": cut}
    p = recipe.trainer.parallelism
    return msgspec.structs.replace(
        recipe,
        model=msgspec.structs.replace(recipe.model, hf_config=model),
        trainer=with_sizes(recipe.trainer, tp=p.tp, ep=p.ep, etp=p.etp),
        engines=[msgspec.structs.replace(e, count=1, pp=1) for e in recipe.engines],
    )


def with_sizes(trainer: Trainer, *, tp: int, ep: int, etp: int) -> Trainer:
    """The trainer with one pipeline stage, cut so, on as few ranks as that takes."""
    parallelism = Parallelism(tp=tp, ep=ep, etp=etp)
    return msgspec.structs.replace(trainer, world_size=math.lcm(tp, ep * etp), parallelism=parallelism)


class Layers:
    """Which layer of the period stands for each layer of the whole model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.stands = representatives(_text(config))
        self.period = 1 + max(self.stands, default=0)

    def copies(self, name: str) -> int:
        """Layers that the one which `name` names stands for; 1 for what is of no layer, and for prediction layers."""
        return len(self.full_names(name))

    def full_names(self, name: str) -> list[str]:
        """The names in the whole model for a name in the period."""
        found = None if MTP in name else LAYER.search(name)
        if found is None:
            return [name]
        if self.predicts(name):
            numbers = [int(found[0]) - self.period + len(self.stands)]
        else:
            numbers = [i for i, j in enumerate(self.stands) if j == int(found[0])]
        return [f"{name[: found.start()]}{i}{name[found.end() :]}" for i in numbers]

    def predicts(self, name: str) -> bool:
        """Whether `name`, of the checkpoint in the period, belongs to a prediction layer."""
        found = LAYER.search(name)
        return MTP in name or (found is not None and int(found[0]) >= self.period)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def period(config: Mapping[str, Any]) -> int:
    """How many of the first layers have every kind of layer; all of them where a setting about layers is not understood."""
    return 1 + max(representatives(config), default=0)


def representatives(config: Mapping[str, Any]) -> list[int]:
    """By layer, the first layer of its kind; itself where a setting about layers is not understood."""
    layers = _layers(config)
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or []
    by_layer = [config[name] for name in _by_layer(config, layers)]
    steps = [n for name, n in config.items() if name.endswith(STEPS) and type(n) is int and 1 < n <= layers]
    for name, value in config.items():
        counts = type(value) is int or (isinstance(value, list) and len(value) not in (0, layers))
        if "layer" in name and counts and name not in KNOWN and not name.endswith(STEPS):
            return list(range(layers))
    kinds = [(i < first, i in dense, *(i % n for n in steps), *(str(v[i]) for v in by_layer)) for i in range(layers)]
    return [kinds.index(kind) for kind in kinds]


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
