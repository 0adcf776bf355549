"""Refits of a few megabytes into a CPU engine: what is left beside vLLM's own reload. Milliseconds, medians.

    python benchmarks/refit_cpu.py [--repeats N]

`sync`: an `LLM` that is idle. `async`: an `AsyncLLM` beside running requests, with the policy `reset_running`. On a CPU vLLM
packs most weights for its kernels, so they take its own reload, in `engine write`. `own reload` is the same call of vLLM without
a refit, from the same checkpoint on disk, and `beyond` what a refit takes more than that. The load of the machine is printed:
under other load these figures say little.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from examples.support.tiny_model import save_model
from vllm_refit_ext.client import AsyncLLMClient, EngineClient, LLMClient
from vllm_refit_ext.sender import DTensorSource, RefitSender, SenderConfig

SETTINGS: dict[str, Any] = {
    "worker_extension_cls": "vllm_refit_ext.RefitWorkerExtension",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def measure(name: str, client: EngineClient, folder: Path, repeats: int, config: SenderConfig) -> None:
    """Refit `repeats` times after two that are not counted, let vLLM reload as often, and print a row."""
    weights = weights_of(folder)
    sender = RefitSender(DTensorSource(weights), client, config)
    sender.prepare()
    rows: list[dict[str, float]] = []
    for step in range(repeats + 2):
        for tensor in weights.values():
            tensor.mul_(1.0009765625)
        report = sender.refit(f"{name} {step}")
        inside = report.engines[0][0].seconds
        rows.append({k: report.seconds[k] for k in ("total", "look", "publish", "update")})
        rows[-1] |= {f"engine {k}": v for k, v in inside.items()}
    sender.close()
    for row in rows:
        begin = time.perf_counter()
        client.call("reload_weights")
        row["own reload"] = time.perf_counter() - begin
    found = {key: statistics.median(row[key] for row in rows[2:]) * 1e3 for key in rows[-1]}
    found["beyond"] = found["total"] - found["own reload"]
    nbytes = sum(t.nbytes for t in weights.values())
    print(f"{name}: {nbytes / 1e6:.1f} MB, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("   " + ", ".join(f"{key} {value:.1f}" for key, value in found.items()), flush=True)


def sync(folder: Path, repeats: int) -> None:
    """The row of an idle engine."""
    from vllm import LLM

    llm = LLM(model=str(folder), max_num_seqs=8, **SETTINGS)
    try:
        measure("sync", LLMClient(llm), folder, repeats, SenderConfig())
    finally:
        llm.llm_engine.engine_core.shutdown()


async def beside_requests(folder: Path, repeats: int) -> None:
    """The row of an engine that answers meanwhile."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_num_seqs=8, **SETTINGS))
    done = threading.Event()

    async def ask(number: int) -> None:
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        while not done.is_set():
            async for _ in engine.generate("some words", sampling, f"{number}-{os.urandom(4).hex()}"):
                pass

    requests = [asyncio.create_task(ask(i)) for i in range(4)]
    try:
        client = AsyncLLMClient(engine, asyncio.get_running_loop())
        await asyncio.to_thread(measure, "async", client, folder, repeats, SenderConfig(caches="reset_running"))
    finally:
        done.set()
        await asyncio.gather(*requests)
        engine.shutdown()


def main(*, repeats: Annotated[int, Parameter()] = 9) -> None:
    """Run both rows."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as place:
        folder = save_model("qwen3_moe", place, seed=5)
        sync(folder, repeats)
        asyncio.run(beside_requests(folder, repeats))


if __name__ == "__main__":
    cyclopts.run(main)
