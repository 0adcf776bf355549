"""Seconds of the CPU of what an engine rank does at prepare, at a published model's full size, without a GPU and without weights.

    python benchmarks/preparing.py [MODEL] [--layers N ...] [--tp N] [--json FILE]

The model is built on the meta device and its loader recorded; the parameters of experts and attention are taken as MXFP8 in
Marlin's layout, as vLLM holds them on an H200. One trainer rank offers Megatron's shards, quantised by the trainer or not. The
tables of kernels are packed and bound as on a GPU (the addresses are numbers), and not launched. With several `--layers` the same
is done for that many layers, which shows how each part grows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shards import QWEN3_30B, Shards
from vllm_refit_ext.core.coded import Coding
from vllm_refit_ext.core.layouts import Stored, layout_of
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.kernels.table import Table
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.receiver.kernel_moves import kernel_moves, number_buffers
from vllm_refit_ext.receiver.kernel_writer import KernelWriter
from vllm_refit_ext.receiver.recording import Recording
from vllm_refit_ext.receiver.routes.table import Routes
from vllm_refit_ext.receiver.target_places import place
from vllm_refit_ext.sender.prequantize import Prequantised
from vllm_refit_ext.wires import BUCKET_BYTES
from vllm_refit_ext.wires.ring import RingRounds

PLAIN_PARTS = ("norm", "mlp.gate.weight", "embed_tokens", "lm_head")
"""Parameters that an MXFP8 engine keeps in BF16."""


def routes_of(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], tp: int) -> Routes:
    """Rank 0's routes of an engine of `tp` ranks, recorded on a model without storage."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_refit_ext.engine.offline import engine_routes

    return engine_routes(config, {name: (spec.shape, "bfloat16") for name, spec in specs.items()}, tp=tp)


def marlin(buffer: Buffer) -> StoredParam:
    """A parameter as Marlin holds it, without storage."""
    *lead, n, k = buffer.shape
    stored = Stored(n, k)
    shapes = layout_of("marlin").value_shape(stored), layout_of("marlin").scale_shape(stored)
    values, scales = (torch.empty((*lead, *shape), dtype=torch.uint8, device="meta") for shape in shapes)
    return StoredParam(Coding("marlin", "floor"), buffer.shape, stored, values, [scales])


def stored_params(buffers: list[Buffer]) -> dict[str, StoredParam]:
    """The parameters that an MXFP8 engine holds as codes and scales."""
    return {b.name: marlin(b) for b in buffers if len(b.shape) > 1 and not any(part in b.name for part in PLAIN_PARTS)}


def steps_of(layers: int, tp: int, prequantised: bool) -> dict[str, float]:
    """Seconds of the CPU of every part of one prepare with `layers` layers."""
    seconds: dict[str, float] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        seconds[name] = round(time.process_time() - begin, 3)

    config = {**QWEN3_30B, "num_hidden_layers": layers}
    shards = Shards(config, "meta")
    specs, placements = shards.specs, shards.placements
    with part("routes"):
        routes = routes_of(config, specs, tp)
    stored = stored_params(routes.placements.buffers)
    if prequantised:
        coded = np.array([b.name in stored for b in routes.placements.buffers], bool)
        names = {routes.placements.names[t] for t in np.unique(routes.placements.tensor[coded[routes.placements.buffer]])}
        with part("what the trainer quantises"):
            offer = Prequantised(specs, placements, shards.tensors, names)
        specs, placements = offer.specs, offer.placements
    manifest = Manifest(specs)
    partners = {name: spec.scale for name, spec in specs.items() if spec.format == "mxfp8"}
    with part("targets"):
        targets = place(Recording(routes, partners, frozenset(), "bfloat16"), {}, stored, manifest, 0)
    with part("plan"):
        plan = build_plan(manifest, placements, targets)
    with part("moves of kernels"):
        made = kernel_moves(plan, stored)
    params = {
        b.name: torch.empty(b.shape, dtype=getattr(torch, b.dtype), device="meta") for b in targets.buffers if b.layout == "plain"
    }
    with part("writer"):
        writer = KernelWriter(plan, params, stored, torch.device("cpu"), made)
    with part("table"):
        table = Table(writer._moves, "cpu", backend="triton")
    buffers: list[Any] = [256 * (1 + i) << 30 for i in range(table_buffers(plan, stored))]
    with part("bind"):
        table.bind(buffers)
    with part("rounds"):
        rounds = RingRounds(plan, BUCKET_BYTES, torch.device("cpu"), {})
    with part("writers of rounds"):
        for step in rounds.steps:
            Table(KernelWriter(step, params, stored, torch.device("cpu"))._moves, "cpu", backend="triton")
    return {"layers": layers, "moves": len(plan), "steps": len(rounds.steps), **seconds}


def table_buffers(plan: Plan, stored: Mapping[str, StoredParam]) -> int:
    """Buffers that a table of the plan is bound to."""
    numbers = number_buffers(plan, stored)
    return len(plan.sources) + len(numbers.plain) + len(numbers.values) + sum(map(len, numbers.scales.values()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 24, 48])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    steps_of(1, 1, False)  # pays for imports, which a worker has behind it
    found = []
    for prequantised in (False, True):
        for layers in arguments.layers:
            figures = steps_of(layers, arguments.tp, prequantised)
            found.append({"quantised by": "trainer" if prequantised else "receiver", **figures})
            print(", ".join(f"{k} {v}" for k, v in found[-1].items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
