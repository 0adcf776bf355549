"""Seconds of the source's half of `prepare` for FSDP2 at full size, offline: no weights, no process group, any coordinate.

    python -m benchmarks.dtensor [CONFIG.json] [RANKS]     # by default Qwen3-30B-A3B over 8 ranks

`record` runs transformers' conversion to the checkpoint once on every rank; `place` makes the table of one rank.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from vllm_refit_ext.core.box import volume
from vllm_refit_ext.sender.conversion import LocalTensor, Whole, boxes_of_copy, place, record
from vllm_refit_ext.sender.geometry import Cut, Shard, shards

MODEL = Path(__file__).resolve().parents[1] / "examples/recipes/models/qwen3-30b-a3b.json"


def local_shape(held: list[Shard]) -> tuple[int, ...]:
    """The shape of the one box that FSDP2 leaves on a rank."""
    return tuple(b - a for a, b in zip(held[0].lo, held[0].hi, strict=True))


def main(config: Path, ranks: int) -> None:
    """Print the times and sizes."""
    fields = json.loads(config.read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.bfloat16)
    tensors = {name: Whole(tuple(t.shape), "bfloat16") for name, t in model.state_dict().items()}
    begin = time.perf_counter()
    conversion = record(tensors, functools.partial(revert_weight_conversion, model))
    spent = time.perf_counter() - begin
    print(f"record: {spent:.2f} s, {len(tensors)} tensors of the model, {len(conversion.specs)} of the checkpoint")
    rows, elements, seconds = 0, 0, []
    for rank in range(ranks):
        boxes_of_copy.cache_clear()  # each rank is a process of its own
        begin = time.perf_counter()
        found = {name: shards(whole.shape, (ranks,), (rank,), [Cut(0)]) for name, whole in tensors.items()}
        table = place(conversion, [LocalTensor(name, local_shape(held), held) for name, held in found.items() if held], rank)
        seconds.append(time.perf_counter() - begin)
        rows += len(table)
        elements += int(volume(table.lo, table.hi).sum())
    print(f"place: {min(seconds):.2f} to {max(seconds):.2f} s a rank, {rows} boxes of {ranks} ranks")
    whole = sum(torch.Size(spec.shape).numel() for spec in conversion.specs.values())
    print(f"{elements} elements are held, the checkpoint has {whole}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL, int(sys.argv[2]) if len(sys.argv) > 2 else 8)
