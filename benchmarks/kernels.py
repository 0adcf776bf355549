#!/usr/bin/env python3
"""How fast the kernels are, as a share of a device-to-device copy measured in the same run.

    python benchmarks/kernels.py                         a table, and JSON with --json PATH
    python benchmarks/kernels.py --sweep qwen3-30b       first every tile shape of SWEEP on this model, then the best of them
    python benchmarks/kernels.py --models qwen3-30b --gib 2

Bytes are what must move: each input read once, each output written once (BF16 to MXFP8: 2 + 1 + 1/32 an element). The baseline
does the same work as engines do it today, expert by expert in torch: quantise in separate passes, `index_select` rows, permute
scales. Its time is measured on a few experts and scaled to all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_refit_ext.core.layouts import Stored, layout_of
from vllm_refit_ext.kernels.moves import At, CopyMove, DigestMove, QuantizeMove, ShuffleMove, Stack, StoredBox, contiguous
from vllm_refit_ext.kernels.table import Table
from vllm_refit_ext.kernels.tuning import Tile

MODELS = {
    "qwen3-30b": (768, 2048),
    "qwen3-30b-tp4": (192, 2048),
    "qwen3-235b": (1536, 4096),
    "qwen3-235b-tp4": (384, 4096),
    "deepseek-v3": (2048, 7168),
    "deepseek-v3-tp16": (128, 7168),
}
"""Expert sizes (intermediate size of a rank, hidden size)."""

AIMS = {"copy": 0.92, "moe_shuffle": 0.85, "fused trtllm_moe": 0.85, "fused marlin": 0.75, "quantize": 0.88}

ROWS = [
    Tile(r, c, w)
    for w in (4, 8)
    for r, c in ((16, 256), (32, 128), (32, 256), (64, 128), (8, 512), (16, 512), (128, 128), (8, 1024))
]
MARLIN = [Tile(64, c, w) for c, w in ((32, 1), (64, 1), (32, 2), (64, 2), (128, 2), (64, 4), (128, 4), (256, 8))]
SWEEP = {
    "copy_units": [Tile(1, n, w) for n in (512, 1024, 2048) for w in (2, 4, 8)],
    "shuffle_rows": [*ROWS, Tile(64, 256, 4), Tile(32, 512, 4)],
    "quantize_rows": [
        *(t for t in ROWS if t.rows * t.cols >= 128 * t.warps * 8),
        *(Tile(r, 64, w) for r, w in ((128, 4), (64, 4), (64, 2), (32, 2))),
    ],
    "quantize_marlin": MARLIN,
    "shuffle_marlin": MARLIN,
    "digest_tiles": [Tile(r, c, w) for w in (4, 8) for r, c in ((16, 256), (32, 256), (8, 1024), (16, 512))],
}
"""Tiles worth trying, by kernel name."""

JOBS = {
    "copy_units": {"copy"},
    "shuffle_rows": {"moe_shuffle"},
    "shuffle_marlin": {"shuffle marlin"},
    "quantize_marlin": {"fused marlin"},
    "digest_tiles": {"digest bf16"},
}
"""The measurements that choose a kernel's tile."""


@dataclass
class Result:
    """One measurement: `seconds` the median, `share` of the copy ceiling, `speedup` over the baseline where there is one."""

    kernel: str
    model: str
    matrices: int
    gigabytes: float
    seconds: float
    share: float
    aim: float | None
    speedup: float | None
    tile: str


@dataclass
class Job:
    """Moves over buffers, their bytes, the kernel whose tile matters, and the baseline's seconds for the same work."""

    name: str
    kernel: str
    moves: list
    buffers: list[torch.Tensor]
    nbytes: int
    baseline: Callable[[], float] | None = None


def seconds(run: Callable[[], object], repeat: int = 7) -> float:
    """Median time of `run` on the device, after two warm-up runs."""
    times = []
    for i in range(repeat + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)


