"""The moves that a table of kernels executes: plain data, positions relative to bound buffers, no addresses.

A buffer is a run of device memory, named by its number; the addresses come with `Table.bind` and may change between refits.
Sizes and positions count elements, offsets and strides count bytes (as in `core.placement`).
"""

from __future__ import annotations

import msgspec
import torch

from vllm_refit_ext.core.dtypes import CASTS, itemsize
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import Stored, layout_of
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule, check_k, check_rule

BYTE_DTYPES = frozenset({"uint8", "float8_e4m3fn", "float8_e8m0fnu"})


class At(msgspec.Struct, frozen=True):
    """A place: `offset` bytes into buffer number `buffer`."""

    buffer: int
    offset: int = 0


class Strided(msgspec.Struct, frozen=True):
    """A box of elements in memory: `shape` elements, `strides` bytes (not negative), of `dtype` (torch's name)."""

    at: At
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        size = itemsize(self.dtype)
        if (
            len(self.shape) != len(self.strides)
            or any(s < 0 or s % size for s in self.strides)
            or self.at.offset % size
            or self.at.offset < 0
        ):
            raise LayoutError(
                "not a box of whole elements",
                got=f"shape {self.shape}, strides {self.strides} bytes at byte {self.at.offset}",
                wanted=f"multiples of {size} bytes ({self.dtype})",
            )

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one, 0 when empty."""
        if 0 in self.shape:
            return 0
        return sum(s * (n - 1) for n, s in zip(self.shape, self.strides, strict=True)) + itemsize(self.dtype)


def contiguous(at: At, dtype: str, shape: tuple[int, ...]) -> Strided:
    """A row-major box."""
    strides, step = [], itemsize(dtype)
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return Strided(at, dtype, shape, tuple(reversed(strides)))


class Stack(msgspec.Struct, frozen=True):
    """`count` MXFP8 matrices of equal size, one after another, stored in `layout`: an expert tensor, or one linear.

    `values` and `scales` say where the first matrix's bytes begin.
    """

    layout: str
    values: At
    scales: At
    stored: Stored
    count: int = 1

    def __post_init__(self) -> None:
        layout_of(self.layout).check(self.stored)

    @property
    def value_bytes(self) -> int:
        """Bytes of one matrix's values."""
        return self.stored.rows * self.stored.cols

    @property
    def scale_bytes(self) -> int:
        """Bytes of one matrix's scales, filling included."""
        size = 1
        for n in layout_of(self.layout).scale_shape(self.stored):
            size *= n
        return size

    def check_box(self, shape: tuple[int, ...], start: tuple[int, ...], name: str, block: int = 1) -> None:
        """Raise LayoutError unless a box [rows, K] or [matrices, rows, K] at `start` lies in the stack on block borders.

        `start` is (row, k) of the first matrix or (matrix, row, k). With `block` = 32, `shape` and `start` count scale blocks.
        """
        bounds = (self.count, self.stored.rows, self.stored.cols // block)
        size, first = size3(shape), start3(start)
        fits = 2 <= len(shape) <= len(start) <= 3 or (len(start) == 2 and size[0] == 1)
        if not fits or any(s < 0 or s + n > b for n, s, b in zip(size, first, bounds, strict=True)):
            raise LayoutError(
                "the box does not lie in the stored matrices",
                where=name,
                got=f"size {shape} at {start}",
                wanted=f"inside {bounds}",
            )
        if block == 1 and size[2]:
            check_k(size[2], name)
        if block == 1 and first[2] % BLOCK:
            raise LayoutError(
                "the box cuts a block along K", where=name, got=f"K starts at {first[2]}", wanted="a multiple of 32"
            )


def size3(size: tuple[int, ...]) -> tuple[int, ...]:
    """A size of two dimensions as one of three."""
    return (1,) * (3 - len(size)) + size


def start3(start: tuple[int, ...]) -> tuple[int, ...]:
    """A position (row, k) as (matrix 0, row, k)."""
    return (0,) * (3 - len(start)) + start


class CopyMove(msgspec.Struct, frozen=True):
    """Copy `source` to `target`: equal shapes; equal item sizes (raw bytes) or a pair of `core.dtypes.CASTS` (a cast)."""

    source: Strided
    target: Strided
    name: str = ""

    def __post_init__(self) -> None:
        a, b = self.source, self.target
        if a.shape != b.shape:
            raise LayoutError("source and target differ in shape", where=self.name, got=a.shape, wanted=b.shape)
        raw = a.dtype == b.dtype or (itemsize(a.dtype) == itemsize(b.dtype) and {a.dtype, b.dtype} <= BYTE_DTYPES)
        if not raw and not self.casts:
            raise LayoutError(
                "no such cast",
                where=self.name,
                got=f"{a.dtype} to {b.dtype}",
                wanted="equal dtypes, or a cast between float types",
            )

    @property
    def casts(self) -> bool:
        """Whether values are converted."""
        return (self.source.dtype, self.target.dtype) in CASTS


class QuantizeMove(msgspec.Struct, frozen=True):
    """Quantise `source` [rows, K] or [matrices, rows, K] (bfloat16 or float32) into `target` at the canonical position `start`.

    `start` is (row, k) or (matrix, row, k), in elements of the stored matrix, padding included.
    """

    source: Strided
    target: Stack
    start: tuple[int, ...]
    rule: Rule = "ceil"
    name: str = ""

    def __post_init__(self) -> None:
        check_rule(self.rule)
        if self.source.dtype not in ("bfloat16", "float32"):
            raise LayoutError("no quantiser for this dtype", where=self.name, got=self.source.dtype, wanted="bfloat16 or float32")
        self.target.check_box(self.source.shape, self.start, self.name)


class ShuffleMove(msgspec.Struct, frozen=True):
    """Move canonical `codes` [..., rows, K] and `scales` [..., rows, K/32] (bytes) into `target` at `start`; with `inverse`,
    read the same box of `target` back into `codes` and `scales`. The last dimensions are contiguous."""

    codes: Strided
    scales: Strided
    target: Stack
    start: tuple[int, ...]
    inverse: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for what, box in (("codes", self.codes), ("scales", self.scales)):
            if box.dtype not in BYTE_DTYPES or box.strides[-1:] != (1,):
                raise LayoutError(
                    f"{what} must be bytes, contiguous along K",
                    where=self.name,
                    got=f"{box.dtype}, strides {box.strides}",
                    wanted="uint8, last stride 1",
                )
        self.target.check_box(self.codes.shape, self.start, self.name)
        wanted = (*self.codes.shape[:-1], self.codes.shape[-1] // BLOCK)
        if self.scales.shape != wanted:
            raise LayoutError("scales don't fit the codes", where=self.name, got=self.scales.shape, wanted=wanted)


class DigestMove(msgspec.Struct, frozen=True):
    """Digest a box of a checkpoint tensor of `shape` that begins at `start`; moves with the same `out` add up.

    `content` is the box itself (elements of 1, 2, 4 or 8 bytes), or a `StoredBox` of an engine's layout.
    """

    content: Strided | StoredBox
    shape: tuple[int, ...]
    start: tuple[int, ...]
    out: int = 0
    name: str = ""


class StoredBox(msgspec.Struct, frozen=True):
    """The canonical bytes of a box of a stack: its codes [..., rows, K], or with `scales` its scale bytes [..., rows, K/32].

    `start` and `size` have 2 or 3 dimensions and count values or scale blocks of the stored matrix.
    """

    stack: Stack
    start: tuple[int, ...]
    size: tuple[int, ...]
    scales: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The box's size, as `Strided.shape`."""
        return self.size


Move = CopyMove | QuantizeMove | ShuffleMove


def strided(tensor: torch.Tensor, buffer: int) -> Strided:
    """The box of a tensor's elements when `buffer` is bound to the tensor itself."""
    size = tensor.element_size()
    return Strided(
        At(buffer), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(s * size for s in tensor.stride())
    )
