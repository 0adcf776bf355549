"""From a model's tensors to a checkpoint's: which box of which checkpoint tensor each element of the model becomes.

A library that writes checkpoints has a function from a state dict by the model's names to one by the checkpoint's:
`revert_weight_conversion` of transformers, `to_hf` of torchtitan. `record` runs it once, on tensors without storage. What it
moves (chunks, concatenates, stacks, transposes, interleaves, renames) is read off; what it computes is refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_refit_ext.copies import Copies, Part, mutated, storage_id, tensors_in
from vllm_refit_ext.core.affine import TooManyBoxesError, decompose, row_major
from vllm_refit_ext.core.dtypes import ITEMSIZE, dtype_name
from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender.geometry import Shape, Shard

Convert = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A state dict of whole tensors by the model's names -> the same by the checkpoint's names."""

boxes_of_copy = functools.lru_cache(maxsize=1 << 16)(decompose)
"""`decompose`, remembered: layers and experts repeat the same few copies."""


class Whole(NamedTuple):
    """A tensor of the model as a whole. `tied`: the name under which the same tensor stands before, if any."""

    shape: Shape
    dtype: str
    tied: str = ""


class Piece(NamedTuple):
    """The box lo..hi of a tensor of the model lies in checkpoint tensor `name`: its first element is element `at` there, and one
    step along each dimension of the box is `strides` elements."""

    name: str
    lo: Shape
    hi: Shape
    at: int
    strides: Shape


class Conversion(NamedTuple):
    """specs: every checkpoint tensor, in the model's order. aliases: second name of a tied tensor -> the name in `specs`.
    pieces: tensor of the model -> where its boxes go."""

    specs: dict[str, TensorSpec]
    aliases: dict[str, str]
    pieces: dict[str, list[Piece]]


