"""MXFP8 on tensors: thin functions over tables, for callers that hold tensors and not a plan (the writer uses `Table`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import Stored, layout_of, stored_for
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule
from vllm_refit_ext.kernels.moves import At, QuantizeMove, ShuffleMove, Stack, Strided, contiguous
from vllm_refit_ext.kernels.table import Backend, Table

Pair = tuple[torch.Tensor, torch.Tensor]
"""(codes or values, scales), bytes of any one-byte dtype."""

_Geometry = tuple[tuple[int, ...], tuple[int, ...], int, str]


def quantize(
    tensors: Sequence[torch.Tensor],
    *,
    layout: str = "plain",
    gated: bool = False,
    rule: Rule = "ceil",
    names: Sequence[str] = (),
    backend: Backend = "auto",
) -> list[Pair]:
    """Quantise bfloat16 or float32 tensors [N, K] or [E, N, K] in one launch a dtype, straight into `layout`.

    Returns new uint8 tensors (values, scales) in the shapes of `core.layouts`, each with the source's leading dimension; "plain"
    gives codes [..., N, K] and scales [..., N, K/32]. Rows are padded to what the layout takes, with zero bytes.

    Raises LayoutError for a shape, dtype or stride that the kernels don't take, and for NaN or Inf, with the tensor's name.
    """
    if not tensors:
        return []
    form, moves, buffers, out = layout_of(layout), [], [], []
    for i, x in enumerate(tensors):
        name = names[i] if names else f"tensor {i}"
        if x.ndim not in (2, 3):
            raise LayoutError("quantize takes matrices", where=name, got=f"shape {tuple(x.shape)}", wanted="[N, K] or [E, N, K]")
        stored = stored_for(layout, x.shape[-2], x.shape[-1], gated=gated)
        if gated and stored.rows != x.shape[-2]:
            raise LayoutError(
                "padded halves need two moves",
                where=name,
                got=f"{x.shape[-2]} rows",
                wanted=f"{stored.rows} rows",
                do="use a Table",
            )
        shapes = form.value_shape(stored), form.scale_shape(stored)
        pair = tuple(torch.zeros((*x.shape[:-2], *shape), dtype=torch.uint8, device=x.device) for shape in shapes)
        stack = Stack(layout, At(3 * i + 1), At(3 * i + 2), stored, x.shape[0] if x.ndim == 3 else 1)
        moves.append(QuantizeMove(strided(x, 3 * i), stack, (0,) * x.ndim, rule, name))
        buffers += [x, *pair]
        out.append((pair[0], pair[1]))
    table = Table(moves, tensors[0].device, alignment=_alignment(buffers), backend=backend)
    table.bind(buffers)
    table.launch()
    check_finite(table)
    return out


def check_finite(table: Table) -> None:
    """Raise LayoutError that names the tensors in which the table's last launch met NaN or Inf. Waits for the stream."""
    bad = table.nonfinite()
    if bad:
        names = sorted({table.moves[i].name or f"move {i}" for i in bad})
        raise LayoutError(
            "NaN or Inf in a tensor to quantise", where=", ".join(names), got=f"{len(names)} tensor(s)", wanted="finite values"
        )


def moe_shuffle(
    w13: Pair,
    w2: Pair,
    *,
    down: Pair | Sequence[Pair],
    up: Pair | Sequence[Pair],
    gate: Pair | Sequence[Pair] | None = None,
    fused: bool = False,
    experts: Sequence[int] | None = None,
    layout: str = "trtllm_moe",
    backend: Backend = "auto",
) -> None:
    """Shuffle canonical MXFP8 experts into an engine's buffers: values and scales of a whole layer in one launch.

    `w13` and `w2` are the engine's (values, scales), stacks of E matrices in `layout`, contiguous bytes. Sources are one-byte
    tensors: a pair of stacks (codes [e, rows, K], scales [e, rows, K/32]), or e pairs of matrices. `up` and `gate` [I, H] fill
    the halves of a gated w13; without `gate`, `up` is a w13 without a gate, or with `fused` the canonical [gate; up] in one.
    `experts` lists the e experts of the engine that they belong to (default: the first e); none is allowed.

    There is no scratch. The table is kept for the next layer of the same shapes; only addresses are sent. Raises LayoutError for
    shapes that don't fit and for sources that share memory with the engine's buffers.
    """
    parts = {"up": _pairs(up), "down": _pairs(down), **({"gate": _pairs(gate)} if gate is not None else {})}
    count = len(parts["down"])
    chosen = tuple(range(count) if experts is None else experts)
    if any(len(p) != len(chosen) for p in parts.values()):
        raise LayoutError(
            "experts and sources differ in number", got={k: len(v) for k, v in parts.items()}, wanted=f"{len(chosen)} each"
        )
    if not chosen:
        return
    gated = fused or gate is not None
    sources = [t for name in sorted(parts) for pair in parts[name] for t in pair]
    buffers = [*w13, *w2, *sources]
    geometry = tuple((tuple(t.shape), tuple(t.stride()), _align(t), str(t.dtype).removeprefix("torch.")) for t in buffers)
    table = _moe_table(geometry, tuple(sorted(parts)), chosen, gated, layout, w13[0].device, backend)
    table.bind(buffers)
    table.launch()


