"""Cuts of fused attention projections. Megatron interleaves them by query group; checkpoints hold q, k and v apart."""

from __future__ import annotations

from typing import Any

from megatron_sender.source_part import Cut, Part, row_cuts, window
from vllm_refit_ext.core.errors import ConfigError


def _head_size(config: Any) -> int:
    return int(config.kv_channels or config.hidden_size // config.num_attention_heads)


def _query_groups(part: Part, q: str, k: str, v: str, base: tuple[int, int, int] = (0, 0, 0)) -> list[tuple[str, int, int]]:
    """Packed sections of Megatron's fused QKV: for each query group its query heads, its gates if it has them, its k, its v.

    `base` is where q, k and v begin in their tensors. With an output gate a query head of the checkpoint is [query; gate].
    """
    config, size = part.config, _head_size(part.config)
    groups = config.num_query_groups
    per_group = config.num_attention_heads // groups
    gated = bool(getattr(config, "attention_output_gate", False))
    head_rows = 2 * size if gated else size
    sections: list[tuple[str, int, int]] = []
    for group in range(groups):
        for shift in (0, size) if gated else (0,):
            heads = range(group * per_group, (group + 1) * per_group)
            sections += [(q, base[0] + head * head_rows + shift, size) for head in heads]
        sections += [(k, base[1] + group * size, size), (v, base[2] + group * size, size)]
    return sections


def _attention_rows(part: Part) -> tuple[int, int]:
    """Rows of the checkpoint's query projection (gates included) and of its key or value projection."""
    config, size = part.config, _head_size(part.config)
    gated = bool(getattr(config, "attention_output_gate", False))
    return config.num_attention_heads * size * (2 if gated else 1), config.num_query_groups * size


def qkv(part: Part) -> list[Cut]:
    q, k, v = (part.mapping.hf_param[key] for key in "qkv")
    query, key = _attention_rows(part)
    return row_cuts(part, {q: query, k: key, v: key}, window(part, _query_groups(part, q, k, v)))


def qkv_one_tensor(part: Part) -> list[Cut]:
    name = str(part.mapping.hf_param)
    query, key = _attention_rows(part)
    sections = _query_groups(part, name, name, name, (0, query, query + key))
    return row_cuts(part, {name: query + 2 * key}, window(part, sections))


def qkv_gate(part: Part) -> list[Cut]:
    if getattr(part.config, "attention_output_gate", False):
        raise ConfigError(
            "its mapping QKVGMapping spreads a gate row of the checkpoint over a whole head: a computation, not a move",
            do="Send this model through the bridge's export instead.",
        )
    q, k, v, g = (part.mapping.hf_param[key] for key in "qkvg")
    query, key = _attention_rows(part)
    heads = part.config.num_attention_heads
    sections = [*_query_groups(part, q, k, v), (g, 0, heads)]
    return row_cuts(part, {q: query, k: key, v: key, g: heads}, window(part, sections))


def kv(part: Part) -> list[Cut]:
    k, v = (part.mapping.hf_param[key] for key in "kv")
    size, groups = _head_size(part.config), part.config.num_query_groups
    sections = [(name, group * size, size) for group in range(groups) for name in (k, v)]
    return row_cuts(part, {k: groups * size, v: groups * size}, window(part, sections))
