"""The targets of one engine rank: its routes, turned into boxes of live parameters or of tensors for the engine's own reload.

A parameter whose layout is known takes moves in place. One whose layout is unknown, or that a loader computes, takes the engine's
reload, together with everything its module holds, because the reload works module by module. Tensors for the reload have
checkpoint shape, and only the boxes that this rank's routes read are asked for, so the bytes that travel stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import Problem, RouteError
from vllm_refit_ext.core.manifest import Manifest, suggest
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.receiver.live_layout import derived_from, layout_of
from vllm_refit_ext.receiver.routes.record import record_routes
from vllm_refit_ext.receiver.routes.table import Routes
from vllm_refit_ext.receiver.worker_view import WorkerView
from vllm_refit_ext.receiver.writers import CHECKPOINT, PLAIN


class Targets(msgspec.Struct):
    """placements: boxes of buffers of this rank. params: live tensors by buffer name, for buffers in place.
    reload: names that take the engine's reload, with the reason. dropped: names that the loaders skip here, with the reason.
    quantise: names whose parameter holds MXFP8. extra_bytes: peak memory beyond the model. problems: what keeps the rank from
    taking part.
    """

    rank: int
    placements: Placements
    params: dict[str, torch.Tensor]
    reload: dict[str, str]
    dropped: dict[str, str]
    quantise: list[str]
    extra_bytes: int
    problems: list[Problem]

    @property
    def writer(self) -> str:
        """`in place`, `reload`, or both."""
        kinds = {b.layout for b in self.placements.buffers}
        names = [name for layout, name in ((PLAIN, "in place"), (CHECKPOINT, "reload")) if layout in kinds]
        return " and ".join(names) or "nothing"

    def layouts(self) -> dict[str, int]:
        """Buffers by layout."""
        count: dict[str, int] = {}
        for buffer in self.placements.buffers:
            count[buffer.layout] = count.get(buffer.layout, 0) + 1
        return count

    def signature(self, view: WorkerView) -> tuple[Any, ...]:
        """Identity of everything the plan writes in place. It changes when a parameter is replaced, moved or retyped."""
        live = live_tensors(view.model)
        found = []
        for name in self.params:
            tensor = live.get(name)
            found.append(
                None if tensor is None else (name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            )
        return tuple(found)


def build_targets(view: WorkerView, manifest: Manifest, rank: int) -> Targets:
    """Record the routes of `manifest` and decide for every parameter how it is written. `rank` is this rank's number in the plan.

    Raises RouteError with every tensor that the engine's loaders refuse. Other problems are in the result.
    """
    entries = {name: (spec.shape, spec.dtype) for name, spec in manifest.tensors.items()}
    routes = record_routes(view.model, entries, rank=rank, vllm_config=view.vllm_config)
    live = live_tensors(view.model)
    reasons = _unknown_parameters(view, routes, live)
    reload = _closure(routes, reasons)
    placements = _in_checkpoint_shape(routes, reload, manifest, rank)
    placed = {b.name for b in placements.buffers if b.layout == PLAIN}
    staged = [b.nbytes for b in placements.buffers if b.layout == CHECKPOINT]
    return Targets(
        rank=rank,
        placements=placements,
        params={name: live[name] for name in placed},
        reload=reload,
        dropped=routes.dropped,
        quantise=sorted({row for row in _mxfp8_names(routes, live)}),
        extra_bytes=sum(staged),
        problems=_problems(routes, reload, manifest),
    )


def live_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the running model by full name, shared ones under every name."""
    named: Iterable[tuple[str, torch.Tensor]] = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: tensor.detach() for name, tensor in named}


def _unknown_parameters(view: WorkerView, routes: Routes, live: dict[str, torch.Tensor]) -> dict[str, str]:
    """Parameters that can't be written in place, with the reason."""
    modules = dict(view.model.named_modules(remove_duplicate=False))
    derived = derived_from(view.model)
    reasons = {}
    for buffer in routes.placements.buffers:
        owner = buffer.name.rpartition(".")[0]
        layout, reason = layout_of(buffer, live.get(buffer.name), modules[owner], view)
        if owner in derived:
            layout, reason = "", derived[owner]
        if not layout:
            reasons[buffer.name] = reason
    return reasons