@lru_cache(maxsize=16)
def _moe_table(
    geometry: tuple[_Geometry, ...],
    parts: tuple[str, ...],
    experts: tuple[int, ...],
    gated: bool,
    layout: str,
    device: torch.device,
    backend: Backend,
) -> Table:
    """The table of `moe_shuffle` for one geometry of (shape, strides, alignment, dtype) a buffer."""
    stacks = {}
    for first, name in ((0, "w13"), (2, "w2")):
        shape = geometry[first][0]
        a, b = shape[-2:]
        stored = Stored(b // 16, a * 16, gated and first == 0) if layout == "marlin" else Stored(a, b, gated and first == 0)
        stacks[name] = Stack(layout, At(first), At(first + 1), stored, shape[0])
        for index, nbytes in ((first, stacks[name].value_bytes), (first + 1, stacks[name].scale_bytes)):
            size = 1
            for n in geometry[index][0]:
                size *= n
            if size != nbytes * shape[0] or geometry[index][1] != _row_major(geometry[index][0]):
                raise LayoutError(
                    "an engine buffer is not the stack of its layout",
                    where=name,
                    got=geometry[index][:2],
                    wanted=f"{nbytes * shape[0]} contiguous bytes",
                )
    moves = []
    number = 4
    for part in parts:
        for expert in experts:
            codes, scales = (Strided(At(number + i), g[3], g[0], g[1]) for i, g in enumerate(geometry[number : number + 2]))
            target = stacks["w2" if part == "down" else "w13"]
            row = target.stored.half if part == "up" and "gate" in parts else 0
            moves.append(ShuffleMove(codes, scales, target, (expert, row, 0), name=f"{part} of expert {expert}"))
            number += 2
    return Table(moves, device, alignment={i: g[2] for i, g in enumerate(geometry)}, backend=backend)


def to_canonical(
    layout: str, values: torch.Tensor, scales: torch.Tensor, *, gated: bool = False, backend: Backend = "auto"
) -> Pair:
    """Read a layout back: codes [..., N, K] and scales [..., N, K/32], uint8, padding included. The inverse of the writers.

    `values` and `scales` are the engine's contiguous bytes, one matrix [.., ..] or a stack with a leading dimension.
    """
    a, b = values.shape[-2:]
    stored = Stored(b // 16, a * 16, gated) if layout == "marlin" else Stored(a, b, gated)
    lead = tuple(values.shape[:-2])
    stack = Stack(layout, At(0), At(1), stored, lead[0] if lead else 1)
    codes = torch.empty((*lead, stored.rows, stored.cols), dtype=torch.uint8, device=values.device)
    out = torch.empty((*lead, stored.rows, stored.cols // BLOCK), dtype=torch.uint8, device=values.device)
    move = ShuffleMove(
        contiguous(At(2), "uint8", tuple(codes.shape)),
        contiguous(At(3), "uint8", tuple(out.shape)),
        stack,
        (0,) * codes.ndim,
        inverse=True,
    )
    buffers = [values, scales, codes, out]
    table = Table([move], values.device, alignment=_alignment(buffers), backend=backend)
    table.bind(buffers)
    table.launch()
    return codes, out


def strided(tensor: torch.Tensor, buffer: int) -> Strided:
    """The box of a tensor's elements when `buffer` is bound to the tensor itself."""
    size = tensor.element_size()
    return Strided(
        At(buffer), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(s * size for s in tensor.stride())
    )


def _pairs(sources: Pair | Sequence[Pair]) -> list[Pair]:
    """One (codes, scales) an expert."""
    if len(sources) == 2:
        first, second = sources
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return list(zip(first.unbind(0), second.unbind(0), strict=True))
    return [(pair[0], pair[1]) for pair in sources]


def _align(tensor: torch.Tensor) -> int:
    return min(16, tensor.data_ptr() & -tensor.data_ptr()) if tensor.data_ptr() else 16


def _alignment(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    return {i: _align(t) for i, t in enumerate(tensors)}


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
