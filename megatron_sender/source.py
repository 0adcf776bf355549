"""The source map: which boxes of which Hugging Face tensors this trainer rank holds, and at which bytes of which tensor.

It is made once, from metadata, without a collective and without copying a weight. Optimizer steps write in place, so the same
table describes every later version; what can break it is memory that moved, and `check_live` finds that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_sender.bridge import VOCABULARY, BridgeView, ModelTensor, known_missing
from megatron_sender.source_cuts import cuts_of, is_one_piece
from megatron_sender.source_part import Cut, Part, shard_axis
from vllm_refit_ext.core.dtypes import ITEMSIZE, dtype_name
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, WireError
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender.look import Look, misfits

TRAINED = ("float32", "bfloat16", "float16")
"""Element types whose values are the weights. FP8 trainers store values and scales apart, which a move can't put together."""

Manifest = dict[str, tuple[tuple[int, ...], str]]
"""Hugging Face name -> (global shape, dtype name)."""


@dataclass(repr=False)
class SourceMap:
    """What one trainer rank offers.

    Attributes
    ----------
    manifest: Hugging Face name -> (global shape, dtype name), of every tensor that this rank holds a part of, in the model's
        order. aliases: tied name -> the name that is sent; the same on every rank. placements: one row a box, one Buffer a
        Megatron tensor, in the order of `tensors`. tensors: the live local tensors; optimizer steps change them in place.
    checkpoint_names: every name the checkpoint has, or None when the bridge was made from a configuration alone.
    addresses: of `tensors`, as the last `refresh` found them.
    """

    manifest: Manifest
    aliases: dict[str, str]
    placements: Placements
    tensors: list[torch.Tensor]
    checkpoint_names: frozenset[str] | None
    _items: list[ModelTensor]
    _chunks: list[Any]
    addresses: list[int]

    def __repr__(self) -> str:
        total = sum(buffer.nbytes for buffer in self.placements.buffers)
        boxes, buffers = len(self.placements), len(self.tensors)
        return f"SourceMap({len(self.manifest)} tensors in {boxes} boxes of {buffers} buffers, {total} bytes)"

    def check_live(self) -> None:
        """Raise WireError, naming every tensor that lies elsewhere, is empty, or changed its strides, shape or dtype since."""
        now = [item.tensor.data for item in self._items]
        problems = misfits(now, self.placements.buffers)
        do = "Call refresh() and open the wire anew."
        problems += [
            Problem("its memory moved", buffer.name, do=do)
            for buffer, tensor, known, address in zip(self.placements.buffers, now, self.tensors, self.addresses, strict=True)
            if not tensor.data_ptr() == known.data_ptr() == address and not any(p.where == buffer.name for p in problems)
        ]
        if problems:
            raise WireError.of(problems, f"{len(problems)} tensor(s) of the trainer are not where the source map says")

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The manifest as `vllm_refit_ext.sender.Source` declares it."""
        return {name: TensorSpec(shape, dtype) for name, (shape, dtype) in self.manifest.items()}

    def refresh(self) -> list[str]:
        """Finish late parameter gathers, then take up tensors that moved. Returns the names of their buffers. Collective where
        `settle` is.

        The table itself stays: its offsets count from each tensor's start. Raises WireError, naming every tensor that is empty or
        changed its strides, shape or dtype.
        """
        self.settle()
        try:
            now = [place[name] for place, name in self._places]
        except KeyError:  # it is no parameter any more, or no buffer
            del self._places
            now = [item.tensor for item in self._items]
        found = self._look(now)
        if found == self.addresses:
            return []
        if found is None or any(not at and known.numel() for at, known in zip(found, self.tensors, strict=True)):
            problems = misfits(now, self.placements.buffers) or [Problem("a tensor has no memory", "the model")]
            raise WireError.of(problems, f"{len(problems)} tensor(s) of the trainer can't be read as the source map says")
        moved = [i for i, (at, known) in enumerate(zip(found, self.addresses, strict=True)) if at != known]
        for i in moved:
            self.tensors[i] = now[i].detach()
        self.addresses = found
        return [self.placements.buffers[i].name for i in moved]

    @functools.cached_property
    def _look(self) -> Look:
        return Look(self.placements.buffers)

    @functools.cached_property
    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """Torch's own table and the name in it of every tensor: reading it costs a tenth of asking the module."""
        tables = [(item.module._parameters, item.module._buffers, item.attribute) for item in self._items]
        return [(parameters if name in parameters else buffers, name) for parameters, buffers, name in tables]

    def settle(self) -> None:
        """Finish parameter gathers that a distributed optimizer with `overlap_param_gather` leaves to the next forward pass.

        Without it the weights of other data-parallel ranks are still those of the step before. Every rank must call it (the
        gathers are collectives); it does nothing when no chunk gathers late.
        """
        for chunk in self._chunks:
            config = getattr(chunk, "ddp_config", None)
            if config is not None and getattr(config, "overlap_param_gather", False):
                with torch.no_grad():
                    chunk.start_param_sync(force_sync=True)


