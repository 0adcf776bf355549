"""How one Megatron tensor is cut into boxes of Hugging Face tensors: arithmetic on shapes, nothing else.

Each mapping class of Megatron-Bridge that only moves elements has a function here, which says what the class's own export
would do with this rank's part. A class is known by its exact identity. A subclass is another class: it may compute.
Everything is in elements; `source.py` turns elements into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_refit_ext.core.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The box lo..hi of `tensor` (of `shape`) lies in the local tensor at `offset`, with `strides` along the box's dimensions."""

    tensor: str
    shape: Shape
    lo: Shape
    hi: Shape
    offset: int
    strides: Shape


@dataclass(frozen=True)
class Part:
    """One rank's part of one Megatron tensor, and what decides its cut.

    `mapping` is the bridge's, with its names resolved; `module` owns the tensor and `config` is that module's; `shape` is local;
    `ranks` and `rank` are of the tensor-parallel group that shares the tensor (for experts the expert-tensor-parallel one).
    `checkpoint_shape(name)` is the shape that the checkpoint has for a name, or None where it doesn't say.
    `vocabulary` is the number of true rows when the rows are a padded vocabulary, else None.
    """

    mapping: Any
    module: Any
    config: Any
    shape: Shape
    ranks: int
    rank: int
    checkpoint_shape: Callable[[str], Shape | None]
    vocabulary: int | None = None

    @property
    def strides(self) -> Shape:
        """Row-major strides of the local tensor."""
        return tuple(prod(self.shape[d + 1 :]) for d in range(len(self.shape)))


Run = tuple[str, int, int, int]
"""(tensor name, its first row, local first row, number of rows)."""


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
            wanted="a mapping of Megatron-Bridge that only moves elements: "
            + ", ".join(sorted(k.rpartition(".")[2] for k in _KNOWN)),
            do="A parameter is never taken for replicated by default. Send this model through the bridge's export instead.",
        )
    return cut(part)


def shard_axis(part: Part) -> int | None:
    """The dimension along which the ranks of the group hold different parts, or None when each holds the whole tensor.

    For an `AutoMapping` the bridge itself looks at the module, as its export does.
    """
    kind = _FIXED_KINDS.get(_name(part))
    if kind is None:
        detector: Any = part.mapping if _name(part) in ("AutoMapping", "FusedExpertMapping") else part.mapping._tp_mapping
        if type(detector).__qualname__ == "ColumnParallelMapping":
            return 0
        try:
            kind = detector._detect_parallelism_type(part.module)
        except ValueError as error:
            what = f"the bridge can't tell how {type(part.module).__name__} is split over ranks"
            raise ConfigError(what, do="Register the module type with the bridge's AutoMapping.") from error
    if kind == "row":
        return 1 if len(part.shape) > 1 else None
    return 0 if kind == "column" else None


def _name(part: Part) -> str:
    return type(part.mapping).__qualname__


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


def _rows(part: Part, sizes: dict[str, int], runs: Iterator[Run] | Sequence[Run]) -> list[Cut]:
    """Cuts from runs of rows; `sizes` gives each tensor's number of rows. Checks that the runs tile the local rows."""
    tail, row_strides = part.shape[1:], part.strides
    cuts: list[Cut] = []
    covered = 0
    for name, row, local, count in _joined(runs):
        covered += count
        if local + count > part.shape[0] or row + count > sizes[name]:
            break
        zeros = (0,) * len(tail)
        cuts.append(Cut(name, (sizes[name], *tail), (row, *zeros), (row + count, *tail), local * row_strides[0], row_strides))
    if covered != part.shape[0]:
        raise ConfigError(
            f"its rows don't fit what {_name(part)} makes of the model's numbers",
            got=f"{part.shape[0]} local rows, {part.ranks} rank(s)",
            wanted=", ".join(f"{name} of {rows} rows" for name, rows in sizes.items()),
        )
    return cuts


