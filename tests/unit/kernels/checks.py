"""What every way to run the kernels must satisfy: torch reference, Triton's interpreter and a GPU share these checks.

A `Way` says where and how. Each check fills targets with a pattern, runs moves, and compares every byte with the numpy reference,
so bytes outside the moved boxes are checked too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.support import mxfp8_layouts
from vllm_refit_ext.core import layouts, mxfp8
from vllm_refit_ext.core.digest import digest
from vllm_refit_ext.core.layouts import Stored
from vllm_refit_ext.kernels.moves import (
    At,
    CopyMove,
    DigestMove,
    QuantizeMove,
    ShuffleMove,
    Stack,
    StoredBox,
    Strided,
    contiguous,
)
from vllm_refit_ext.kernels.table import Table

FILL = 0xA5
LAYOUTS = list(layouts.LAYOUTS)


@dataclass(frozen=True)
class Way:
    """A device and a backend."""

    device: str
    backend: str

    def run(self, moves, buffers, alignment=None):
        """Execute moves once; returns the table."""
        table = Table(moves, torch.device(self.device), backend=self.backend, alignment=alignment)
        table.bind([b if b.device.type == torch.device(self.device).type else b.to(self.device) for b in buffers])
        table.launch()
        return table


def awkward(shape, dtype, seed=0):
    """Values of every size, zero blocks, subnormals, block maxima at and just above 448 * 2^e."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen)
    blocks = x.view(-1, 32)
    blocks *= torch.exp2(torch.randint(-40, 30, (len(blocks), 1), generator=gen).float())
    for i, value in enumerate((0.0, 448.0, 450.0, 448 * 2.0**40, 2.0**-133, 2.0**-126, 3.0e38)):
        if i < len(blocks):
            blocks[i] = (torch.rand(32, generator=gen) * 2 - 1) * value
            blocks[i, 7] = -value
    return x.to(dtype)


def engine(layout, stored, count, device):
    """(Stack on buffers 1 and 2, values, scales) of an engine's tensor, filled with a pattern."""
    form = layouts.layout_of(layout)
    values = torch.full((count, *form.value_shape(stored)), FILL, dtype=torch.uint8, device=device)
    scales = torch.full((count, *form.scale_shape(stored)), FILL, dtype=torch.uint8, device=device)
    return Stack(layout, At(1), At(2), stored, count), values, scales


def expect(layout, stored, codes, scales, written):
    """Reference bytes of a stack of which only `written` [count, rows, blocks] was moved; the rest holds the pattern."""
    form = layouts.layout_of(layout)
    count = len(codes)
    values = np.full((count, *form.value_shape(stored)), FILL, np.uint8).reshape(count, -1)
    out = np.full((count, *form.scale_shape(stored)), FILL, np.uint8).reshape(count, -1)
    r, k, c = np.arange(stored.rows), np.arange(stored.cols), np.arange(stored.blocks)
    at = form.value_row(stored, r)[:, None] + form.value_col(stored, k)[None, :]
    scale_at = form.scale_row(stored, r)[:, None] + form.scale_col(stored, c)[None, :]
    for m in range(count):
        wide = np.repeat(written[m], 32, axis=-1)
        values[m][at[wide]] = codes[m][wide]
        out[m][scale_at[written[m]]] = scales[m][written[m]]
    return values, out


def compare(values, scales, want):
    """Every byte equal."""
    for got, wanted, what in ((values, want[0], "values"), (scales, want[1], "scales")):
        differ = np.flatnonzero(got.cpu().numpy().reshape(-1) != wanted.reshape(-1))
        assert not differ.size, f"{what}: {differ.size} bytes differ, first at {differ[:5]}"