def source_map(model_chunks: Sequence[torch.nn.Module] | torch.nn.Module, bridge: Any, *, rank: int | None = None) -> SourceMap:
    """The source map of this rank.

    `model_chunks` are Megatron's model chunks as the trainer holds them (wrapped or not; a single module may be given),
    `bridge` the `AutoBridge` they were made by, `rank` this process's global rank (asked from torch.distributed when None).
    Raises ConfigError that lists every tensor it can't describe exactly: no mapping or an unknown class of mapping, a shape that
    fits neither the model's numbers nor the checkpoint, a quantised or distributed tensor class, an adapter.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    if not chunks:
        raise ConfigError("no model chunks were given", where="source_map")
    if rank is None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    view = BridgeView(bridge, chunks)
    items, problems = view.items()
    manifest: Manifest = {}
    cuts: list[tuple[ModelTensor, list[Cut]]] = []
    with known_missing("modelopt"):
        for item in items:
            found = _problems_of(item)
            if not found:
                try:
                    part = _part(item, view)
                    cuts.append((item, cuts_of(part)))
                    found = _check_cuts(*cuts[-1], part, view, manifest)
                except RefitError as error:
                    found = [Problem(p.what, item.label, p.got, p.wanted, p.do) for p in error.problems]
            problems += found
    problems += _check_doubles(cuts)
    if problems:
        raise ConfigError.of(problems, f"{len(problems)} tensor(s) of the trainer can't be offered (rank {rank})")
    buffers, rows = _table(cuts, rank)
    tensors = [item.tensor.detach() for item, _ in cuts]
    return SourceMap(
        manifest=manifest,
        aliases=view.aliases(items),
        placements=Placements.from_rows(buffers, rows, list(manifest)),
        tensors=tensors,
        checkpoint_names=view.checkpoint.names,
        _items=[item for item, _ in cuts],
        _chunks=chunks,
        addresses=[tensor.data_ptr() for tensor in tensors],
    )


def _table(cuts: list[tuple[ModelTensor, list[Cut]]], rank: int) -> tuple[list[Buffer], list[Placement]]:
    buffers: list[Buffer] = []
    rows: list[Placement] = []
    for item, boxes in cuts:
        dtype = dtype_name(item.tensor.dtype)
        size = ITEMSIZE[dtype]
        for box in boxes:
            if all(low < high for low, high in zip(box.lo, box.hi, strict=True)):
                strides = tuple(stride * size for stride in box.strides)
                rows.append(Placement(box.tensor, len(buffers), box.lo, box.hi, box.offset * size, strides))
        buffers.append(Buffer(item.label, rank, dtype, tuple(item.tensor.shape)))
    return buffers, rows


def _check_doubles(cuts: list[tuple[ModelTensor, list[Cut]]]) -> list[Problem]:
    """Two tensors of one rank may hold the same box only where Megatron keeps both equal: embeddings held once more."""
    first: dict[tuple[str, tuple[int, ...]], ModelTensor] = {}
    problems = []
    for item, boxes in cuts:
        for box in boxes:
            other = first.setdefault((box.tensor, box.lo), item)
            if other is not item and not (item.name.endswith(VOCABULARY) and other.name.endswith(VOCABULARY)):
                what = f"it is mapped to the same part of {box.tensor!r} as {other.label}"
                problems.append(Problem(what, item.label, do="Correct the mapping registry of the model's bridge."))
    return problems


def _part(item: ModelTensor, view: BridgeView) -> Part:
    vocabulary = None
    if item.name.endswith(VOCABULARY):
        known = view.checkpoint.shape(str(item.mapping.hf_param))
        vocabulary = known[0] if known else view.checkpoint.vocabulary
    return Part(
        mapping=item.mapping,
        module=item.module,
        config=item.config,
        shape=tuple(item.tensor.shape),
        ranks=item.mapping.tp_size,
        rank=item.mapping.tp_rank,
        checkpoint_shape=view.checkpoint.shape,
        vocabulary=vocabulary,
    )


def _problems_of(item: ModelTensor) -> list[Problem]:
    """What the tensor itself says against being read as it lies."""
    keep_float32 = getattr(item.module, "_maintain_float32_expert_bias", None)
    if keep_float32 is not None and item.attribute == "expert_bias":
        # Mixed-precision wrappers cast this buffer; the router takes it back to float32 before it is used or saved.
        keep_float32()
    tensor = item.tensor
    if type(tensor) not in (torch.nn.Parameter, torch.Tensor) or dtype_name(tensor.dtype) not in TRAINED:
        return [
            Problem(
                "it is stored in a form whose bytes are not the weights",
                item.label,
                f"{type(tensor).__name__} of {tensor.dtype}",
                "a plain tensor of " + " or ".join(TRAINED),
                "Train with plain parameters, or send this model through the bridge's export.",
            )
        ]
    if not tensor.is_contiguous():
        return [Problem("it is not contiguous in memory", item.label, f"strides {tuple(tensor.stride())}", "row-major")]
    return []


def _check_cuts(item: ModelTensor, cuts: list[Cut], part: Part, view: BridgeView, manifest: Manifest) -> list[Problem]:
    """Hold the cuts against the checkpoint, against what other tensors said, and against the tensor's own attributes."""
    problems = []
    names = view.checkpoint.names
    dtype = dtype_name(item.tensor.dtype)
    for name, shape in {cut.tensor: cut.shape for cut in cuts}.items():
        wanted = view.checkpoint.shape(name)
        if names is not None and name not in names:
            problems.append(Problem(f"the checkpoint has no tensor {name!r}, to which the bridge maps it", item.label))
        elif wanted is not None and wanted != shape:
            what = f"the trainer's shards make up another shape of {name!r} than the checkpoint has"
            problems.append(Problem(what, item.label, str(shape), str(wanted)))
        other = manifest.setdefault(name, (shape, dtype))
        if other != (shape, dtype):
            problems.append(
                Problem(f"two tensors of the model disagree about {name!r}", item.label, f"{shape}, {dtype}", f"{other}")
            )
    return problems + _check_sharding(item, part)


def _check_sharding(item: ModelTensor, part: Part) -> list[Problem]:
    """Megatron marks tensors that it splits. A mark that the mapping doesn't know would mean a wrong cut."""
    tensor = item.tensor
    problems = []
    if not getattr(tensor, "allreduce", True) and not item.mapping.is_expert:
        what = "Megatron reduces its gradients as an expert's, but the bridge's mapping is not one of experts"
        problems.append(Problem(what, item.label, type(item.mapping).__name__))
    marked = getattr(tensor, "partition_dim", None) if getattr(tensor, "tensor_model_parallel", False) else None
    axis = shard_axis(part)
    if marked is None or part.ranks == 1:
        return problems
    mapping = type(item.mapping).__name__
    if axis != marked:
        got, wanted = ("replicated" if d is None else f"split along dimension {d}" for d in (axis, marked))
        problems.append(Problem(f"its mapping {mapping} and Megatron's own mark disagree", item.label, got, wanted))
    elif getattr(tensor, "partition_stride", 1) > 1 and is_one_piece(part):
        what = f"each rank holds its part of several sections, but its mapping {mapping} joins the shards end to end"
        problems.append(Problem(what, item.label, do="Map it with a gated mapping of the bridge."))
    return problems
