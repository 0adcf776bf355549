"""A `WeightSource` of vLLM as a source: what a trainer gives to vLLM's own trainer-side engines, read by `RefitSender`.

Its protocol changed once. vLLM 0.28 to 0.32: `metadata()`, iteration over whole tensors, and (0.32) `held_names()`. From 0.33 on:
`metadata` is a property whose entries say which ranks own a tensor and how it is cut, with `iter_local()` for the pieces and
`iter_full()` for whole tensors. Pieces are preferred, and offered as the boxes that they are. Of whole tensors each is offered by
one of its owners, in turn, so that no rank keeps more than its part of the model.

Iterating may make tensors (a gather). They are kept while they are read, from `refresh` to `release`: a rank's part of the model
beside its own shards. Tensors that lie where the trainer keeps them cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from vllm_refit_ext.core.affine import row_major
from vllm_refit_ext.core.dtypes import ITEMSIZE, dtype_name
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, WireError
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender.geometry import Shard, shards
from vllm_refit_ext.sender.source import Source

Pairs = Iterable[tuple[str, torch.Tensor | None]]


class WeightSourceAdapter:
    """What one trainer rank offers of a `WeightSource`; see `sender.source.Source`, which it is."""

    def __init__(self, source: Any, rank: int, size: int) -> None:
        """rank, size: of this process among the trainer's, as the source's owners count. Iterates the source once, so every rank
        makes one. Raises ConfigError that lists every tensor whose declaration is not of this form."""
        self.aliases: Mapping[str, str] = {}
        self.tensors: list[torch.Tensor] = []
        self._iterate, self._whole = _reading(source)
        self._copied: set[str] = set()
        mine = _offered(source, rank, size, self._whole)
        self.specs: Mapping[str, TensorSpec] = {name: spec for name, (spec, _, _) in mine.items()}
        rows, buffers = list[Placement](), list[Buffer]()
        for name, (spec, shape, boxes) in mine.items():
            itemsize = ITEMSIZE[spec.dtype]
            strides = tuple(s * itemsize for s in row_major(shape))
            for box in boxes:
                at = sum(a * s for a, s in zip(box.at, strides, strict=True))
                rows.append(Placement(name, len(buffers), box.lo, box.hi, at, strides))
            buffers.append(Buffer(name, 0, spec.dtype, shape))
        self.placements: Placements = Placements.from_rows(buffers, rows, list(mine))
        # A source may yield the same memory again and again, or tied tensors: what shares memory is copied from now on. What this
        # first pass found is good for shapes alone.
        found = self._read()
        self._copied = _sharing(found)
        self.tensors = list(found.values())

    def refresh(self) -> None:
        """Iterate the source: the tensors of now. Raises WireError that names every tensor that it did not yield, and those whose
        memory it used twice."""
        found = self._read()
        problems = [
            Problem("the source yields it in memory that it yielded before", name, do="yield tensors that stay, or prepare again")
            for name in sorted(_sharing(found) - self._copied)
        ]
        if problems:
            raise WireError.of(problems)
        self.tensors = list(found.values())

    def release(self) -> None:
        """Let go of what the source made."""
        self.tensors = []

    def _read(self) -> dict[str, torch.Tensor]:
        """What the source yields now, of what this rank offers, in that order."""
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._iterate():
                # All that is yielded: a gather is collective.
                given = _materialised(tensor, self._whole)
                if name in self.specs and given is not None:
                    found[name] = given.clone() if name in self._copied else given.contiguous()
        missing = [Problem("the source declares it and did not yield it", n) for n in self.specs if n not in found]
        if missing:
            raise WireError.of(missing, f"the source lacks {len(missing)} tensor(s) that it declares")
        return {name: found[name] for name in self.specs}


def source_of(source: Any, rank: int, size: int) -> Source:
    """What a trainer gave to vLLM's trainer side, as a source: a `Source` as it is, vLLM's `ModuleSource` by its module's shards,
    any other `WeightSource` by what it declares. Raises ConfigError."""
    if hasattr(source, "placements") and hasattr(source, "refresh"):
        return source  # type: ignore[no-any-return]
    kind = type(source)
    if kind.__name__ == "ModuleSource" and kind.__module__.startswith("vllm."):
        from vllm_refit_ext.sender.dtensor import DTensorSource

        return DTensorSource(source._module)
    return WeightSourceAdapter(source, rank, size)


def _reading(source: Any) -> tuple[Callable[[], Pairs], bool]:
    """How the source is iterated, and whether that yields whole tensors."""
    if not hasattr(source, "metadata"):
        wanted = "metadata, and iteration, iter_local or iter_full"
        raise ConfigError("not a WeightSource of vLLM's", where="source", got=type(source).__name__, wanted=wanted)
    if callable(source.metadata):
        return source.__iter__, True
    whole = not source.implements_iter_local()
    if whole and not source.implements_iter_full():
        raise ConfigError("the source has neither iter_local nor iter_full", where="source", got=type(source).__name__)
    return source.iter_full if whole else source.iter_local, whole


def _offered(source: Any, rank: int, size: int, whole: bool) -> dict[str, tuple[TensorSpec, tuple[int, ...], list[Shard]]]:
    """Of each tensor that this rank offers: its spec, the shape of what the rank has of it, and the boxes in that."""
    metas = source.metadata() if callable(source.metadata) else source.metadata
    held = source.held_names() if hasattr(source, "held_names") else None
    mine: dict[str, tuple[TensorSpec, tuple[int, ...], list[Shard]]] = {}
    seen: set[str] = set()
    problems: list[Problem] = []
    for number, meta in enumerate(metas):
        if meta.name in seen:
            problems.append(Problem("the source declares it twice", meta.name))
        seen.add(meta.name)
        owners = getattr(meta, "owners", None) or range(size)
        elsewhere = owners[number % len(owners)] != rank if whole else rank not in owners
        if elsewhere if held is None else meta.name not in held:
            continue
        try:
            spec = TensorSpec(tuple(meta.shape), dtype_name(meta.dtype))
            cuts = None if whole else getattr(meta, "placements", None)
            mesh = meta.mesh_shape if cuts is not None else (len(owners),)
            at = np.unravel_index(list(owners).index(rank), mesh) if cuts is not None else (0,)
            boxes = shards(spec.shape, mesh, tuple(map(int, at)), cuts if cuts is not None else (None,), where=meta.name)
        except RefitError as error:
            problems += error.problems
            continue
        # A cut of torch.chunk is one box, or nothing.
        if boxes:
            mine[meta.name] = (spec, tuple(b - a for a, b in zip(boxes[0].lo, boxes[0].hi, strict=True)), boxes)
    if problems:
        raise ConfigError.of(problems, f"{len(problems)} tensor(s) of the source can't be offered")
    return mine


def _materialised(tensor: Any, whole: bool) -> torch.Tensor | None:
    """The plain tensor of what a source yielded; the gather that a DTensor takes is collective."""
    if tensor is None or not hasattr(tensor, "placements"):
        return None if tensor is None else tensor.detach()  # type: ignore[no-any-return]
    return tensor.full_tensor().detach() if whole else tensor.to_local().detach()  # type: ignore[no-any-return]


def _sharing(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of tensors whose memory overlaps another's."""
    spans = sorted((str(t.device), t.data_ptr(), t.numel() * t.element_size(), name) for name, t in tensors.items() if t.numel())
    found: set[str] = set()
    last = spans[0] if spans else None
    for span in spans[1:]:
        assert last is not None
        if span[0] == last[0] and span[1] < last[1] + last[2]:
            found |= {span[3], last[3]}
            last = max(last, span, key=lambda s: s[1] + s[2])
        else:
            last = span
    return found
