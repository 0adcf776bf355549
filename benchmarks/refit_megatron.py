"""Refits by MegatronSender on real GPUs: a Megatron-Bridge model, a vLLM engine, published shapes; from the call to the commit.

    python benchmarks/refit_megatron.py                              one GPU, trainer and engine on it
    python benchmarks/refit_megatron.py --gpus 2                     EP 2 to an engine with TP 2 and expert parallelism
    python benchmarks/refit_megatron.py --gpus 2 --split             GPU 0 to an engine on GPU 1 over NCCL

The ceiling is a device-to-device copy taken in the same run. A wire with `+q` behind its name quantises in the trainer. Prints a
JSON object a row, and writes them all to `out`.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
import torch.distributed as dist
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from benchmarks.peers import copy_ceiling
from benchmarks.shards import MODELS
from benchmarks.sparse_checkpoint import write_sparse_checkpoint
from examples.support.tiny_model import build_megatron, import_megatron
from megatron_sender import MegatronSender, SenderConfig
from tests.support.gpu_engine import EAGER, Engine

CHANGE = 1.0009765625
"""What every weight is multiplied by before a refit: exact in BF16 for few of them, so nearly all bytes change."""


@Parameter(name="*")
@dataclass(frozen=True)
class Settings:
    """Settings of the run.

    Parameters
    ----------
    model: whose published shapes.
    layers: decoder layers; 0 means all.
    gpus: trainer ranks, one a GPU.
    split: the trainer on GPU 0, the engine on GPU 1.
    engine: bf16 or mxfp8.
    wires: one row each.
    repeats: measured refits, after two that are not.
    verify: compare digests after the refits, and time it.
    out: folder for the record.
    """

    model: str = "qwen3-30b-a3b"
    layers: int = 0
    gpus: int = 1
    split: bool = False
    engine: str = "bf16"
    wires: tuple[str, ...] = ("ipc",)
    repeats: int = 5
    verify: bool = True
    out: Path = Path("out/refit_megatron")


def start_engine(folder: Path, settings: Settings) -> Engine:
    """The engine: on the trainer's GPUs with TP and expert parallelism over them, or on the GPU behind the trainer's."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(settings.gpus)))).split(",")
    devices = seen[1:2] if settings.split else seen[: settings.gpus]
    more: dict[str, Any] = {"tensor_parallel_size": len(devices), "enable_expert_parallel": True} if len(devices) > 1 else {}
    if settings.engine == "mxfp8":
        more["quantization"] = "mxfp8"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
    ours = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    try:
        log = settings.out / f"engine-{settings.engine}-{''.join(devices)}.log"
        return Engine(folder, log, **EAGER, load_format="dummy", **({"gpu_memory_utilization": 0.5} | more))
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ.update(ours)


def trainer_rank(rank: int, folder: Path, port: int, settings: Settings) -> None:
    """One trainer rank; rank 0 starts the engine and keeps the record."""
    world = 1 if settings.split else settings.gpus
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    import_megatron()
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=world)
    ceiling = copy_ceiling()  # while the GPU is empty: weights of both sides leave no room for it
    dist.barrier()
    engine = start_engine(folder, settings) if rank == 0 else None
    bridge, chunks = build_megatron(folder, ep=world, dtype="bfloat16", load=False)
    if engine is not None:
        engine.wait(400)
    dist.barrier()
    rows = []
    for wire in settings.wires:
        try:
            rows.append(measure(wire, chunks, bridge, engine, settings) | {"copy_gbytes_per_s": ceiling})
        except Exception as error:  # noqa: BLE001 - one row that fails leaves the others
            rows.append({"wire": wire, "error": f"{type(error).__name__}: {error}"[:2000]})
        if rank == 0:
            print(json.dumps(rows[-1]), flush=True)
        dist.barrier()
    if engine is not None:
        name = f"{settings.engine}-{'split' if settings.split else settings.gpus}.json"
        (settings.out / name).write_text(json.dumps(rows, indent=1))
        engine.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(wire: str, chunks: list[Any], bridge: Any, engine: Engine | None, settings: Settings) -> dict[str, Any]:
    """One row: prepare, refits of changed weights, verify. Seconds are medians, `first` is the first refit's."""
    config = SenderConfig(
        wire=wire.removesuffix("+q"), resident=True, hash_reloaded=settings.verify, prequantize=wire.endswith("+q")
    )  # type: ignore[arg-type]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = engine.wait().call("probe_peak", (True,), 300) if engine is not None else []
    compared = 0
    begin = time.perf_counter()
    sender = MegatronSender(chunks, bridge, engine.wait() if engine is not None else None, config)
    try:
        sender.prepare()
        prepared = time.perf_counter() - begin
        reports = []
        for step in range(settings.repeats + 2):
            with torch.no_grad():
                for chunk in chunks:
                    for parameter in chunk.parameters():
                        parameter.mul_(CHANGE)
            torch.cuda.synchronize()
            dist.barrier()
            reports.append(sender.refit(f"{wire} {step}"))
        peak = torch.cuda.max_memory_allocated() - before
        peaks = engine.wait().call("probe_peak", (), 300) if engine is not None else []
        stated = sender.extra_bytes
        replies = [r for e in sender.prepared.engines for r in e.replies] if sender.prepared is not None else []
        verified = []
        for _ in range(2 if settings.verify else 0):
            begin = time.perf_counter()
            compared = sender.verify()
            verified.append(time.perf_counter() - begin)
    finally:
        sender.close()
    measured = reports[2:]
    phases = {name: statistics.median(r.seconds[name] for r in measured) for name in measured[0].seconds}
    ranks = [[(u.rank, name, s) for u in e for name, s in u.seconds.items()] for e in measured[-1].engines]
    return {
        "engine": settings.engine,
        "gpus": settings.gpus,
        "split": settings.split,
        "wire": wire,
        "prepare_s": prepared,
        "first_s": reports[0].seconds["total"],
        "seconds": phases,
        "totals_s": [r.seconds["total"] for r in measured],
        "engine_ranks_s": ranks,
        "bytes": measured[-1].nbytes,
        "trainer_bytes": {"stated": stated["quantised"] + stated["staging"], "measured": peak},
        "engine_rank_bytes": [
            {"stated": reply.extra_bytes, "measured": after - first}
            for reply, first, after in zip(replies, held, peaks, strict=True)
        ],
        "writers": [[(u.writer, u.moves, u.launches) for u in e] for e in measured[-1].engines],
        "verify_s": verified,
        "verified": compared,
    }


def main(settings: Annotated[Settings, Parameter(name="*")] = Settings()) -> None:
    """Run it."""
    config = dict(MODELS[settings.model])
    if settings.layers:
        config["num_hidden_layers"] = settings.layers
    settings.out.mkdir(parents=True, exist_ok=True)
    folder = write_sparse_checkpoint(settings.out / "checkpoint", config)
    world = 1 if settings.split else settings.gpus
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(trainer_rank, (folder, port, settings), nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    cyclopts.run(main)