def _joined(runs: Iterator[Run] | Sequence[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in runs:
        if last and last[0] == run[0] and last[1] + last[3] == run[1] and last[2] + last[3] == run[2]:
            last = (last[0], last[1], last[2], last[3] + run[3])
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


def _window(part: Part, packed: Sequence[tuple[str, int, int]]) -> Iterator[Run]:
    """Runs of this rank's equal share of a packed tensor, whose sections (name, first row, rows) follow each other.

    Sections may be cut anywhere: with fewer KV heads than ranks, a rank holds a part of a query group.
    """
    total = sum(rows for _, _, rows in packed)
    ranks, rank = (part.ranks, part.rank) if shard_axis(part) == 0 else (1, 0)
    if total != part.shape[0] * ranks:
        raise ConfigError(
            f"its rows don't fit what {_name(part)} makes of the model's numbers",
            got=f"{part.shape[0]} local rows times {ranks} rank(s)",
            wanted=f"{total} rows in all",
        )
    begin = part.shape[0] * rank
    end, at = begin + part.shape[0], 0
    for name, row, rows in packed:
        low, high = max(at, begin), min(at + rows, end)
        if low < high:
            yield name, row + low - at, low - begin, high - low
        at += rows


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


def _qkv(part: Part) -> list[Cut]:
    q, k, v = (part.mapping.hf_param[key] for key in "qkv")
    query, key = _attention_rows(part)
    return _rows(part, {q: query, k: key, v: key}, _window(part, _query_groups(part, q, k, v)))


def _qkv_one_tensor(part: Part) -> list[Cut]:
    name = str(part.mapping.hf_param)
    query, key = _attention_rows(part)
    sections = _query_groups(part, name, name, name, (0, query, query + key))
    return _rows(part, {name: query + 2 * key}, _window(part, sections))


def _qkv_gate(part: Part) -> list[Cut]:
    if getattr(part.config, "attention_output_gate", False):
        raise ConfigError(
            "its mapping QKVGMapping spreads a gate row of the checkpoint over a whole head: a computation, not a move",
            do="Send this model through the bridge's export instead.",
        )
    q, k, v, g = (part.mapping.hf_param[key] for key in "qkvg")
    query, key = _attention_rows(part)
    heads = part.config.num_attention_heads
    sections = [*_query_groups(part, q, k, v), (g, 0, heads)]
    return _rows(part, {q: query, k: key, v: key, g: heads}, _window(part, sections))


def _kv(part: Part) -> list[Cut]:
    k, v = (part.mapping.hf_param[key] for key in "kv")
    size, groups = _head_size(part.config), part.config.num_query_groups
    sections = [(name, group * size, size) for group in range(groups) for name in (k, v)]
    return _rows(part, {k: groups * size, v: groups * size}, _window(part, sections))


def _halves(part: Part, gate: str, up: str, up_base: int) -> tuple[int, list[Run]]:
    """Runs of a local [gate; up]; `up_base` is where up begins in its tensor, in units of the whole gate's rows."""
    half, odd = divmod(part.shape[0], 2)
    if odd:
        raise ConfigError("a gated projection needs an even number of local rows", got=part.shape[0])
    whole = half * part.ranks
    return whole, [(gate, half * part.rank, 0, half), (up, up_base * whole + half * part.rank, half, half)]


def _gated(part: Part) -> list[Cut]:
    gate, up = part.mapping.hf_param["gate"], part.mapping.hf_param["up"]
    whole, runs = _halves(part, gate, up, 0)
    return _rows(part, {gate: whole, up: whole}, runs)


def _sections(part: Part, local: Sequence[tuple[str, int]]) -> list[Cut]:
    """Local sections (name, rows) that follow each other; each is one rank's equal share of a section of its tensor."""
    sizes: dict[str, int] = {}
    runs: list[Run] = []
    at = 0
    for name, rows in local:
        runs.append((name, sizes.get(name, 0) + rows * part.rank, at, rows))
        sizes[name] = sizes.get(name, 0) + rows * part.ranks
        at += rows
    return _rows(part, sizes, runs)


def _mamba_in(part: Part) -> list[Cut]:
    config, name = part.config, str(part.mapping.hf_param)
    inner = config.mamba_num_heads * config.mamba_head_dim // part.ranks
    states = config.mamba_state_dim * config.mamba_num_groups // part.ranks
    rows = (inner, inner, states, states, config.mamba_num_heads // part.ranks)
    return _sections(part, [(name, count) for count in rows])


def _convolution(part: Part) -> list[Cut]:
    """Depth-wise convolutions of state-space layers: the mapping itself lists its local sections."""
    name = str(part.mapping.hf_param)
    return _sections(part, [(name, len(rows)) for rows in part.mapping.get_shard_idx(part.config, local_tp=True)])


def _delta_net_rows(part: Part) -> tuple[int, int, int, int]:
    """(key heads here, rows a key head has in q or k, in v or z, in b or a) of a gated delta net's input projection."""
    config = part.config
    values = config.linear_num_value_heads // config.linear_num_key_heads
    heads = config.linear_num_key_heads // part.ranks
    return heads, config.linear_key_head_dim, values * config.linear_value_head_dim, values


def _delta_net_grouped(part: Part) -> list[Cut]:
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
    return _rows(part, sizes, runs)


def _delta_net_flat(part: Part) -> list[Cut]:
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
    return _sections(part, [(name, heads * width) for name, width in widths])


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
    return _stacked(part, _rows(part, {name: 2 * whole}, runs))


_MODULE = "megatron.bridge.models.conversion.param_mapping"
_FIXED_KINDS = {
    "ColumnParallelMapping": "column",
    "RowParallelMapping": "row",
    "ReplicatedMapping": "replicated",
    "DirectMapping": "replicated",
    # Their exports gather along rows without asking the module.
    "GatedMLPMapping": "column",
    "FusedGatedExpertMapping": "column",
}
_KNOWN: dict[str, Callable[[Part], list[Cut]]] = {
    f"{_MODULE}.{name}": cut
    for name, cut in {
        "AutoMapping": _whole,
        "ColumnParallelMapping": _whole,
        "RowParallelMapping": _whole,
        "ReplicatedMapping": _whole,
        "DirectMapping": _whole,
        "QKVMapping": _qkv,
        "QKVGMapping": _qkv_gate,
        "KVMapping": _kv,
        "ConcatenatedQKVMapping": _qkv_one_tensor,
        "GatedMLPMapping": _gated,
        "MambaInProjMapping": _mamba_in,
        "MambaConv1dMapping": _convolution,
        "GDNConv1dMapping": _convolution,
        "GDNLinearMapping": _delta_net_grouped,
        "GDNLinearMappingSeparate": _delta_net_flat,
        "FusedExpertMapping": _stacked_whole,
        "FusedGatedExpertMapping": _stacked_gated,
    }.items()
}
_COMPUTED = {
    f"{_MODULE}.RMSNorm2ZeroCenteredRMSNormMapping": "adds one to every element, so elements are not moved but computed",
}