def cuts(rows, cols, count):
    """Boxes (matrix, row range, column range) that cover most of a stack: odd row cuts, K cuts on blocks, one box left out."""
    r, c = max(1, rows * 2 // 5 | 1), max(32, cols // 64 * 32)
    boxes = [(0, 0, min(r, rows), 0, cols)]
    if r < rows:
        boxes += [(0, r, rows, 0, c)]
        if c < cols and count == 1:
            boxes += [(0, r, rows, c, cols)]
    return boxes + [(m, 0, rows, 0, cols) for m in range(1, count)]


def check_quantize(way, layout, stored, *, gated=False, rule="ceil", dtype=torch.bfloat16, count=1, shift=0):
    """Quantise boxes of a stack into a layout; `shift` elements move the source off its alignment."""
    grid = Stored(*stored, gated)
    x = awkward((count, *stored), dtype)
    size = x.element_size()
    memory = torch.zeros(x.numel() + 8 + shift, dtype=dtype, device=way.device)
    memory[shift : shift + x.numel()] = x.reshape(-1).to(way.device)
    stack, values, scales = engine(layout, grid, count, way.device)
    written = np.zeros((count, grid.rows, grid.blocks), bool)
    moves = []
    for m, r0, r1, c0, c1 in cuts(*stored, count):
        offset = (shift + (m * stored[0] + r0) * stored[1] + c0) * size
        box = Strided(At(0, offset), str(dtype).removeprefix("torch."), (r1 - r0, c1 - c0), (stored[1] * size, size))
        moves.append(QuantizeMove(box, stack, (m, r0, c0), rule))
        written[m, r0:r1, c0 // 32 : c1 // 32] = True
    table = way.run(moves, [memory, values, scales])
    assert table.nonfinite() == []
    codes, bytes_ = mxfp8.quantize(x.float().numpy(), rule)
    compare(values, scales, expect(layout, grid, codes, bytes_, written))


def check_transposed_and_slab(way, layout):
    """A [K, N] source read across, and one three-dimensional box over several experts."""
    grid = Stored(128, 96)
    x = awkward((3, 96, 128), torch.bfloat16).transpose(1, 2)
    stack, values, scales = engine(layout, grid, 4, way.device)
    written = np.zeros((4, 128, 3), bool)
    written[1:4] = True
    box = Strided(At(0), "bfloat16", (3, 128, 96), tuple(2 * s for s in x.stride()))
    way.run([QuantizeMove(box, stack, (1, 0, 0))], [x.to(way.device), values, scales])
    codes, bytes_ = mxfp8.quantize(np.concatenate([np.zeros((1, 128, 96), np.float32), x.float().numpy()]))
    compare(values, scales, expect(layout, grid, codes, bytes_, written))


def check_nonfinite(way, layout):
    """The moves with NaN or Inf are named, their blocks become NaN codes, others are untouched; the next launch is clean."""
    grid = Stored(128, 64)
    x = torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 5, 40], x[2, 127, 0] = float("nan"), float("-inf")
    stack, values, scales = engine(layout, grid, 3, way.device)
    moves = [
        QuantizeMove(Strided(At(0, m * 128 * 64 * 2), "bfloat16", (128, 64), (128, 2)), stack, (m, 0, 0), name=f"expert {m}")
        for m in range(3)
    ]
    source = x.to(way.device)
    table = way.run(moves, [source, values, scales])
    assert table.nonfinite() == [0, 2]
    codes, bytes_ = mxfp8.quantize(x.float().numpy(), allow_nonfinite=True)
    compare(values, scales, expect(layout, grid, codes, bytes_, np.ones((3, 128, 2), bool)))
    source.copy_(torch.ones_like(x))
    table.launch()
    assert table.nonfinite() == []


def check_shuffle(way, layout, stored, *, gated=False, count=2, shift=0):
    """Canonical codes and scales into a layout by boxes, and back whole."""
    grid = Stored(*stored, gated)
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (count, *stored), dtype=np.uint8)
    bytes_ = rng.integers(0, 256, (count, grid.rows, grid.blocks), dtype=np.uint8)
    memory = torch.from_numpy(np.concatenate([np.zeros(shift, np.uint8), codes.reshape(-1)])).to(way.device)
    source_scales = torch.from_numpy(bytes_).to(way.device)
    stack, values, scales = engine(layout, grid, count, way.device)
    written = np.zeros((count, grid.rows, grid.blocks), bool)
    moves = []
    for m, r0, r1, c0, c1 in cuts(*stored, count):
        box = Strided(At(0, shift + (m * stored[0] + r0) * stored[1] + c0), "uint8", (r1 - r0, c1 - c0), (stored[1], 1))
        at = At(3, (m * stored[0] + r0) * grid.blocks + c0 // 32)
        moves.append(ShuffleMove(box, Strided(at, "uint8", (r1 - r0, (c1 - c0) // 32), (grid.blocks, 1)), stack, (m, r0, c0)))
        written[m, r0:r1, c0 // 32 : c1 // 32] = True
    way.run(moves, [memory, values, scales, source_scales])
    compare(values, scales, expect(layout, grid, codes, bytes_, written))

    whole = mxfp8_layouts.to_kernel(layout, codes, bytes_, gated=gated)
    back, back_scales = torch.zeros(codes.shape, dtype=torch.uint8), torch.zeros(bytes_.shape, dtype=torch.uint8)
    back, back_scales = back.to(way.device), back_scales.to(way.device)
    inverse = ShuffleMove(
        contiguous(At(0), "uint8", codes.shape), contiguous(At(3), "uint8", bytes_.shape), stack, (0, 0, 0), inverse=True
    )
    way.run([inverse], [back, *(torch.from_numpy(w).to(way.device) for w in whole), back_scales])
    np.testing.assert_array_equal(back.cpu().numpy(), codes)
    np.testing.assert_array_equal(back_scales.cpu().numpy(), bytes_)


COPIES = [
    ((3, 40, 70), (9000, 70, 1), (2800, 70, 1), 0, 0),
    ((40, 70), (1, 41), (71, 1), 3, 1),
    ((7, 5, 3, 6), (200, 40, 7, 1), (90, 18, 6, 1), 1, 2),
    ((64,), (2,), (1,), 0, 0),
    ((0, 4), (4, 1), (4, 1), 0, 0),
    ((16, 128), (256, 1), (128, 1), 0, 0),
    ((2, 9000), (9100, 1), (9000, 1), 5, 0),
    ((1, 1, 1), (1, 1, 1), (1, 1, 1), 9, 9),
    ((), (), (), 4, 7),
]
"""(shape, source strides, target strides, source offset, target offset), in elements."""


def check_copy(way, dtype, target_dtype=None):
    """Every strided copy of COPIES through one table, with a cast where the dtypes differ; untouched bytes stay."""
    target_dtype = target_dtype or dtype
    source = (torch.randn(32000, generator=torch.Generator().manual_seed(3)) * 100).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1 and target_dtype != dtype:
        for i, value in enumerate((float("nan"), float("inf"), -float("inf"), 1e-40, 6e-8, 65520.0, 3e38, -0.0)):
            source[i::61] = torch.tensor(value).to(dtype)
    size, target_size = source.element_size(), target_dtype.itemsize
    target = torch.full((len(COPIES) * 20000,), 0, dtype=target_dtype)
    target.view(torch.uint8).fill_(FILL)
    want, moves = target.clone(), []
    for i, (shape, s, t, so, to) in enumerate(COPIES):
        box, spot = source.as_strided(shape, s, so), want.as_strided(shape, t, to + 20000 * i)
        spot.copy_(box)
        if target_dtype != dtype:
            spot.masked_fill_(spot.isnan(), float("nan"))
        names = [str(d).removeprefix("torch.") for d in (dtype, target_dtype)]
        moves.append(
            CopyMove(
                Strided(At(0, so * size), names[0], shape, tuple(x * size for x in s)),
                Strided(At(1, (to + 20000 * i) * target_size), names[1], shape, tuple(x * target_size for x in t)),
            )
        )
    target = target.to(way.device)
    way.run(moves, [source.to(way.device), target])
    got, want = target.cpu(), want
    if target_dtype != dtype:
        quiet = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}[target_dtype]
        word = torch.int16 if target_size == 2 else torch.int32
        untouched = want.view(torch.uint8).view(-1, target_size).eq(FILL).all(1)
        want.view(word).masked_fill_(want.isnan() & ~untouched, quiet)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def check_digest(way):
    """Digests of strided content of every size, near and far beyond 2^32, summed from two boxes."""
    gen = torch.Generator().manual_seed(9)
    for dtype, strides in (
        (torch.uint8, (96, 1)),
        (torch.int16, (100, 1)),
        (torch.float32, (100, 1)),
        (torch.int64, (100, 1)),
        (torch.int64, (1, 50)),
        (torch.bfloat16, (1, 50)),
    ):
        x = torch.randint(0, 256, (48000,), generator=gen, dtype=torch.int32).to(torch.uint8).view(dtype)
        size = x.element_size()
        content = x.as_strided((50, 90), strides)
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        array = content.view(word).numpy()
        moves, want = [], []
        for i, (shape, start) in enumerate(
            (
                ((60, 100), (3, 7)),
                ((2**40, 100), (2**36 + 1, 10)),
                ((2**16, 2**20), (2**12 - 20, 2**20 - 90)),
                ((5, 60, 100), (2, 0, 1)),
            )
        ):
            for r0, r1 in ((0, 20), (20, 50)):
                box = Strided(
                    At(0, r0 * strides[0] * size),
                    str(dtype).removeprefix("torch."),
                    (r1 - r0, 90),
                    tuple(s * size for s in strides),
                )
                lead = (1,) * (len(shape) - 2)
                box = Strided(box.at, box.dtype, (*lead, *box.shape), (*(0 for _ in lead), *box.strides))
                moves.append(DigestMove(box, shape, (*start[:-2], start[-2] + r0, start[-1]), out=i))
            want.append(digest(array.reshape((*lead, 50, 90)), shape=shape, start=start))
        assert way.run(moves, [x.to(way.device)]).digest_values() == want


def check_digest_of_layout(way, layout, gated):
    """The canonical digest of values and scales is read out of a layout, whole and by box."""
    stored = Stored(256, 224, gated)
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 256, (2, 256, 224), dtype=np.uint8)
    bytes_ = rng.integers(0, 256, (2, 256, 7), dtype=np.uint8)
    values, scales = (torch.from_numpy(a).to(way.device) for a in mxfp8_layouts.to_kernel(layout, codes, bytes_, gated=gated))
    stack = Stack(layout, At(0), At(1), stored, 2)
    moves = [
        DigestMove(StoredBox(stack, (0, 0, 0), (2, 256, 224)), (2, 256, 224), (0, 0, 0), 0),
        DigestMove(StoredBox(stack, (0, 0, 0), (2, 256, 7), scales=True), (2, 256, 7), (0, 0, 0), 1),
        DigestMove(StoredBox(stack, (1, 30, 32), (1, 100, 96)), (400, 500), (9, 64), 2),
        DigestMove(StoredBox(stack, (1, 30, 1), (1, 100, 3), scales=True), (400, 20), (9, 2), 3),
    ]
    want = [
        digest(codes, shape=codes.shape, start=(0, 0, 0)),
        digest(bytes_, shape=bytes_.shape, start=(0, 0, 0)),
        digest(codes[1, 30:130, 32:128], shape=(400, 500), start=(9, 64)),
        digest(bytes_[1, 30:130, 1:4], shape=(400, 20), start=(9, 2)),
    ]
    assert way.run(moves, [values, scales]).digest_values() == want


QUANTIZE = [
    ((128, 32), {}),
    ((256, 160), {"gated": True}),
    ((192, 96), {"gated": True, "dtype": torch.float32, "rule": "floor"}),
    ((200, 96), {"shift": 3}),
    ((256, 96), {"count": 3, "rule": "floor"}),
    ((64, 288), {"dtype": torch.float32, "shift": 1}),
]
"""(stored size, options of check_quantize)."""


def takes(layout, stored, gated=False):
    """Whether a layout takes this size; the grid above also asks for sizes that some refuse."""
    rows = layouts.layout_of(layout).row_multiple
    return stored[0] % rows == 0 and (not gated or stored[0] % 2 == 0)
