"""Starts the Triton programs. The one module that needs Triton; import it when a kernel is about to run."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
import triton.language as tl

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.kernels.jit.copy import copy_units
from vllm_refit_ext.kernels.jit.digest import digest_tiles
from vllm_refit_ext.kernels.jit.marlin import quantize_marlin, shuffle_marlin
from vllm_refit_ext.kernels.jit.rows import quantize_rows, shuffle_rows
from vllm_refit_ext.kernels.pack import Key
from vllm_refit_ext.kernels.tuning import Tile

INTERPRETED = type(copy_units).__name__ == "InterpretedFunction"
"""Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1 when Triton was imported)."""

_DTYPES = {
    "bfloat16": tl.uint16,  # its bits: kernels widen and round them in integers
    "float16": tl.float16,
    "float32": tl.float32,
    **{f"int{n}": getattr(tl, f"int{n}") for n in (8, 16, 32, 64)},
    **{f"uint{n}": getattr(tl, f"uint{n}") for n in (8, 16, 32)},
}
KERNELS = {
    "quantize_rows": quantize_rows,
    "quantize_marlin": quantize_marlin,
    "shuffle_rows": shuffle_rows,
    "shuffle_marlin": shuffle_marlin,
    "copy_units": copy_units,
    "digest_tiles": digest_tiles,
}


def constants(key: Key, tile: Tile, hardware: bool) -> dict[str, object]:
    """The constexpr arguments of a launch."""
    values = dict(key)
    name = str(values.pop("kernel"))
    for field in ("DTYPE", "WORD", "READ", "WRITE"):
        if field in values:
            values[field] = _DTYPES[str(values[field])]
    if name == "copy_units":
        values["UNITS"] = tile.rows * tile.cols
    elif name.endswith("marlin"):
        values["BK"] = tile.cols
        values.pop("LAYOUT", None)
    else:
        values |= {"BR": tile.rows, "BK": tile.cols}
    if name.startswith("quantize"):
        values["HARDWARE"] = hardware
    return values


def launch(
    key: Key, tile: Tile, count: int, table: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, run: bool = True
) -> None:
    """Run one group: `count` programs over `table` int64 [rows, 16] and `tiles` int32 [count]. `out` takes flags or digests.
    run: False only compiles what a run of the same arguments would.

    Raises LayoutError for CPU tensors without the interpreter.
    """
    if count == 0:
        return
    if table.device.type != "cuda" and not INTERPRETED:
        raise LayoutError(
            "Triton has no CPU target", got=table.device, wanted="a GPU, or TRITON_INTERPRET=1", do='use backend="torch"'
        )
    name = str(dict(key)["kernel"])
    hardware = not INTERPRETED and torch.cuda.get_device_capability(table.device) >= (8, 9)
    outs = () if name.startswith(("shuffle", "copy")) else (out,)
    with torch.cuda.device(table.device) if table.device.type == "cuda" else nullcontext():
        kernel = KERNELS[name]
        start = kernel[(count,)] if run else functools.partial(kernel.warmup, grid=(count,))
        start(table, tiles, *outs, **constants(key, tile, hardware), num_warps=tile.warps)
