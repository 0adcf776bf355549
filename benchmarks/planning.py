"""Time and memory to plan at full published size: routes of one worker, and 512 trainer ranks to 256 engine ranks.

    python benchmarks/planning.py [--json FILE]

No weights exist and nothing is downloaded. Sources and targets of the joint plan are cut by rule here (DeepSeek-V3's tensors;
trainer PP8 x EP64 with the dense weights replicated 64 times; eight engines of 32 ranks with EP32), because the point is the
planner's cost. The smaller plans show how the cost grows with the number of moves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planning_routes import MODELS
from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placements
from vllm_refit_ext.core.plan import Plan, build_plan

EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.")
LAYER = re.compile(r"layers\.(\d+)\.")


def stored_whole(manifest: Manifest, holders: dict[str, list[int]]) -> Placements:
    """A table in which every tensor lies whole in a buffer of each of its holders."""
    names = list(manifest.tensors)
    depth = max(len(t.shape) for t in manifest.tensors.values())
    counts = np.array([len(holders[n]) for n in names])
    shapes = np.array([[*t.shape, *([1] * (depth - len(t.shape)))] for t in manifest.tensors.values()], np.int64)
    strides = np.array(
        [[ITEMSIZE[t.dtype] * s for s in row_strides(t.shape)] + [0] * (depth - len(t.shape)) for t in manifest.tensors.values()],
        np.int64,
    )
    tensor = np.repeat(np.arange(len(names)), counts)
    buffers = [Buffer(n, rank, manifest.tensors[n].dtype, manifest.tensors[n].shape) for n in names for rank in holders[n]]
    n = len(tensor)
    return Placements(
        names,
        buffers,
        tensor,
        np.arange(n),
        np.zeros((n, depth), np.int64),
        shapes[tensor],
        np.zeros(n, np.int64),
        strides[tensor],
    )


def holders(manifest: Manifest, ranks: int, pp: int, ep: int, layers: int) -> dict[str, list[int]]:
    """Who holds each tensor when `ranks` = pp x ep: a layer's stage, and of experts the rank whose turn it is."""
    experts = 1 + max((int(m[2]) for m in map(EXPERT.search, manifest.tensors) if m), default=0)
    found = {}
    for name in manifest.tensors:
        layer, expert = LAYER.search(name), EXPERT.search(name)
        stage = int(layer[1]) * pp // (layers + 1) if layer else (pp - 1 if "norm" in name or "head" in name else 0)
        group = [stage * ep + r for r in range(ep)]
        copies = ranks // (pp * ep)
        if expert:
            group = [stage * ep + int(expert[2]) * ep // experts]
        found[name] = [r + c * pp * ep for c in range(copies) for r in group]
    return found


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def plan_at(model: str, trainer: tuple[int, int, int], engine: tuple[int, int, int]) -> dict[str, Any]:
    """Build one joint plan. trainer, engine: (ranks, pipeline stages, expert parallel size)."""
    config, entries = MODELS[model]()
    manifest = Manifest({n: TensorSpec(s, d) for n, (s, d) in entries.items()})
    layers = config["num_hidden_layers"]
    sources = stored_whole(manifest, holders(manifest, *trainer, layers))
    targets = stored_whole(manifest, holders(manifest, *engine, layers))
    begin = time.perf_counter()
    plan: Plan = build_plan(manifest, sources, targets)
    seconds = time.perf_counter() - begin
    egress = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=trainer[0])
    return {
        "model": model,
        "trainer": trainer,
        "engine": engine,
        "source rows": len(sources),
        "target rows": len(targets),
        "moves": len(plan),
        "seconds": round(seconds, 2),
        "us a move": round(1e6 * seconds / len(plan), 2),
        "bytes": int(plan.nbytes.sum()),
        "egress variation within a stage": round(stage_variation(egress, trainer[1]), 4),
        "peak MiB": peak_mib(),
    }


def stage_variation(egress: np.ndarray, stages: int) -> float:
    """Coefficient of variation of bytes given by ranks of one stage, the largest over stages."""
    by_stage = egress.reshape(-1, stages, len(egress) // stages) if len(egress) % stages == 0 else egress.reshape(1, 1, -1)
    return float((by_stage.std(axis=2) / np.maximum(by_stage.mean(axis=2), 1)).max())


CASES = [
    ("DeepSeek-V3", (64, 8, 8), (32, 1, 32)),
    ("DeepSeek-V3", (256, 8, 32), (128, 1, 32)),
    ("DeepSeek-V3", (512, 8, 64), (256, 1, 32)),
]


def routes_of(model: str) -> str:
    """The routes benchmark of one worker, in a process of its own so that its memory is its own."""
    command = [sys.executable, str(Path(__file__).with_name("planning_routes.py")), model]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--no-routes", action="store_true", help="the joint plans only")
    arguments = parser.parse_args()
    setup = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print("setup:", ", ".join(f"{k} {v}" for k, v in setup.items()))
    routes = {} if arguments.no_routes else {model: routes_of(model) for model in MODELS}
    for text in routes.values():
        print(text)
    plans = []
    for case in CASES:
        plans.append(plan_at(*case))
        print("plan:", ", ".join(f"{k} {v}" for k, v in plans[-1].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"setup": setup, "routes": routes, "plans": plans}, indent=1))


if __name__ == "__main__":
    main()
