"""Which function cuts which mapping class of Megatron-Bridge.

Each class that only moves elements has a function, which says what the class's own export would do with this rank's part. A
class is known by its exact identity. A subclass is another class: it may compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_sender import source_attention, source_state_space
from megatron_sender.source_part import Cut, Part, Run, Shape, row_cuts, shard_axis
from vllm_refit_ext.core.errors import ConfigError


def cuts_of(part: Part) -> list[Cut]:
    """The cuts of `part`.

    Raises ConfigError when its mapping class is not one that is known to move elements only, or its numbers don't fit.
    """
    kind = f"{type(part.mapping).__module__}.{type(part.mapping).__qualname__}"
    cut = _KNOWN.get(kind)
    if cut is None:
        computed = _COMPUTED.get(kind)
        raise ConfigError(
            f"its mapping {kind} {computed}" if computed else f"its mapping class {kind} is unknown",
            wanted="one of Megatron-Bridge's own classes that only move elements",
            do="It is not taken for replicated by default. Send this model through the bridge's export instead.",
        )
    return cut(part)


def is_one_piece(part: Part) -> bool:
    """Whether the mapping takes the shards of all ranks, end to end, for one tensor of the checkpoint."""
    kind = f"{type(part.mapping).__module__}.{type(part.mapping).__qualname__}"
    return _KNOWN.get(kind) in (_whole, _stacked_whole)


def _whole(part: Part) -> list[Cut]:
    """A tensor that is one Hugging Face tensor, split along one dimension or not at all."""
    axis = shard_axis(part)
    name = str(part.mapping.hf_param)
    shape, lo, hi = list(part.shape), [0] * len(part.shape), list(part.shape)
    if axis is not None:
        shape[axis] = part.shape[axis] * part.ranks
        lo[axis] = part.shape[axis] * part.rank
        hi[axis] = lo[axis] + part.shape[axis]
    if part.vocabulary is not None:
        if shape[0] < part.vocabulary:
            raise ConfigError("it has fewer rows than the vocabulary", got=shape[0], wanted=part.vocabulary)
        # Rows behind the true vocabulary exist in Megatron only: they belong to no Hugging Face tensor.
        shape[0] = part.vocabulary
        hi[0] = min(hi[0], part.vocabulary)
        lo[0] = min(lo[0], hi[0])
    cut = Cut(name, tuple(shape), tuple(lo), tuple(hi), 0, part.strides)
    order = getattr(part.mapping, "permute_dims", None)
    return [_permuted(cut, order)] if order is not None else [cut]


def _permuted(cut: Cut, order: Sequence[int]) -> Cut:
    def turn(values: Shape) -> Shape:
        return tuple(values[d] for d in order)

    return Cut(cut.tensor, turn(cut.shape), turn(cut.lo), turn(cut.hi), cut.offset, turn(cut.strides))


def _halves(part: Part, gate: str, up: str, up_base: int) -> tuple[int, list[Run]]:
    """Runs of a local [gate; up]; `up_base` is where up begins in its tensor, in units of the whole gate's rows."""
    for setting in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"):
        if getattr(part.config, setting, None) is not None and "experts." in part.mapping.megatron_param:
            # Alternating blocks of gate and up rows; the bridge neither makes nor undoes them.
            raise ConfigError(f"the trainer interleaves gate and up rows ({setting}), which the bridge's mapping does not")
    half, odd = divmod(part.shape[0], 2)
    if odd:
        raise ConfigError("a gated projection needs an even number of local rows", got=part.shape[0])
    whole = half * part.ranks
    return whole, [(gate, half * part.rank, 0, half), (up, up_base * whole + half * part.rank, half, half)]


def _gated(part: Part) -> list[Cut]:
    gate, up = part.mapping.hf_param["gate"], part.mapping.hf_param["up"]
    whole, runs = _halves(part, gate, up, 0)
    return row_cuts(part, {gate: whole, up: whole}, runs)


def _stacked(part: Part, cuts: Sequence[Cut]) -> list[Cut]:
    """Cuts of one expert, as cuts of the tensor that stacks all experts, transposed where the bridge's export would."""
    from megatron.bridge.utils.common_utils import extract_expert_number_from_param

    expert, count = extract_expert_number_from_param(part.mapping.megatron_param), part.config.num_moe_experts
    out: list[Cut] = []
    for cut in cuts:
        full = Cut(cut.tensor, (count, *cut.shape), (expert, *cut.lo), (expert + 1, *cut.hi), cut.offset, (0, *cut.strides))
        turned = _permuted(full, (*range(len(full.shape) - 2), len(full.shape) - 1, len(full.shape) - 2))
        if part.mapping.transpose_on_export and part.checkpoint_shape(cut.tensor) in (None, turned.shape):
            # A square tensor that fits as it is stays as it is: the bridge's export looks at the shape in the same order.
            full = full if part.checkpoint_shape(cut.tensor) == full.shape else turned
        out.append(full)
    return out


def _stacked_whole(part: Part) -> list[Cut]:
    return _stacked(part, _whole(part))


def _stacked_gated(part: Part) -> list[Cut]:
    name = str(part.mapping.hf_param)
    whole, runs = _halves(part, name, name, 1)
    return _stacked(part, row_cuts(part, {name: 2 * whole}, runs))


_MODULE = "megatron.bridge.models.conversion.param_mapping"
_KNOWN: dict[str, Callable[[Part], list[Cut]]] = {
    f"{_MODULE}.{name}": cut
    for name, cut in {
        "AutoMapping": _whole,
        "ColumnParallelMapping": _whole,
        "RowParallelMapping": _whole,
        "ReplicatedMapping": _whole,
        "DirectMapping": _whole,
        "QKVMapping": source_attention.qkv,
        "QKVGMapping": source_attention.qkv_gate,
        "KVMapping": source_attention.kv,
        "ConcatenatedQKVMapping": source_attention.qkv_one_tensor,
        "GatedMLPMapping": _gated,
        "MambaInProjMapping": source_state_space.mamba_in,
        "MambaConv1dMapping": source_state_space.convolution,
        "GDNConv1dMapping": source_state_space.convolution,
        "GDNLinearMapping": source_state_space.delta_net_grouped,
        "GDNLinearMappingSeparate": source_state_space.delta_net_flat,
        "FusedExpertMapping": _stacked_whole,
        "FusedGatedExpertMapping": _stacked_gated,
    }.items()
}
_COMPUTED = {
    f"{_MODULE}.RMSNorm2ZeroCenteredRMSNormMapping": "adds one to every element, so elements are not moved but computed",
}
