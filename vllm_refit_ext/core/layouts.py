"""Where a parameter's canonical MXFP8 element lives after the engine's post-load step.

Canonical is the checkpoint's form: codes [N, K] and scales [N, K/32], a fused `w13` as [gate rows; up rows]. Every layout here is
separable: the byte offset of an element is a function of its row plus a function of its column, for values and for scales. So a
layout is four small functions, and the reference, its torch form, the Triton kernels and the read-back are all built on them.

    plain          values [N, K], scales [N, K/32], as in the checkpoint
    linear_128x4   values as they are; scale bytes in blocks of 128 rows x 4 columns (FlashInfer CUTLASS and CuTe-DSL linear)
    trtllm_moe     rows permuted (gate and up interleaved when gated), scales permuted and blocked (FlashInfer TRT-LLM MoE)
    marlin         values in 16 x 64 tiles [K/16, 16 N], scales [K/32, N] permuted (Marlin W8A16, linear and MoE)

Sources of the formulas: FlashInfer's `get_shuffle_matrix_a_row_indices`, `get_reorder_rows_for_gated_act_gemm_row_indices` and
`block_scale_interleave`, vLLM's `swizzle_mxfp8_scale`, `gptq_marlin_repack` and `marlin_permute_scales`; the tests compare with
those functions themselves. An engine may hold a matrix padded (`Stored`); padding is a property of the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.mxfp8 import BLOCK, check_k

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stored:
    """One matrix as the engine holds it: `rows` x `cols` elements, padding included.

    `gated` says that the rows are two halves, gate rows then up rows, each padded on its own.
    """

    rows: int
    cols: int
    gated: bool = False

    @property
    def blocks(self) -> int:
        """Scale blocks a row has, K/32."""
        return self.cols // BLOCK

    @property
    def half(self) -> int:
        """Rows of the gate half, 0 when not gated."""
        return self.rows // 2 if self.gated else 0


Offsets = Callable[[Stored, Int], Int]
Shape = Callable[[Stored], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout. Offsets are bytes from the matrix's first byte; `row` and `k` are canonical indices into the stored matrix.

    value_row(stored, row) + value_col(stored, k) and scale_row(stored, row) + scale_col(stored, block) give offsets; value_shape
    and scale_shape are the uint8 shapes of one matrix. `row_multiple` divides the stored rows.
    """

    name: str
    row_multiple: int
    value_row: Offsets
    value_col: Offsets
    scale_row: Offsets
    scale_col: Offsets
    value_shape: Shape
    scale_shape: Shape

    def check(self, stored: Stored) -> None:
        """Raise LayoutError unless this layout takes a matrix of this size."""
        check_k(stored.cols, self.name)
        multiple = self.row_multiple * (2 if stored.gated and self.row_multiple == 1 else 1)
        if stored.rows <= 0 or stored.rows % multiple:
            raise LayoutError(
                "rows don't fit the layout",
                where=self.name,
                got=f"{stored.rows} rows",
                wanted=f"a multiple of {multiple}",
                do="give the padded size",
            )


def _ceil(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _blocked_scale_row(stored: Stored, r: Int) -> Int:
    """Row part of the 128 x 4 block order: blocks of 512 bytes, row-major; inside, 32 groups of four rows 32 apart."""
    return (r // 128) * (_ceil(stored.blocks, 4) * 128) + (r % 32) * 16 + (r % 128) // 32 * 4


def _blocked_scale_col(stored: Stored, c: Int) -> Int:
    return (c // 4) * 512 + c % 4


def _blocked_scale_shape(stored: Stored) -> tuple[int, ...]:
    return (_ceil(stored.rows, 128) * _ceil(stored.blocks, 4),)


def shuffled_row(stored: Stored, r: Int) -> Int:
    """Destination row of canonical row `r` in `trtllm_moe`: up and gate rows alternate, then each 32 rows are dealt by fours."""
    half = stored.half
    if half:
        r = np.where(r < half, 2 * r + 1, 2 * (r - half))
    return r // 32 * 32 + r % 4 * 8 + r % 32 // 4


def _marlin_value_row(stored: Stored, n: Int) -> Int:
    # Byte of n inside a 16 x 64 tile: 4 bytes per k pair, so 8 neighbours along n that lie 8 apart share 32 bytes.
    return n // 64 * 1024 + n % 8 * 128 + n % 64 // 8 * 4


def _marlin_value_col(stored: Stored, k: Int) -> Int:
    # A 4-byte word holds k = 2i + {0, 8, 1, 9} of its row.
    return k // 16 * (16 * stored.rows) + k % 8 // 2 * 32 + k % 2 * 2 + k % 16 // 8


def _marlin_scale_row(stored: Stored, n: Int) -> Int:
    j = n % 64 // 8
    # Positions 1 and 2 of each four are swapped, as the kernel's E8M0 conversion expects.
    return n // 64 * 64 + n % 8 * 8 + j // 4 * 4 + j % 2 * 2 + j % 4 // 2


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            name="plain",
            row_multiple=1,
            value_row=lambda stored, r: r * stored.cols,
            value_col=lambda stored, k: k,
            scale_row=lambda stored, r: r * stored.blocks,
            scale_col=lambda stored, c: c,
            value_shape=lambda stored: (stored.rows, stored.cols),
            scale_shape=lambda stored: (stored.rows, stored.blocks),
        ),
        Layout(
            name="linear_128x4",
            row_multiple=1,
            value_row=lambda stored, r: r * stored.cols,
            value_col=lambda stored, k: k,
            scale_row=_blocked_scale_row,
            scale_col=_blocked_scale_col,
            value_shape=lambda stored: (stored.rows, stored.cols),
            scale_shape=_blocked_scale_shape,
        ),
        Layout(
            name="trtllm_moe",
            row_multiple=128,
            value_row=lambda stored, r: shuffled_row(stored, r) * stored.cols,
            value_col=lambda stored, k: k,
            scale_row=lambda stored, r: _blocked_scale_row(stored, shuffled_row(stored, r)),
            scale_col=_blocked_scale_col,
            value_shape=lambda stored: (stored.rows, stored.cols),
            scale_shape=_blocked_scale_shape,
        ),
        Layout(
            name="marlin",
            row_multiple=64,
            value_row=_marlin_value_row,
            value_col=_marlin_value_col,
            scale_row=_marlin_scale_row,
            scale_col=lambda stored, g: g * stored.rows,
            value_shape=lambda stored: (stored.cols // 16, 16 * stored.rows),
            scale_shape=lambda stored: (stored.blocks, stored.rows),
        ),
    )
}


def layout_of(name: str) -> Layout:
    """The layout called `name`. Raises LayoutError for a layout that is not known exactly: it must not be guessed."""
    if name not in LAYOUTS:
        raise LayoutError(
            "unknown layout", got=repr(name), wanted=", ".join(LAYOUTS), do="let the engine reload this parameter itself"
        )
    return LAYOUTS[name]
