"""Shard to shard against packed broadcast, in one run: bytes and seconds. NCCL where there is a GPU for every rank, gloo
elsewhere.

    python benchmarks/reshard.py                                # 4 trainer ranks (EP4) to 2 engine ranks (TP2), gloo
    python benchmarks/reshard.py --trainers 1 --engines 1 --hidden 2048 --inner 768 --layers 24 --experts 64      # two GPUs

A mixture of experts is cut over the trainers by expert and over the engines by tensor parallelism. "shard" is wire `collective`
as the product runs it: each engine rank gets its own slices from the ranks that hold them. "broadcast" is the usual way:
trainer rank 0 collects whole tensors, packs them into buckets of the same size, and broadcasts each bucket to all engine ranks,
which keep their slices. All
end with the same bytes in the same places, which is checked; "sent" is what trainer ranks sent. "link" is one pair of ranks
sending buckets and nothing else: what this link can do in this run. Seconds are of the slowest rank, medians of `repeat`; bytes
are what all ranks received.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placement, Placements, concatenate
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import collective
from vllm_refit_ext.wires.boxes import Memory, as_bytes, source_view, target_view
from vllm_refit_ext.wires.collective_group import Group, P2POp
from vllm_refit_ext.wires.rendezvous import Store

DEADLINE_S = 300.0
LINK_BUCKETS = 32


def model(o: argparse.Namespace) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Name -> (shape, dimension that tensor parallelism cuts)."""
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {"embed": ((o.vocab, o.hidden), 0)}
    for i in range(o.layers):
        shapes |= {
            f"{i}.norm": ((o.hidden,), None),
            f"{i}.qkv": ((2 * o.hidden, o.hidden), 0),
            f"{i}.o": ((o.hidden, o.hidden), 1),
        }
        for x in range(o.experts):
            at = f"{i}.experts.{x}"
            shapes |= {f"{at}.{n}": ((o.inner, o.hidden), 0) for n in ("gate", "up")} | {f"{at}.down": ((o.hidden, o.inner), 1)}
    return shapes


def tables(o: argparse.Namespace) -> tuple[Manifest, Placements, list[Placements]]:
    """The manifest, the sources of all trainers (experts over ranks, the rest on all), and each engine rank's targets."""
    shapes = model(o)
    manifest = Manifest({n: TensorSpec(s, "bfloat16") for n, (s, _) in shapes.items()})

    def whole(names: list[str], rank: int) -> Placements:
        buffers = [Buffer(n, rank, "bfloat16", shapes[n][0]) for n in names]
        strides = [tuple(2 * s for s in row_strides(shapes[n][0])) for n in names]
        rows = [Placement(n, i, (0,) * len(shapes[n][0]), shapes[n][0], 0, strides[i]) for i, n in enumerate(names)]
        return Placements.from_rows(buffers, rows, list(shapes))

    def held(name: str, rank: int) -> bool:
        return ".experts." not in name or int(name.split(".")[2]) * o.trainers // o.experts == rank

    sources = concatenate([whole([n for n in shapes if held(n, r)], r) for r in range(o.trainers)])
    targets = []
    for e in range(o.engines):
        part = e % o.tp
        buffers, rows = [], []
        for n, (shape, axis) in shapes.items():
            lo, hi = [0] * len(shape), list(shape)
            if axis is not None:
                lo[axis], hi[axis] = part * shape[axis] // o.tp, (part + 1) * shape[axis] // o.tp
            local = tuple(b - a for a, b in zip(lo, hi, strict=True))
            rows.append(Placement(n, len(buffers), tuple(lo), tuple(hi), 0, tuple(2 * s for s in row_strides(local))))
            buffers.append(Buffer(n, e, "bfloat16", local))
        targets.append(Placements.from_rows(buffers, rows, list(shapes)))
    return manifest, sources, targets


WAYS = ("shard", "broadcast", "link")
"""What is measured, in this order."""


