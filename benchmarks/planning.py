"""Time and memory to plan at full published size: routes of one worker, and joint plans up to 4,096 x 2,048 ranks.

    python benchmarks/planning.py [--json FILE] [--no-routes] [--models MODEL ...]

No weights exist and nothing is downloaded. Sources and targets of a joint plan are cut by rule here, because the point is the
planner's cost. Trainer: pipeline stages, experts over the ranks of a stage, dense weights replicated there; engines: experts over
all ranks, dense weights whole on each. Each size is planned in a process of its own, so that its peak memory is its own, and the
growth from size to size is printed.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.planning_routes import MODELS
from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.part import layers as layers_of
from vllm_refit_ext.core.part import names_in, part_of
from vllm_refit_ext.core.placement import Buffer, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.plan_wire import pack_plan
from vllm_refit_ext.wires.ipc import send_tables

T = TypeVar("T")

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
    hosts = Hosts([f"t{r // 8}" for r in range(trainer[0])], [f"e{r // 8}" for r in range(engine[0])])
    before, found = peak_mib(), dict[str, float]()

    def timed(what: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        found[what] = round(time.perf_counter() - begin, 3)
        return result

    plan = timed("plan", lambda: build_plan(manifest, sources, targets))
    timed("digests", lambda: [plan.digest(rank) for rank in range(engine[0])])
    timed("tables", lambda: send_tables(plan, hosts))
    timed("parts", lambda: [len(pack_plan(plan.for_source(rank)).columns) for rank in range(trainer[0])])
    timed("one layer", lambda: part_of(plan, names_in(manifest, layers_of(1))))
    peak = peak_mib()
    late = targets.select(targets.rank < engine[2])
    own = timed("late engine", lambda: build_plan(manifest, sources, late))
    assert own.digest(0) == plan.digest(0)
    egress = np.bincount(plan.source_rank, weights=plan.nbytes, minlength=trainer[0])
    return {
        "model": model,
        "trainer": trainer,
        "engine": engine,
        "source rows": len(sources),
        "target rows": len(targets),
        "moves": len(plan),
        "seconds": found,
        "bytes": int(plan.nbytes.sum()),
        "egress variation within a stage": round(stage_variation(egress, trainer[1]), 4),
        "MiB of both tables": before,
        "peak MiB": peak,
    }


def stage_variation(egress: np.ndarray, stages: int) -> float:
    """Coefficient of variation of bytes given by ranks of one stage, the largest over stages."""
    by_stage = egress.reshape(-1, stages, len(egress) // stages) if len(egress) % stages == 0 else egress.reshape(1, 1, -1)
    return float((by_stage.std(axis=2) / np.maximum(by_stage.mean(axis=2), 1)).max())


SIZES = {
    "Qwen3-30B-A3B": [((r, 2, r // 2), (r // 2, 1, 8)) for r in (16, 64, 256)],
    "Qwen3-235B-A22B": [((r, 4, min(r // 4, 64)), (r // 2, 1, 16)) for r in (64, 256, 1024)],
    "DeepSeek-V3": [((r, 8, 64), (r // 2, 1, 32)) for r in (512, 2048, 4096)],
}
"""Three sizes of each model: (trainer ranks, pipeline stages, expert parallel size) and the same of the engines."""


def in_a_process(model: str, size: int) -> dict[str, Any]:
    """`plan_at` of one of `SIZES`, in a process of its own."""
    command = [sys.executable, __file__, "--one", model, str(size)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout)
    return answer


def routes_of(model: str) -> str:
    """The routes benchmark of one worker, in a process of its own so that its memory is its own."""
    command = [sys.executable, str(Path(__file__).with_name("planning_routes.py")), model]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--no-routes", action="store_true", help="the joint plans only")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES), help="those of the joint plans")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        model, size = arguments.one
        print(json.dumps(plan_at(model, *SIZES[model][int(size)])))
        return
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
    for model in arguments.models:
        last: dict[str, Any] = {}
        for size in range(len(SIZES[model])):
            plans.append(now := in_a_process(model, size))
            spent = ", ".join(f"{what} {seconds}" for what, seconds in now["seconds"].items())
            print(
                f"{model} {now['trainer'][0]} x {now['engine'][0]}: {now['source rows']} source rows, {now['moves']} moves, "
                f"seconds: {spent}; {now['MiB of both tables']} MiB with both tables, peak {now['peak MiB']} MiB, "
                f"egress varies by {now['egress variation within a stage']} in a stage",
                flush=True,
            )
            if last:
                grown = {what: round(s / max(last["seconds"][what], 1e-3), 1) for what, s in now["seconds"].items()}
                print(f"    moves x {now['moves'] / last['moves']:.1f}; seconds x", grown)
            last = now
    if arguments.json:
        arguments.json.write_text(json.dumps({"setup": setup, "routes": routes, "plans": plans}, indent=1))


if __name__ == "__main__":
    main()