def _closure(routes: Routes, unknown: dict[str, str]) -> dict[str, str]:
    """Names to reload, with the reason: every name of a module that holds an unknown parameter, and so on until nothing is added."""
    table = routes.placements
    owner = [b.name.rpartition(".")[0] for b in table.buffers]
    modules_of: dict[str, set[str]] = {}
    names_of: dict[str, set[str]] = {}
    for t, b in np.unique(np.stack([table.tensor, table.buffer], axis=1), axis=0):
        modules_of.setdefault(table.names[t], set()).add(owner[b])
        names_of.setdefault(owner[b], set()).add(table.names[t])
    reload = dict(routes.computed)
    todo = [(name, owner_name) for name, owner_name in routes.touched.items()] if hasattr(routes, "touched") else []
    pending = [(b.name.rpartition(".")[0], f"{b.name}: {unknown[b.name]}") for b in table.buffers if b.name in unknown]
    pending += [(m, f"{m} also holds {n}, which its loader computes") for n, ms in todo if n in reload for m in ms]
    seen: set[str] = set()
    while pending:
        module, reason = pending.pop(0)
        if module in seen:
            continue
        seen.add(module)
        for name in names_of.get(module, ()):
            reload.setdefault(name, reason)
            pending += [(m, f"{name} is shared with {module}") for m in modules_of[name] - seen]
    return reload


def _in_checkpoint_shape(routes: Routes, reload: dict[str, str], manifest: Manifest, rank: int) -> Placements:
    """The routes with every reloaded name's boxes redirected into a buffer of checkpoint shape."""
    table = routes.placements
    if not reload:
        return table
    reloaded = np.array([name in reload for name in table.names], bool)[table.tensor] if len(table) else np.zeros(0, bool)
    kept = table.select(~reloaded)
    used = np.unique(kept.buffer)
    place = np.full(len(table.buffers), -1, np.int64)
    place[used] = np.arange(len(used))
    buffers = [table.buffers[i] for i in used]
    rows = [msgspec.structs.replace(row, buffer=int(place[row.buffer])) for row in kept.rows()]
    rows = [_unpadded(row, len(manifest.tensors[row.tensor].shape)) for row in rows]
    boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: set() for name in reload}
    for row in table.select(reloaded).rows():
        n = len(manifest.tensors[row.tensor].shape)
        boxes[row.tensor].add((row.lo[:n], row.hi[:n]))
    for name in manifest.tensors:
        if name not in boxes:
            continue
        spec = manifest.tensors[name]
        buffers.append(Buffer(name, rank, spec.dtype, spec.shape, CHECKPOINT))
        whole = ((0,) * len(spec.shape), spec.shape)
        strides = tuple(s * ITEMSIZE[spec.dtype] for s in row_strides(spec.shape))
        for lo, hi in _separate(boxes[name]) if name not in routes.computed else [whole]:
            offset = sum(a * s for a, s in zip(lo, strides, strict=True))
            rows.append(Placement(name, len(buffers) - 1, lo, hi, offset, strides))
    return Placements.from_rows(buffers, rows, table.names)


def _unpadded(row: Placement, ndim: int) -> Placement:
    return msgspec.structs.replace(row, lo=row.lo[:ndim], hi=row.hi[:ndim], strides=row.strides[:ndim])


def _separate(boxes: set[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of one tensor that share no element; boxes that overlap are replaced by the box around them."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for lo, hi in sorted(boxes):
        merged = (lo, hi)
        while True:
            clash = [b for b in found if all(max(p, x) < min(q, y) for p, q, x, y in zip(*merged, *b, strict=True))]
            if not clash:
                break
            found = [b for b in found if b not in clash]
            merged = (
                tuple(min(v) for v in zip(merged[0], *(b[0] for b in clash), strict=True)),
                tuple(max(v) for v in zip(merged[1], *(b[1] for b in clash), strict=True)),
            )
        if math.prod(b - a for a, b in zip(*merged, strict=True)):
            found.append(merged)
    return sorted(found)


def _mxfp8_names(routes: Routes, live: dict[str, torch.Tensor]) -> Iterable[str]:
    table = routes.placements
    coded = [b.dtype == "float8_e4m3fn" and f"{b.name}_scale" in live for b in table.buffers]
    for t in np.unique(table.tensor[np.array(coded, bool)[table.buffer]]) if len(table) else []:
        yield table.names[t]


def _problems(routes: Routes, reload: dict[str, str], manifest: Manifest) -> list[Problem]:
    """What is missing: parameters that no offered tensor fills, and names that nothing here knows."""
    problems = [
        Problem("no offered tensor fills it", f"engine parameter {name!r}", what, "every element written", _hint(name, manifest))
        for name, what in routes.unwritten.items()
    ]
    unknown = [name for name in routes.dropped if name not in reload and routes.dropped[name].startswith("unknown")]
    known = [n for n in routes.placements.names if n not in unknown]
    problems += [Problem("the engine does not know it", f"tensor {name!r}", do=suggest(name, known)) for name in unknown]
    return problems


def _hint(parameter: str, manifest: Manifest) -> str:
    return suggest(parameter, manifest.tensors) or "offer the checkpoint's tensors that it is made of"


__all__ = ["RouteError", "Targets", "build_targets", "live_tensors"]
