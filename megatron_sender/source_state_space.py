"""Cuts of state-space layers: Mamba's and the gated delta net's projections and convolutions.

Each rank holds its own share of every section, one after another, so its shards can't be joined end to end.
"""

from __future__ import annotations

from megatron_sender.source_part import Cut, Part, Run, row_cuts, section_cuts


def mamba_in(part: Part) -> list[Cut]:
    config, name = part.config, str(part.mapping.hf_param)
    inner = config.mamba_num_heads * config.mamba_head_dim // part.ranks
    states = config.mamba_state_dim * config.mamba_num_groups // part.ranks
    rows = (inner, inner, states, states, config.mamba_num_heads // part.ranks)
    return section_cuts(part, [(name, count) for count in rows])


def convolution(part: Part) -> list[Cut]:
    """Depth-wise convolutions of state-space layers: the mapping itself lists its local sections."""
    name = str(part.mapping.hf_param)
    return section_cuts(part, [(name, len(rows)) for rows in part.mapping.get_shard_idx(part.config, local_tp=True)])


def _delta_net_rows(part: Part) -> tuple[int, int, int, int]:
    """(key heads here, rows a key head has in q or k, in v or z, in b or a) of a gated delta net's input projection."""
    config = part.config
    values = config.linear_num_value_heads // config.linear_num_key_heads
    heads = config.linear_num_key_heads // part.ranks
    return heads, config.linear_key_head_dim, values * config.linear_value_head_dim, values


def delta_net_grouped(part: Part) -> list[Cut]:
    """The checkpoint groups by key head: [q k v z] and [b a]. Megatron holds all heads' q, then all heads' k, and so on."""
    heads, key, value, scalar = _delta_net_rows(part)
    sizes: dict[str, int] = {}
    runs: list[Run] = []
    at = 0
    for name, widths in (
        (part.mapping.hf_param["qkvz"], (key, key, value, value)),
        (part.mapping.hf_param["ba"], (scalar, scalar)),
    ):
        group = sum(widths)
        sizes[name] = group * heads * part.ranks
        shift = 0
        for width in widths:
            for head in range(heads):
                runs.append((name, (heads * part.rank + head) * group + shift, at, width))
                at += width
            shift += width
    return row_cuts(part, sizes, runs)


def delta_net_flat(part: Part) -> list[Cut]:
    heads, key, value, scalar = _delta_net_rows(part)
    names = part.mapping.hf_param
    widths = (
        (names["qkv"], key),
        (names["qkv"], key),
        (names["qkv"], value),
        (names["z"], value),
        (names["b"], scalar),
        (names["a"], scalar),
    )
    return section_cuts(part, [(name, heads * width) for name, width in widths])
