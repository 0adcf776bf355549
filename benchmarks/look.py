"""The one look of a refit at the trainer's tensors, by number of tensors. Milliseconds, best of 20.

    python benchmarks/look.py [--sizes N ...]

`first` is what a source's tensors cost that have all moved, as after a trainer's memory went off the GPU and came back. No weight
is read: the parameters are small, and only their number counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import cyclopts
import torch
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from megatron_sender.bridge import ModelTensor
from megatron_sender.source import SourceMap
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender import DTensorSource
from vllm_refit_ext.sender.prepared import Offered


def module_of(count: int) -> torch.nn.Module:
    """A module with `count` small modules, one parameter each."""
    return torch.nn.Sequential(*(torch.nn.Linear(32, 4, bias=False, dtype=torch.bfloat16) for _ in range(count)))


def megatron_source(module: torch.nn.Module) -> SourceMap:
    """The source map of a module whose parameters travel whole, under their own names."""
    places = [(name, module.get_submodule(name.rpartition(".")[0]), p) for name, p in module.named_parameters()]
    tensors = [p.detach() for _, _, p in places]
    names = [name for name, _, _ in places]
    shape, rows = tuple(tensors[0].shape), []
    for i, name in enumerate(names):
        rows.append(Placement(name, i, (0, 0), shape, 0, (2 * shape[1], 2)))
    buffers = [Buffer(name, 0, "bfloat16", shape) for name in names]
    return SourceMap(
        manifest=dict.fromkeys(names, (shape, "bfloat16")),
        aliases={},
        placements=Placements.from_rows(buffers, rows, names),
        tensors=tensors,
        checkpoint_names=None,
        _items=[ModelTensor(0, name, owner, "weight", None, None) for name, owner, _ in places],
        _chunks=[],
        addresses=[t.data_ptr() for t in tensors],
    )


def best(work: Callable[[], object], repeats: int = 20) -> float:
    """Milliseconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) * 1e3


def main(*, sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (3157, 6314, 12627)) -> None:
    """Print a row for each kind of source and each size; 12,627 are the tensors that one Megatron rank has of Qwen3-30B-A3B."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, make in (("Megatron", megatron_source), ("DTensor", DTensorSource)):
        for count in sizes:
            module = module_of(count)
            offered = Offered(make(module), 0)
            look = best(lambda offered=offered: offered.current({}))
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()
            first = best(lambda offered=offered: offered.current({}), 1)
            print(f"{name}: {count} tensors, look {look:.2f}, first {first:.1f}", flush=True)


if __name__ == "__main__":
    cyclopts.run(main)
