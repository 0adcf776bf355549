"""A trainer written to vLLM's own weight-transfer classes, with the name of our backend and nothing else of ours.

    VLLM_SERVER_DEV_MODE=1 vllm serve CHECKPOINT --weight-transfer-config '{"backend": "refit"}'
    torchrun --nproc-per-node 2 examples/vllm_trainer_api.py CHECKPOINT --url http://127.0.0.1:8000 --steps 2

Each rank holds its FSDP2 shards of the model, changes them a little, and hands them to the server. Needs vLLM 0.28 or later.
"""

from __future__ import annotations

import os
from pathlib import Path

import cyclopts
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from vllm_refit_ext.sender import RefitTrainerInitInfo


def main(checkpoint: Path, *, url: str = "http://127.0.0.1:8000", steps: int = 1, dtype: str = "float32") -> None:
    """Send `steps` versions; what the last one holds is the checkpoint in `checkpoint`."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    if dist.is_initialized():
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    engine = WeightTransferTrainerFactory.trainer_init(
        RefitTrainerInitInfo(rank=rank), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    trained = [p.detach().clone() for p in model.parameters()]
    for left in reversed(range(steps)):
        with torch.no_grad():  # in place of an optimizer's step
            for parameter, final in zip(model.parameters(), trained, strict=True):
                parameter.copy_(final * (1 + 0.1 * left))
        report = engine.send_weights()
        if rank == 0:
            print(f"{report.version}: {report.nbytes} bytes in {report.seconds['total']:.3f} s", flush=True)
    engine.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    cyclopts.run(main)
