"""Every mapping class of the bridge that is known, at random sizes, in a real tensor-parallel group.

The oracle is the class's own `hf_to_megatron`: it makes the local tensor from checkpoint tensors. Reading that tensor through
the cuts must give the checkpoint tensors back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_sender.source_cuts import cuts_of
from megatron_sender.source_part import Part


@dataclass
class Trial:
    """A mapping, the checkpoint's tensors for it, and the shape of this rank's module."""

    mapping: Any
    weights: dict[str, torch.Tensor]
    shape: tuple[int, ...]
    module: str = "ColumnParallelLinear"
    attribute: str = "weight"
    config: Any = field(default_factory=SimpleNamespace)
    stacked: bool = False


def check_mappings(seed: int) -> list[str]:
    """Problems found over all mapping classes, at sizes drawn from `seed` (the same on every rank)."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=dist.get_world_size()
    )
    torch.manual_seed(seed)
    wrong: list[str] = []
    for trial in trials(random.Random(seed), dist.get_world_size()):
        wrong += [f"{type(trial.mapping).__name__}: {line}" for line in _check(trial)]
    return wrong


def trials(draw: random.Random, ranks: int) -> Iterator[Trial]:
    yield from _plain(draw, ranks)
    yield from _attention(draw, ranks)
    yield from _state_space(draw, ranks)
    yield from _experts(draw, ranks)


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _plain(draw: random.Random, ranks: int) -> Iterator[Trial]:
    from megatron.bridge.models.conversion import param_mapping as pm

    rows, columns = draw.randint(1, 5), draw.randint(1, 5)
    full, half = rows * ranks, _weight(rows * ranks, columns)
    yield Trial(pm.ColumnParallelMapping("m.weight", "hf"), {"hf": half}, (rows, columns))
    yield Trial(pm.AutoMapping("m.weight", "hf"), {"hf": half}, (rows, columns), "VocabParallelEmbedding")
    yield Trial(pm.AutoMapping("m.bias", "hf"), {"hf": _weight(full)}, (rows,), attribute="bias")
    yield Trial(pm.RowParallelMapping("m.weight", "hf"), {"hf": _weight(7, full)}, (7, rows), "RowParallelLinear")
    yield Trial(pm.AutoMapping("m.weight", "hf"), {"hf": _weight(7, full)}, (7, rows), "TERowParallelLinear")
    yield Trial(pm.AutoMapping("m.bias", "hf"), {"hf": _weight(full)}, (full,), "RowParallelLinear", "bias")
    yield Trial(pm.ReplicatedMapping("m.weight", "hf"), {"hf": half}, (full, columns), "TopKRouter")
    yield Trial(pm.AutoMapping("m.weight", "hf"), {"hf": _weight(full)}, (full,), "RMSNorm")
    yield Trial(pm.DirectMapping("m.weight", "hf"), {"hf": half}, (full, columns), "Anything")
    yield Trial(pm.AutoMapping("m.weight", "hf", (1, 0)), {"hf": _weight(columns, full)}, (rows, columns))
    yield Trial(pm.AutoMapping("m.weight", "hf", (1, 0)), {"hf": _weight(full, 6)}, (6, rows), "RowParallelLinear")
    gate, up = _weight(full, columns), _weight(full, columns)
    yield Trial(pm.GatedMLPMapping("m.weight", "gate", "up"), {"gate": gate, "up": up}, (2 * rows, columns))
    yield Trial(pm.GatedMLPMapping("m.bias", "gate", "up"), {"gate": gate[:, 0], "up": up[:, 0]}, (2 * rows,), attribute="bias")