def content(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """What tensor `name` holds, the same wherever it is asked."""
    base = sum(name.encode()) % 251
    return (torch.arange(int(np.prod(shape)), device=device, dtype=torch.float32) % 8191 + base).to(torch.bfloat16).view(shape)


class Rank:
    """One rank of both ways. Rank numbers: trainers, then engines."""

    def __init__(self, o: argparse.Namespace, rank: int, port: int) -> None:
        self.o, self.rank, self.is_trainer = o, rank, rank < o.trainers
        self.device = torch.device("cuda", rank) if o.backend == "nccl" else torch.device("cpu")
        if o.backend == "nccl":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        self.board = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S)
        )
        self.manifest, sources, targets = tables(o)
        self.names = collective.rank_names(o.trainers, o.engines)
        if self.is_trainer:
            self.plan = build_plan(self.manifest, sources, concatenate(targets))
            mine = [b for b in self.plan.sources if b.rank == rank]
            self.tensors = [content(b.name, b.shape, self.device) for b in mine]
            self.held = dict(zip([b.name for b in mine], self.tensors, strict=True))
            apart = Hosts(["trainers"] * o.trainers, [f"host {e}" for e in range(o.engines)])
            self.sender = collective.open_sender(rank, collective.send_tables(self.plan, apart, o.bucket)[rank], self.tensors)
        else:
            self.plan = build_plan(self.manifest, sources, targets[rank - o.trainers])
            self.params = {b.name: torch.zeros(b.shape, dtype=torch.bfloat16, device=self.device) for b in self.plan.targets}
            self.kept: dict[str, Any] = {}
            self.writers: dict[Plan, Any] = {}

    def barrier(self, what: str) -> None:
        """All ranks are here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.board.add(what, 1) == len(self.names):
            self.board.set(what + "!", "1")
        self.board.wait([what + "!"], timedelta(seconds=DEADLINE_S))

    def writer(self, step: Plan) -> Any:
        """The product's writer for this device."""
        if self.device.type == "cpu":
            return InPlaceWriter(step, self.params)
        from vllm_refit_ext.receiver.kernel_writer import KernelWriter

        return KernelWriter(step, self.params, {}, self.device)

    def shard(self, name: str) -> tuple[int, int]:
        """One refit over wire `collective`; payload bytes that this rank received, and that it sent."""
        if self.is_trainer:
            self.board.set(f"{name}/{self.rank}", self.sender.begin(self.tensors))
        info = collective.info([self.board.get(f"{name}/{r}") for r in range(self.o.trainers)])
        end = time.monotonic() + DEADLINE_S
        if self.is_trainer:
            return 0, sum(self.sender.transfer(name, info, end).values())
        update = UpdateInfo(wire="collective", version=name, session=name, collective=info, deadline_s=DEADLINE_S)
        reader = collective.open_reader(update, self.plan, self.kept)
        reader.start(end)
        for step in reader.steps:
            if step not in self.writers:
                self.writers[step] = self.writer(step)
            for buffer in np.unique(step.source).tolist():
                reader.memory(buffer)
            self.writers[step].write(reader)
        reader.confirm()
        reader.close()
        return sum(reader.received.values()), 0

    def open_broadcast(self, store: Store) -> None:
        """Groups and buckets for the baseline: whole tensors in manifest order."""
        end = time.monotonic() + DEADLINE_S
        self.gather = Group("gather", store, self.rank, self.names, self.o.backend, end)
        self.cast = None
        if self.rank == 0 or not self.is_trainer:
            place = 0 if self.rank == 0 else self.rank - self.o.trainers + 1
            self.cast = Group("cast", store, place, [self.names[0], *self.names[self.o.trainers :]], self.o.backend, end)
        self.buckets: list[list[str]] = [[]]
        size = 0
        for name, spec in self.manifest.tensors.items():
            nbytes = 2 * int(np.prod(spec.shape))
            if self.buckets[-1] and size + nbytes > self.o.bucket:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(name)
            size += nbytes
        largest = max(sum(2 * int(np.prod(self.manifest.tensors[n].shape)) for n in b) for b in self.buckets)
        self.ring = [torch.empty(self.o.bucket, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.staging = torch.empty(largest, dtype=torch.uint8, device=self.device)

    def broadcast(self, name: str) -> tuple[int, int]:
        """One refit by packed broadcast; bytes that this rank received. What it sends is the backend's affair."""
        received = 0
        by_name = {self.plan.names[int(t)]: i for i, t in enumerate(self.plan.tensor)} if not self.is_trainer else {}
        for bucket in self.buckets:
            at = 0
            sends: list[P2POp] = []
            receives: list[P2POp] = []
            views = {}
            for tensor in bucket:
                shape = self.manifest.tensors[tensor].shape
                size = 2 * int(np.prod(shape))
                views[tensor] = self.staging[at : at + size]
                owner = int(tensor.split(".")[2]) * self.o.trainers // self.o.experts if ".experts." in tensor else 0
                if self.rank == 0 and owner == 0:
                    views[tensor].copy_(as_bytes(self.held[tensor]))
                elif self.rank == 0:
                    receives.append(P2POp(owner, at // 2, views[tensor]))
                    received += size
                elif self.is_trainer and owner == self.rank:
                    sends.append(P2POp(0, at // 2, as_bytes(self.held[tensor])))
                at += size
            if sends or receives:
                self.gather.post(sends, receives).wait(time.monotonic() + DEADLINE_S)
            if self.cast is None:
                continue
            work = self.cast._group.broadcast([self.staging[:at]])
            assert not self.cast.wait_one(work, time.monotonic() + DEADLINE_S)
            if not self.is_trainer:
                received += at
                for tensor in bucket:
                    move = by_name[tensor]
                    whole = _Whole(views[tensor])
                    box = source_view(self.plan, move, whole)
                    target_view(self.plan, move, as_bytes(self.params[tensor])).copy_(box)
        return received, 0

    def link(self, name: str) -> tuple[int, int]:
        """The link alone: `LINK_BUCKETS` buckets from trainer rank 0 to engine rank 0, two in flight; bytes that this rank
        received.
        """
        works: list[Any] = []
        if self.rank not in (0, self.o.trainers):
            return 0, 0
        for i in range(LINK_BUCKETS):
            op = P2POp(self.o.trainers if self.is_trainer else 0, i, self.ring[i % 2])
            works.append(self.gather.post([op], []) if self.is_trainer else self.gather.post([], [op]))
            if i:
                works[i - 1].wait(time.monotonic() + DEADLINE_S)
        works[-1].wait(time.monotonic() + DEADLINE_S)
        return (0 if self.is_trainer else LINK_BUCKETS * self.o.bucket), 0

    def check(self) -> None:
        """What an engine rank holds is what it should, to the bit."""
        if self.is_trainer:
            return
        for row in range(len(self.plan)):
            name = self.plan.names[int(self.plan.tensor[row])]
            spec = self.manifest.tensors[name]
            n = len(spec.shape)
            lo, hi = self.plan.lo[row, :n], self.plan.lo[row, :n] + self.plan.extent[row, :n]
            want = content(name, spec.shape, self.device)[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
            assert torch.equal(self.params[name].view(torch.int16), want.view(torch.int16)), name
        for tensor in self.params.values():
            tensor.zero_()


class _Whole(Memory):
    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def memory(self, buffer: int) -> torch.Tensor:
        return self._memory


def run(o: argparse.Namespace, rank: int, port: int, out: Any) -> None:
    """One process."""
    me = Rank(o, rank, port)
    store = Store("127.0.0.1", port, time.monotonic() + 10)
    me.open_broadcast(store)
    result: dict[str, Any] = {"rank": rank}
    for way in WAYS:
        work = getattr(me, way)
        seconds = []
        for i in range(o.repeat + 1):
            me.barrier(f"{way}-{i}")
            begin = time.perf_counter()
            received, sent = work(f"{way}{i}")
            if me.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            me.barrier(f"{way}-{i}-done")
            if i == 0 and way != "link":
                me.check()
        result[way] = {"seconds": seconds[1:], "received": received, "sent": sent}
    me.barrier("end")
    out.put(result)


def main() -> int:
    """Start the ranks, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in (
        ("trainers", 4),
        ("engines", 2),
        ("layers", 4),
        ("hidden", 512),
        ("inner", 256),
        ("experts", 16),
        ("vocab", 8192),
        ("repeat", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bucket", type=int, default=8 << 20, help="bytes")
    parser.add_argument("--tp", type=int, default=0, help="ranks of an engine; all engine ranks are one engine without it")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default=None)
    o = parser.parse_args()
    o.tp = o.tp or o.engines
    if o.tp < 1 or o.engines % o.tp:
        parser.error(f"--engines {o.engines} must be a multiple of --tp {o.tp}")
    ranks = o.trainers + o.engines
    if o.backend is None:
        o.backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
    os.environ.pop("MASTER_ADDR", None)
    server = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S)
    )
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=run, args=(o, r, server.port, out), daemon=True) for r in range(ranks)]
    for p in processes:
        p.start()
    results: list[dict[str, Any]] = []
    while len(results) < ranks:
        if any(p.exitcode for p in processes):
            print("a rank failed", file=sys.stderr)
            return 1
        if not out.empty():
            results.append(out.get())
        time.sleep(0.05)
    for p in processes:
        p.join(30)
    size = sum(2 * int(np.prod(s)) for s, _ in model(o).values())
    summary: dict[str, Any] = {
        "backend": o.backend,
        "trainers": o.trainers,
        "engines": o.engines,
        "tp": o.tp,
        "model_bytes": size,
        "bucket_bytes": o.bucket,
    }
    print(
        f"{o.backend}, {o.trainers} trainer ranks to {o.engines} engine ranks (TP{o.tp}), "
        f"model of {size / 1e6:.1f} MB, buckets of {o.bucket / 1e6:.1f} MB"
    )
    for way in WAYS:
        slowest = [max(r[way]["seconds"][i] for r in results) for i in range(o.repeat)]
        received, sent = (sum(r[way][what] for r in results) for what in ("received", "sent"))
        median = statistics.median(slowest)
        summary[way] = {
            "seconds": median,
            "all_seconds": slowest,
            "bytes": received,
            "gb_per_s": received / median / 1e9,
        }
        sent_text = ""
        if way == "shard":
            summary[way]["sent"] = sent
            sent_text = f", {sent / 1e6:.1f} MB sent by trainer ranks"
        print(
            f"{way:>9}: {median * 1e3:9.2f} ms (from {min(slowest) * 1e3:.2f} to {max(slowest) * 1e3:.2f}), "
            f"{received / 1e6:9.1f} MB, {received / median / 1e9:.2f} GB/s{sent_text}"
        )
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