def ceiling(gib: float) -> float:
    """Bytes per second, read plus written, of a contiguous device-to-device copy."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def jobs(inner: int, hidden: int, gib: float) -> list[Job]:
    """The kernels on experts of one model, `gib` GiB of BF16 sources: gate, up and down apart, as checkpoints have them."""
    sizes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    experts = max(1, int(gib * 2**30 / (6 * inner * hidden)))
    x = torch.empty(3 * experts * inner * hidden, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    count = x.numel()
    order = torch.randperm(3 * experts, generator=torch.Generator().manual_seed(0)).tolist()
    at = [slot * inner * hidden for slot in order]  # scattered over memory, as a trainer's buffers are

    def place(layout: str, first: int) -> tuple[list[Stack], list[torch.Tensor]]:
        stacks, buffers = [], []
        for rows, cols, gated in ((2 * inner, hidden, True), (hidden, inner, False)):
            step = layout_of(layout).row_multiple
            stored = Stored(-(-rows // step) * step, cols, gated)
            number = first + len(buffers)
            stacks.append(Stack(layout, At(number), At(number + 1), stored, experts))
            for shape in (layout_of(layout).value_shape(stored), layout_of(layout).scale_shape(stored)):
                buffers.append(torch.empty((experts, *shape), dtype=torch.uint8, device="cuda"))
        return stacks, buffers

    def spots() -> list[tuple[int, int, tuple[int, int], tuple[int, int, int]]]:
        """(matrix number, which stack, size, position) of every source matrix."""
        return [(3 * e + i, i // 2, sizes[i], (e, inner if i == 1 else 0, 0)) for e in range(experts) for i in range(3)]

    def fused(layout: str, name: str, baseline: Callable[[], float] | None = None) -> Job:
        stacks, buffers = place(layout, 1)
        moves = [QuantizeMove(contiguous(At(0, 2 * at[m]), "bfloat16", size), stacks[s], start) for m, s, size, start in spots()]
        kernel = "quantize_marlin" if layout == "marlin" else "quantize_rows"
        return Job(name, kernel, moves, [x, *buffers], count * 3 + count // 32, baseline)

    def shuffled(layout: str, name: str, baseline: Callable[[], float] | None = None) -> Job:
        codes = torch.empty(count, dtype=torch.uint8, device="cuda").random_()
        scales = torch.empty(count // 32, dtype=torch.uint8, device="cuda").random_(1, 255)
        stacks, buffers = place(layout, 2)
        moves = [
            ShuffleMove(
                contiguous(At(0, at[m]), "uint8", size),
                contiguous(At(1, at[m] // 32), "uint8", (size[0], size[1] // 32)),
                stacks[s],
                start,
            )
            for m, s, size, start in spots()
        ]
        kernel = "shuffle_marlin" if layout == "marlin" else "shuffle_rows"
        return Job(name, kernel, moves, [codes, scales, *buffers], 2 * (count + count // 32), baseline)

    def copied() -> Job:
        y = torch.empty_like(x)
        moves = []
        for m, _, size, _ in spots():
            moves.append(
                CopyMove(
                    contiguous(At(0, 2 * at[m]), "bfloat16", size), contiguous(At(1, 2 * m * inner * hidden), "bfloat16", size)
                )
            )

        def baseline() -> float:
            some = min(len(moves), 256)
            return (
                seconds(
                    lambda: [y[m * inner * hidden :][: inner * hidden].copy_(x[at[m] :][: inner * hidden]) for m in range(some)]
                )
                * len(moves)
                / some
            )

        return Job("copy", "copy_units", moves, [x, y], 4 * count, baseline)

    def digests() -> list[Job]:
        whole = [DigestMove(contiguous(At(0, 2 * at[m]), "bfloat16", size), size, (0, 0)) for m, _, size, _ in spots()]
        stacks, buffers = place("trtllm_moe", 0)
        for b in buffers:
            b.random_()
        boxes = [
            DigestMove(
                StoredBox(s, (0, 0, 0), (s.count, s.stored.rows, s.stored.cols)),
                (s.count, s.stored.rows, s.stored.cols),
                (0, 0, 0),
                i,
            )
            for i, s in enumerate(stacks)
        ]
        stored = sum(s.count * s.value_bytes for s in stacks)
        return [
            Job("digest bf16", "digest_tiles", whole, [x], 2 * count),
            Job("digest trtllm_moe", "digest_tiles", boxes, buffers, stored),
        ]

    loop = EngineLoop(x, at, inner, hidden, experts)
    makers: list[Callable[[], Job]] = [
        copied,
        lambda: shuffled("trtllm_moe", "moe_shuffle", loop.shuffle),
        lambda: shuffled("marlin", "shuffle marlin"),
        lambda: fused("plain", "quantize", loop.quantize),
        lambda: fused("linear_128x4", "fused linear_128x4"),
        lambda: fused("trtllm_moe", "fused trtllm_moe", loop.both),
        lambda: fused("marlin", "fused marlin"),
    ]
    return [m() for m in makers if layouts_fit(inner, hidden)] + digests()


def layouts_fit(inner: int, hidden: int) -> bool:
    """Whether every layout takes these experts without padding inside the halves."""
    return (2 * inner) % 128 == 0 and hidden % 128 == 0


class EngineLoop:
    """The same work as engines do it when they load: one expert after another, one pass after another, in torch."""

    def __init__(self, x: torch.Tensor, at: list[int], inner: int, hidden: int, experts: int) -> None:
        self.x, self.at, self.inner, self.hidden, self.experts = x, at, inner, hidden, experts
        self.some = min(experts, 16)
        size = inner * hidden
        self.w13 = [torch.cat([x[at[3 * e + i] :][:size].view(inner, hidden) for i in (0, 1)]) for e in range(self.some)]
        self.w2 = [x[at[3 * e + 2] :][:size].view(hidden, inner) for e in range(self.some)]

    def quantize(self) -> float:
        """Seconds for all experts, quantising."""
        return self._time(lambda: [_quantize_torch(w) for w in (*self.w13, *self.w2)])

    def shuffle(self) -> float:
        """Seconds for all experts, shuffling what is quantised."""
        pairs = [(w, *_quantize_torch(w), gated) for ws, gated in ((self.w13, True), (self.w2, False)) for w in ws]
        rows = {gated: _row_index(w.shape[0], gated) for w, _, _, gated in pairs}
        return self._time(lambda: [_shuffle_torch(codes, scales, rows[gated]) for _, codes, scales, gated in pairs])

    def both(self) -> float:
        """Seconds for all experts, both."""
        return self.quantize() + self.shuffle()

    def _time(self, run: Callable[[], object]) -> float:
        return seconds(run, repeat=3) * self.experts / self.some


def _quantize_torch(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = w.float().view(w.shape[0], -1, 32)
    byte = (torch.ceil(torch.log2(blocks.abs().amax(-1) / 448)) + 127).clamp(1, 254)
    return (blocks / torch.exp2(byte - 127)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).view(w.shape), byte.to(
        torch.uint8
    )


def _row_index(rows: int, gated: bool) -> torch.Tensor:
    from vllm_refit_ext.core.layouts import shuffled_row

    where = shuffled_row(Stored(rows, 32, gated), np.arange(rows))
    return torch.from_numpy(np.argsort(where)).cuda()


def _shuffle_torch(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    moved = scales.index_select(0, rows)
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[1] % 4, 0, -moved.shape[0] % 128))
    blocked = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).transpose(1, 3).contiguous()
    return codes.index_select(0, rows), blocked


def measure(job: Job, model: str, roof: float, tile: Tile | None = None, baseline: bool = True) -> Result:
    """One job, with one tile for all its moves or with the tiles of `tuning`."""
    table = Table(job.moves, "cuda", tiles={job.kernel: (tile,)} if tile else None)
    table.bind(job.buffers)
    took = seconds(table.launch)
    old = job.baseline() if job.baseline and baseline else None
    share = job.nbytes / took / roof
    return Result(
        job.name,
        model,
        len(job.moves),
        job.nbytes / 1e9,
        took,
        share,
        AIMS.get(job.name),
        old / took if old else None,
        f"{tile.rows}x{tile.cols}/{tile.warps}" if tile else "tuned",
    )


def _compile(kernel: str, tiles: Sequence[Tile]) -> None:
    """Fill Triton's cache for a kernel's tiles, on a tiny problem."""
    for job in jobs(64, 128, 0.0):
        if job.kernel == kernel:
            for tile in tiles:
                measure(job, "", 1.0, tile, baseline=False)


def compile_all(sweep: dict[str, list[Tile]]) -> None:
    """Compile every variant in parallel processes, so that the timed process finds them in the cache."""
    work = [(k, tiles[i::4]) for k, tiles in sweep.items() for i in range(4) if tiles[i::4]]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_compile, *w) for w in work]:
            future.result()


def print_table(results: list[Result], roof: float) -> None:
    """The table that people read."""
    print(f"copy ceiling {roof / 1e9:,.0f} GB/s, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'kernel':<22}{'model':<18}{'matrices':>9}{'GB':>8}{'ms':>9}{'GB/s':>8}{'share':>7}{'aim':>6}{'speed-up':>10}  tile")
    for r in results:
        aim, speedup = (f"{r.aim:.2f}" if r.aim else "", f"{r.speedup:.1f}x" if r.speedup else "")
        rate = r.gigabytes / r.seconds
        print(
            f"{r.kernel:<22}{r.model:<18}{r.matrices:>9}{r.gigabytes:>8.2f}{r.seconds * 1e3:>9.3f}{rate:>8.0f}"
            f"{r.share:>7.3f}{aim:>6}{speedup:>10}  {r.tile}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--gib", type=float, default=4.0, help="GiB of BF16 sources for each model")
    parser.add_argument("--sweep", nargs="*", choices=list(MODELS), help="try every tile on these models, then take the best")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    roof = ceiling(args.gib)
    results: list[Result] = []
    best: dict[str, Tile] = {}
    if args.sweep:
        compile_all(SWEEP)
        for name in args.sweep:
            swept = [
                measure(job, name, roof, tile, baseline=False)
                for job in jobs(*MODELS[name], args.gib)
                for tile in SWEEP[job.kernel]
                if len(args.sweep) == 1 or name == args.sweep[0] or job.kernel == "quantize_rows"
            ]
            swept.sort(key=lambda r: (r.kernel, -r.share))
            print_table(swept, roof)
            results += swept
            torch.cuda.empty_cache()
        for kernel in ("copy_units", "shuffle_rows", "shuffle_marlin", "quantize_marlin", "digest_tiles"):
            jobs_of = [r for r in results if r.kernel in JOBS[kernel] and r.model == args.sweep[0]]
            if jobs_of:
                rows, cols, warps = max(jobs_of, key=lambda r: r.share).tile.replace("/", "x").split("x")
                best[kernel] = Tile(int(rows), int(cols), int(warps))
        print("best on", args.sweep[0], {k: f"{t.rows}x{t.cols}/{t.warps}" for k, t in best.items()})
    final = []
    for name in args.models:
        for job in jobs(*MODELS[name], args.gib):
            final.append(measure(job, name, roof, best.get(job.kernel)))
        torch.cuda.empty_cache()
    print_table(final, roof)
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "ceiling_bytes_per_second": roof,
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "results": [asdict(r) for r in results + final],
                    "final_from": len(results),
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    main()