def _attention(draw: random.Random, ranks: int) -> Iterator[Trial]:
    from megatron.bridge.models.conversion import param_mapping as pm

    # Fewer groups than ranks cut through a group; a head of 4 rows lets a cut fall inside a head as well.
    groups, per_group, size = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), 4
    heads, hidden = groups * per_group, draw.choice([8, 12])
    for gated in (False, True):
        config = SimpleNamespace(
            num_attention_heads=heads, num_query_groups=groups, kv_channels=size, hidden_size=hidden, attention_output_gate=gated
        )
        query, key = heads * size * (2 if gated else 1), groups * size
        rows, odd = divmod(query + 2 * key, ranks)
        if odd:
            continue
        weights = {"q": _weight(query, hidden), "k": _weight(key, hidden), "v": _weight(key, hidden)}
        biases = {name: weight[:, 0].contiguous() for name, weight in weights.items()}
        yield Trial(pm.QKVMapping("m.weight", **{n: n for n in "qkv"}), weights, (rows, hidden), config=config)
        yield Trial(pm.QKVMapping("m.bias", **{n: n for n in "qkv"}), biases, (rows,), attribute="bias", config=config)
        if not gated:
            one = {"hf": torch.cat(list(weights.values()))}
            yield Trial(pm.ConcatenatedQKVMapping("m.weight", "hf"), one, (rows, hidden), config=config)
            if (heads + query + 2 * key) % ranks == 0:
                with_gate = {**weights, "g": _weight(heads, hidden)}
                local = ((heads + query + 2 * key) // ranks, hidden)
                yield Trial(pm.QKVGMapping("m.weight", **{n: n for n in "qkvg"}), with_gate, local, config=config)
            if 2 * key % ranks == 0:
                pair = {"k": weights["k"], "v": weights["v"]}
                yield Trial(pm.KVMapping("m.weight", k="k", v="v"), pair, (2 * key // ranks, hidden), config=config)


def _state_space(draw: random.Random, ranks: int) -> Iterator[Trial]:
    from megatron.bridge.models.conversion import param_mapping as pm

    per_rank = draw.randint(1, 3)
    mamba = SimpleNamespace(
        hidden_size=5,
        mamba_num_heads=per_rank * ranks,
        mamba_head_dim=draw.randint(2, 4),
        mamba_state_dim=3,
        mamba_num_groups=ranks,
    )
    inner, states = mamba.mamba_num_heads * mamba.mamba_head_dim, mamba.mamba_state_dim * mamba.mamba_num_groups
    rows = 2 * inner + 2 * states + mamba.mamba_num_heads
    yield Trial(pm.MambaInProjMapping("m.weight", "hf"), {"hf": _weight(rows, 5)}, (rows // ranks, 5), config=mamba)
    rows = inner + 2 * states
    yield Trial(
        pm.MambaConv1dMapping("m.weight", "hf"), {"hf": _weight(rows, 1, 4)}, (rows // ranks, 1, 4), "Conv1d", config=mamba
    )
    yield Trial(pm.MambaConv1dMapping("m.bias", "hf"), {"hf": _weight(rows)}, (rows // ranks,), "Conv1d", "bias", config=mamba)
    values = draw.randint(1, 3)
    net = SimpleNamespace(
        hidden_size=5,
        linear_key_head_dim=draw.randint(2, 4),
        linear_value_head_dim=draw.randint(2, 4),
        linear_num_key_heads=per_rank * ranks,
        linear_num_value_heads=per_rank * ranks * values,
    )
    key = net.linear_key_head_dim * net.linear_num_key_heads
    value, scalars = net.linear_value_head_dim * net.linear_num_value_heads, net.linear_num_value_heads
    rows = 2 * key + value
    yield Trial(pm.GDNConv1dMapping("m.weight", "hf"), {"hf": _weight(rows, 1, 4)}, (rows // ranks, 1, 4), "Conv1d", config=net)
    local = ((2 * key + 2 * value + 2 * scalars) // ranks, 5)
    grouped = {"qkvz": _weight(2 * key + 2 * value, 5), "ba": _weight(2 * scalars, 5)}
    yield Trial(pm.GDNLinearMapping("m.weight", "qkvz", "ba"), grouped, local, config=net)
    flat = {"qkv": _weight(rows, 5), "z": _weight(value, 5), "b": _weight(scalars, 5), "a": _weight(scalars, 5)}
    yield Trial(pm.GDNLinearMappingSeparate("m.weight", "qkv", "z", "b", "a"), flat, local, config=net)


def _experts(draw: random.Random, ranks: int) -> Iterator[Trial]:
    from megatron.bridge.models.conversion import param_mapping as pm

    count, rows, columns = draw.randint(2, 4), draw.randint(1, 4), 5
    expert = draw.randrange(count)
    config = SimpleNamespace(num_moe_experts=count)
    up, down = f"m.experts.linear_fc1.weight{expert}", f"m.experts.linear_fc2.weight{expert}"
    settings: dict[str, Any] = {"config": config, "stacked": True, "attribute": "weight0"}
    fused = _weight(count, 2 * rows * ranks, columns)
    yield Trial(
        pm.FusedGatedExpertMapping(up, "hf"), {"hf": fused}, (2 * rows, columns), "TEColumnParallelGroupedLinear", **settings
    )
    full = _weight(count, columns, rows * ranks)
    yield Trial(pm.FusedExpertMapping(down, "hf"), {"hf": full}, (columns, rows), "TERowParallelGroupedLinear", **settings)
    if rows * ranks not in (columns, 2 * columns):
        turned = fused.transpose(1, 2).contiguous()
        mapping = pm.FusedGatedExpertMapping(up, "hf", transpose_on_export=True)
        yield Trial(mapping, {"hf": turned}, (2 * rows, columns), "TEColumnParallelGroupedLinear", **settings)
        mapping = pm.FusedExpertMapping(down, "hf", transpose_on_export=True)
        yield Trial(mapping, {"hf": full.transpose(1, 2).contiguous()}, (columns, rows), "TERowParallelGroupedLinear", **settings)
    single = {"hf": full[expert]}
    yield Trial(pm.AutoMapping(down, "hf"), single, (columns, rows), "TERowParallelGroupedLinear", "weight0", config)


def _check(trial: Trial) -> list[str]:
    module = type(trial.module, (torch.nn.Module,), {})()
    setattr(module, trial.attribute, torch.nn.Parameter(torch.zeros(trial.shape)))
    module.config = trial.config
    weights = trial.weights if isinstance(trial.mapping.hf_param, dict) else next(iter(trial.weights.values()))
    local = trial.mapping.hf_to_megatron(weights, module).contiguous().clone()
    if tuple(local.shape) != trial.shape:
        return [f"the trial is wrong: {tuple(local.shape)} is not {trial.shape}"]
    shapes = {name: tuple(weight.shape) for name, weight in trial.weights.items()}
    part = Part(trial.mapping, module, trial.config, tuple(local.shape), trial.mapping.tp_size, trial.mapping.tp_rank, shapes.get)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (local, cuts_of(part)))
    full = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    wrong = []
    for memory, cuts in gathered:
        read = 0
        for cut in cuts:
            if cut.shape != shapes[cut.tensor]:
                wrong.append(f"{cut.tensor} has shape {cut.shape}, not {shapes[cut.tensor]}")
                continue
            extent = [high - low for low, high in zip(cut.lo, cut.hi, strict=True)]
            box = tuple(slice(low, high) for low, high in zip(cut.lo, cut.hi, strict=True))
            full[cut.tensor][box] = memory.reshape(-1).as_strided(extent, cut.strides, cut.offset)
            read += full[cut.tensor][box].numel()
        if read != memory.numel():
            wrong.append(f"{read} of {memory.numel()} local elements are read")
    expert = cuts_of(part)[0].lo[0] if trial.stacked else None
    for name, weight in trial.weights.items():
        same = torch.equal(full[name], weight) if expert is None else torch.equal(full[name][expert], weight[expert])
        if not same:
            wrong.append(f"{name} {tuple(weight.shape)} does not come back")
    return wrong
