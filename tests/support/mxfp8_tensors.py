"""MXFP8 of tensors, by the product's own tables of moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.mxfp8_layouts import stored_for
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import Stored, layout_of
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule
from vllm_refit_ext.kernels.moves import At, QuantizeMove, ShuffleMove, Stack, contiguous, strided
from vllm_refit_ext.kernels.table import Backend, Table, check_finite

Pair = tuple[torch.Tensor, torch.Tensor]
"""(codes or values, scales), bytes of any one-byte dtype."""


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


def _align(tensor: torch.Tensor) -> int:
    return min(16, tensor.data_ptr() & -tensor.data_ptr()) if tensor.data_ptr() else 16


def _alignment(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    return {i: _align(t) for i, t in enumerate(tensors)}
