"""From recorded routes to the boxes that a rank asks for: in place, quantised or dequantised on the way, or staged for the
reload."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vllm_refit_ext.core.coded import CHECKPOINT, CHECKPOINT_DEQUANTISED, DEQUANTISED, PLAIN, SCALE, SCALE_OF, Coding
from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.manifest import Manifest
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.placement import Buffer, Int, Placement, Placements, concatenate
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.receiver.recording import Recording
from vllm_refit_ext.receiver.routes.table import Routes

Box = tuple[tuple[int, ...], tuple[int, ...]]


def closure(routes: Routes, unknown: Mapping[str, str], refused: Mapping[str, str]) -> dict[str, str]:
    """Names to reload, with the reason: every name of a module that holds an unknown parameter, and so on until nothing is added.

    unknown: parameter -> reason. refused: HF name -> reason.
    """
    table = routes.placements
    owner = [b.name.rpartition(".")[0] for b in table.buffers]
    modules_of: dict[str, set[str]] = {}
    names_of: dict[str, set[str]] = {}
    pairs = np.unique(np.stack([table.tensor, table.buffer], axis=1), axis=0) if len(table) else np.zeros((0, 2), np.int64)
    for t, b in pairs:
        modules_of.setdefault(table.names[t], set()).add(owner[b])
        names_of.setdefault(owner[b], set()).add(table.names[t])
    reload = dict(routes.computed)
    pending = [(b.name.rpartition(".")[0], f"{b.name}: {unknown[b.name]}") for b in table.buffers if b.name in unknown]
    for name, reason in refused.items():
        reload.setdefault(name, reason)
        pending += [(module, f"{name} is shared with {module}: {reason}") for module in modules_of.get(name, ())]
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


def unaligned(recording: Recording, stored: Mapping[str, StoredParam], manifest: Manifest) -> dict[str, str]:
    """HF names whose boxes in MXFP8 parameters no move can quantise or shuffle, with the reason."""
    table, reasons = recording.routes.placements, dict[str, str]()
    for i, buffer in enumerate(table.buffers):
        if buffer.name not in stored:
            continue
        rows = np.flatnonzero(table.buffer == i)
        item, k = ITEMSIZE[buffer.dtype], buffer.shape[-1]
        steps, extent = table.strides[rows] // item, table.hi[rows] - table.lo[rows]
        along = (steps % k != 0) & (extent > 1)
        whole = (table.offset[rows] // item % BLOCK == 0) & (along.sum(axis=1) == 1)
        whole &= (np.where(along, steps, 1) == 1).all(axis=1) & (np.where(along, extent, 0) % BLOCK == 0).all(axis=1)
        for row, good in zip(rows, whole, strict=True):
            name = table.names[table.tensor[row]]
            depth = len(manifest.tensors[name].shape)
            if not good:
                reasons.setdefault(name, f"its part of {buffer.name} cuts blocks of {BLOCK} along K")
            elif name in recording.partners and (table.strides[row, depth - 1] != item or table.lo[row, depth - 1] % BLOCK):
                reasons.setdefault(name, f"its scales do not lie along K of {buffer.name}")
    for t, b in _pairs(table)[0]:
        name, dtype = table.names[t], table.buffers[b].dtype
        if table.buffers[b].name in stored and name not in recording.partners and name not in recording.rerouted:
            offered = manifest.tensors[name].dtype
            if offered != dtype:
                reasons.setdefault(name, f"it is sent as {offered} and the engine quantises from {dtype}")
    return reasons


def place(
    recording: Recording, reload: Mapping[str, str], stored: Mapping[str, StoredParam], manifest: Manifest, rank: int
) -> Placements:
    """The boxes of this rank: those of `reload` in buffers of checkpoint shape, the others in live parameters."""
    table = recording.routes.placements
    if not reload and not stored and not recording.partners:
        return table
    names = np.array(table.names, object)
    reloaded = np.array([n in reload for n in names], bool)[table.tensor] if len(table) else np.zeros(0, bool)
    kept = _in_parameters(table.select(~reloaded), recording, stored, manifest)
    return concatenate([kept, _for_reload(table.select(reloaded), recording, reload, manifest, rank)])


def _in_parameters(table: Placements, recording: Recording, stored: Mapping[str, StoredParam], manifest: Manifest) -> Placements:
    """Rows of live parameters, each under the dtype that is sent, and a row of scales beside each row of codes."""
    partnered = np.array([n in recording.partners for n in table.names], bool)
    rerouted = np.array([n in recording.rerouted for n in table.names], bool)
    kinds: dict[tuple[int, str, str], int] = {}
    buffers: list[Buffer] = []
    buffer = np.zeros(len(table), np.int64)
    scale = np.ones(len(table), np.int64)
    grow = np.ones(len(table), np.int64)
    pairs, which = _pairs(table)
    kind = np.zeros(len(pairs), np.int64)
    was = np.ones(len(pairs), np.int64)
    now = np.ones(len(pairs), np.int64)
    for p, (t, b) in enumerate(pairs):
        old, name = table.buffers[b], table.names[t]
        dtype, layout = old.dtype, PLAIN
        if old.name in stored:
            rule = "ceil" if partnered[t] or rerouted[t] else stored[old.name].coding.rule
            dtype, layout = manifest.tensors[name].dtype, str(Coding(stored[old.name].coding.layout, rule))
        elif partnered[t]:
            dtype, layout = "float8_e4m3fn", f"{DEQUANTISED}:{old.dtype}"
        key = (int(b), dtype, layout)
        if key not in kinds:
            kinds[key] = len(buffers)
            buffers.append(Buffer(old.name, old.rank, dtype, old.shape, layout))
        kind[p], was[p], now[p] = kinds[key], ITEMSIZE[old.dtype], ITEMSIZE[dtype]
    if len(table):
        buffer, scale, grow = kind[which], was[which], now[which]
    codes = Placements(
        table.names,
        buffers,
        table.tensor,
        buffer,
        table.lo,
        table.hi,
        table.offset // scale * grow,
        table.strides // scale[:, None] * grow[:, None],
    )
    chosen = [p for p, (t, _) in enumerate(pairs) if partnered[t]]
    scales = (
        [_scale_rows(table, which, {p: (pairs[p][0], buffers[kind[p]]) for p in chosen}, recording, manifest)] if chosen else []
    )
    return concatenate([codes, *scales])


def _pairs(table: Placements) -> tuple[list[tuple[int, int]], Int]:
    """The distinct (tensor, buffer) of a table, and for each row the number of its own."""
    if not len(table):
        return [], np.zeros(0, np.int64)
    pairs, which = np.unique(np.stack([table.tensor, table.buffer], axis=1), axis=0, return_inverse=True)
    return [(int(t), int(b)) for t, b in pairs], which.reshape(-1)


def _scale_rows(
    table: Placements, which: Int, pairs: Mapping[int, tuple[int, Buffer]], recording: Recording, manifest: Manifest
) -> Placements:
    """Boxes of scales that go with rows of codes, in buffers of the sent scales' own shape. which: int64 [n], the pair of
    each row. pairs: those with scales: the tensor, and the buffer of codes."""
    partners = [recording.partners[table.names[t]] for t, _ in pairs.values()]
    shapes = [manifest.tensors[name].shape for name in partners]
    buffers = [
        Buffer(f"{codes.name}{SCALE_OF}{name}", codes.rank, "uint8", shape, codes.layout)
        for name, shape, (_, codes) in zip(partners, shapes, pairs.values(), strict=True)
    ]
    number = np.full(int(which.max()) + 1, -1)
    number[list(pairs)] = np.arange(len(pairs))
    rows = np.flatnonzero(number[which] >= 0)
    place, depth = number[which[rows]], table.lo.shape[1]
    last, row = np.array([len(shape) - 1 for shape in shapes])[place], np.arange(len(rows))
    lo, hi = table.lo[rows].copy(), table.hi[rows].copy()
    lo[row, last] //= BLOCK
    hi[row, last] = -(-hi[row, last] // BLOCK)
    boxes = np.unique(np.concatenate([place[:, None], lo, hi], axis=1), axis=0)
    place, lo, hi = boxes[:, 0], boxes[:, 1 : 1 + depth], boxes[:, 1 + depth :]
    strides = np.array([[*row_strides(shape), *([0] * (depth - len(shape)))] for shape in shapes], np.int64)[place]
    names = list(dict.fromkeys(partners))
    index = {name: i for i, name in enumerate(names)}
    tensor = np.array([index[name] for name in partners], np.int64)[place]
    return Placements(names, buffers, tensor, place, lo, hi, (lo * strides).sum(axis=1), strides)


def _for_reload(table: Placements, recording: Recording, reload: Mapping[str, str], manifest: Manifest, rank: int) -> Placements:
    """The reloaded names, in buffers of checkpoint shape, module by module, so that a reload holds one at a time; only what the
    routes read is asked for, unless a loader computes."""
    boxes: dict[str, set[Box]] = {name: set() for name in reload}
    created: dict[str, str] = {}
    for row in table.rows():
        n = len(manifest.tensors[row.tensor].shape)
        boxes[row.tensor].add((row.lo[:n], row.hi[:n]))
        created[row.tensor] = table.buffers[row.buffer].dtype
    buffers: list[Buffer] = []
    rows: list[Placement] = []
    modules = module_of(recording.routes)
    order = {module: i for i, module in enumerate(dict.fromkeys(modules.values()))}
    for name in sorted((n for n in manifest.tensors if n in boxes), key=lambda n: order.get(modules.get(n, ""), -1)):
        spec = manifest.tensors[name]
        whole = ((0,) * len(spec.shape), spec.shape)
        wanted = _separate(boxes[name]) if name not in recording.routes.computed else [whole]
        layout, partner = CHECKPOINT, recording.partners.get(name, "")
        scale = name + SCALE  # the name under which the engine's loader takes scales
        if partner and name not in recording.rerouted:
            layout = f"{CHECKPOINT_DEQUANTISED}:{created.get(name, recording.usual)}"
            scale = f"{name}{SCALE_OF}{partner}"
        buffers.append(Buffer(name, rank, spec.dtype, spec.shape, layout))
        rows += _row_major(name, len(buffers) - 1, spec.shape, spec.dtype, wanted)
        if partner:
            other = manifest.tensors[partner]
            buffers.append(Buffer(scale, rank, other.dtype, other.shape, layout))
            outward = {((*lo[:-1], lo[-1] // BLOCK), (*hi[:-1], -(-hi[-1] // BLOCK))) for lo, hi in wanted}
            rows += _row_major(partner, len(buffers) - 1, other.shape, other.dtype, _separate(outward))
    return Placements.from_rows(buffers, rows)


def module_of(routes: Routes) -> dict[str, str]:
    """HF name -> the first module that it fills, in the model's order."""
    found: dict[str, str] = {}
    for parameter, (_, names) in routes.filled.items():
        for name in names:
            found.setdefault(name, parameter.rpartition(".")[0])
    return found


def _row_major(name: str, buffer: int, shape: tuple[int, ...], dtype: str, boxes: list[Box]) -> list[Placement]:
    strides = tuple(s * ITEMSIZE[dtype] for s in row_strides(shape))
    return [Placement(name, buffer, lo, hi, sum(a * s for a, s in zip(lo, strides, strict=True)), strides) for lo, hi in boxes]


def _separate(boxes: set[Box]) -> list[Box]:
    """Boxes of one tensor that share no element; boxes that overlap are replaced by the box around them."""
    found: list[Box] = []
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
