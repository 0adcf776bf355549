"""Why a checkpoint tensor is not used on this rank, why a parameter may stay as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from vllm_refit_ext.receiver.routes.created import Created

KV_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point")
"""Placeholders of attention layers: they keep their defaults until a checkpoint with KV scales offers them. No kernel reads the
zero points, which compressed-tensors has beside them."""

LOADED_BUFFERS = ("bias",)
"""Endings of buffers that checkpoints hold (router biases). Other buffers are constants of the model's construction."""


def may_stay_unwritten(name: str, meta: torch.Tensor, created: Created, count: int, untouched: bool) -> str:
    """Why `count` elements of a parameter need no checkpoint tensor; empty if they do."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in KV_SCALES:
        return "placeholder for a KV cache scale that no checkpoint tensor offers"
    loaded = name in created.persistent and leaf.endswith(LOADED_BUFFERS) and not _of_the_processor(created, name)
    if name in created.buffers and not loaded:
        return "buffer computed when the model is built" if untouched else ""
    if count == meta.numel() - int(getattr(meta, "weight_loader_numel", meta.numel())):
        return "padding that the layer declares"
    return ""


def _of_the_processor(created: Created, name: str) -> bool:
    """Whether a buffer holds means and deviations of the image processor, which no checkpoint has."""
    return type(created.slots[name][0]).__module__.endswith(".mm_input_norm")


def why_dropped(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """A reason for each name of which the loader puts nothing on this rank."""
    if not names:
        return {}
    first, last = _stage(model)
    absent = _absent_experts(model)
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    return {name: _why(name, first, last, absent, tied) for name in names}


def _why(name: str, first: int, last: int, absent: set[int], tied: bool) -> str:
    expert = re.search(r"\bexperts\.(\d+)\.", name)
    layer = re.search(r"\blayers\.(\d+)\.", name)
    if layer and not first <= int(layer[1]) < last:
        return f"layer {layer[1]} is not among this rank's layers {first}..{last - 1}"
    if expert and int(expert[1]) in absent:
        return f"expert {expert[1]} belongs to another expert-parallel rank"
    if tied and "lm_head" in name:
        return "tied to the embedding"
    if "rotary_emb" in name or name.endswith("inv_freq"):
        return "rotary tables are computed when the model is built"
    return "the loader passes over it"


def _stage(model: nn.Module) -> tuple[int, int]:
    """The range of decoder layers that this pipeline rank holds."""
    for module in model.modules():
        first, last = getattr(module, "start_layer", None), getattr(module, "end_layer", None)
        if isinstance(first, int) and isinstance(last, int):
            return first, last
    return 0, 1 << 62


def _absent_experts(model: nn.Module) -> set[int]:
    """Experts that some layer's expert map puts on another rank."""
    for module in model.modules():
        table = module._buffers.get("_expert_map", module.__dict__.get("_expert_map"))
        if isinstance(table, torch.Tensor) and not table.is_meta:
            return {i for i, local in enumerate(table.tolist()) if local < 0}
    return set()