class LocalTensor(NamedTuple):
    """A rank's part of a tensor of the model: row-major memory of shape `local`, and which boxes of the tensor it holds."""

    name: str
    local: Shape
    shards: Sequence[Shard]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows exact copies, and remembers which operation made what is none."""

    def __init__(self, copies: Copies) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = copies
        self.computed: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []
        self._views: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in self._views:  # most calls by far: one for each expert
            return result
        written = mutated(func, args, kwargs)
        if func.is_view and not written:
            self._views.add(func)
            return result
        if not written and self.copies.follow(func, args, kwargs, result):
            return result
        before = {storage_id(t) for t in tensors_in((args, kwargs))}
        # A view by another name, such as _unsafe_view, has a storage that is known.
        for tensor in (*written, *(t for t in tensors_in(result) if storage_id(t) not in before)):
            key = storage_id(tensor)
            self.copies.sources.pop(key, None)
            self.copies.images.pop(key, None)
            self.computed.setdefault(key, str(func).removesuffix(".default"))
            self._kept.append(tensor)
        return result


def record(tensors: Mapping[str, Whole], convert: Convert | None = None) -> Conversion:
    """The conversion of a model's `tensors`, by name in the model's order. convert: None keeps names and shapes.

    Raises ConfigError that lists every checkpoint tensor that `convert` computes, or makes of no tensor of the model.
    """
    names = list(tensors)
    metas = {n: torch.empty(w.shape, dtype=getattr(torch, w.dtype), device="meta") for n, w in tensors.items()}
    copies = Copies(list(metas.values()))
    watch = _Watch(copies)
    if convert is None:
        made: Mapping[str, torch.Tensor] = metas
    else:
        try:
            with torch.no_grad(), watch:
                made = convert(dict(metas))
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                "the conversion to checkpoint tensors asks for values",
                where=getattr(getattr(convert, "func", convert), "__qualname__", type(convert).__name__),
                got=f"{type(error).__name__}: {error}".splitlines()[0][:240],
                wanted="one that only moves elements, so that it can be recorded on tensors without storage",
            ) from error
    problems: list[Problem] = []
    found: dict[str, tuple[Whole, list[Part]]] = {}
    for name, tensor in made.items():
        parts = copies.parts(tensor, [0] * tensor.dim(), tensor.dtype) if isinstance(tensor, torch.Tensor) else None
        covered = sum(prod(b - a for a, b in zip(p.lo, p.hi, strict=True)) for p in parts or ())
        dtypes = {tensors[names[p.source]].dtype for p in parts or ()}
        if parts is None or covered != tensor.numel() or len(dtypes) > 1:
            problems.append(Problem("the conversion computes it", f"tensor {name!r}", _why(tensor, watch, dtypes), "moves alone"))
        else:
            found[name] = (Whole(tuple(tensor.shape), dtypes.pop() if dtypes else dtype_name(tensor.dtype)), parts)
    if problems:
        raise ConfigError.of(problems, f"{len(problems)} checkpoint tensor(s) are not made of the trainer's by moves alone")
    return _conversion(tensors, found)


def _why(tensor: Any, watch: _Watch, dtypes: set[str]) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    if len(dtypes) > 1:
        return "made of " + " and ".join(sorted(dtypes))
    return watch.computed.get(storage_id(tensor), "no tensor of the model")


def _conversion(tensors: Mapping[str, Whole], found: Mapping[str, tuple[Whole, list[Part]]]) -> Conversion:
    names = list(tensors)
    number = {name: i for i, name in enumerate(names)}
    first = [number[w.tied] if w.tied else i for i, w in enumerate(tensors.values())]
    conversion = Conversion({}, {}, {name: [] for name in names})
    seen: dict[Any, str] = {}
    order = sorted(found, key=lambda n: min((p.source for p in found[n][1]), default=-1))
    for name in order:
        whole, parts = found[name]
        key = (whole.shape, tuple((p.lo, p.hi, first[p.source], p.offset, p.strides) for p in parts))
        if parts and seen.setdefault(key, name) != name:
            conversion.aliases[name] = seen[key]
            continue
        conversion.specs[name] = TensorSpec(whole.shape, whole.dtype)
        strides = row_major(whole.shape)
        for part in parts:
            source = names[first[part.source]]
            dims = tuple((b - a, s, d) for a, b, s, d in zip(part.lo, part.hi, part.strides, strides, strict=True))
            start = sum(a * s for a, s in zip(part.lo, strides, strict=True))
            for lo, hi, at, steps in _boxes(tensors[source].shape, part.offset, dims, name):
                conversion.pieces[source].append(Piece(name, lo, hi, start + at, steps))
    return conversion


def place(conversion: Conversion, local: Iterable[LocalTensor], rank: int = 0) -> Placements:
    """The placements of what a rank holds: one buffer for each of `local`, in order."""
    buffers: list[Buffer] = []
    rows: list[Placement] = []
    dtypes = {piece.name: conversion.specs[piece.name].dtype for pieces in conversion.pieces.values() for piece in pieces}
    for item in local:
        pieces = conversion.pieces[item.name]
        dtype = dtypes[pieces[0].name]
        size, strides = ITEMSIZE[dtype], row_major(item.local)
        for piece in pieces:
            shape = conversion.specs[piece.name].shape
            for shard in item.shards:
                lo, hi = tuple(map(max, piece.lo, shard.lo)), tuple(map(min, piece.hi, shard.hi))
                if any(a >= b for a, b in zip(lo, hi, strict=True)):
                    continue
                there = piece.at + sum((a - b) * s for a, b, s in zip(lo, piece.lo, piece.strides, strict=True))
                here = sum((a - b + c) * s for a, b, c, s in zip(lo, shard.lo, shard.at, strides, strict=True))
                dims = tuple((b - a, s, d) for a, b, s, d in zip(lo, hi, piece.strides, strides, strict=True))
                for first, last, at, steps in _boxes(shape, there, dims, piece.name):
                    rows.append(
                        Placement(piece.name, len(buffers), first, last, (here + at) * size, tuple(s * size for s in steps))
                    )
        buffers.append(Buffer(item.name, rank, dtype, item.local))
    return Placements.from_rows(buffers, rows)


def _boxes(shape: Shape, start: int, dims: tuple[tuple[int, int, int], ...], name: str) -> Any:
    try:
        return boxes_of_copy(shape, start, dims)
    except TooManyBoxesError as error:
        raise ConfigError("its elements are scattered", where=f"tensor {name!r}", got=str(error)) from None
