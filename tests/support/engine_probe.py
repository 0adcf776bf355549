"""A real engine inside ranks, for the launcher's test."""

from __future__ import annotations

import os
from pathlib import Path


def generate(folder: str) -> tuple[list[int], bool]:
    """Greedy tokens of a tensor-parallel engine over all ranks, and whether its shared memory carries the ranks' own name."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        enforce_eager=True,
        kv_cache_memory_bytes=32 << 20,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        enable_prefix_caching=False,
        seed=0,
    )
    output = engine.generate(["refit"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0].outputs[0]
    own = f"ranks-{os.getuid()}-{os.environ['MASTER_PORT']}"
    return list(output.token_ids), any(own in path.name for path in Path("/dev/shm").iterdir())
