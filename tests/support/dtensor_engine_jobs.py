"""Trainers of transformers models with DTensors, in several layouts, that refit the engine behind a URL."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.sender.dtensor import DTensorSource

PRELOAD = ("tests.support.dtensor_engine_jobs", "transformers.models.qwen3_moe.modeling_qwen3_moe")
PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
}
LAYOUTS = ("fsdp", "hsdp", "tp-fsdp", "ep-fsdp", "compiled")


def build(folder: str, layout: str) -> nn.Module:
    """The model of `folder` in float32, over all ranks; `layout` is one of `LAYOUTS`."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if layout == "hsdp":
        options["mesh"] = mesh
    elif layout == "tp-fsdp":
        for layer in model.model.layers:
            parallelize_module(layer, mesh["inner"], PLAN)
        options["mesh"] = mesh["outer"]
    elif layout == "ep-fsdp":
        for layer in model.model.layers:
            experts = layer.mlp.experts
            for name, parameter in list(experts.named_parameters()):
                experts.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh["inner"], [Shard(0)])))
            fully_shard(experts, mesh=mesh["outer"], shard_placement_fn=lambda _: Shard(1))
        options["mesh"] = mesh["outer"]
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return torch.compile(model) if layout == "compiled" else model  # type: ignore[return-value]


def cycle(folder: str, layout: str, url: str, config: dict[str, Any]) -> dict[str, Any]:
    """Other weights, then the checkpoint's, each as a refit. Rank 0 tells what the engine answered and what was sent."""
    model, client = build(folder, layout), HTTPClient(url)
    sender = RefitSender(
        DTensorSource(model), client if dist.get_rank() == 0 else None, SenderConfig(hash_reloaded=True, **config)
    )
    plan = sender.prepare()
    found: dict[str, Any] = {}
    for version, factor in (("other", 2.0), ("trained", 0.5)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        report = sender.refit(version)
        compared = sender.verify()
        found[version] = client.post("/answers", {}, 300) if dist.get_rank() == 0 else None
    sender.close()
    edges = [msgspec.to_builtins(e) for e in plan.edges()] if dist.get_rank() == 0 else []
    return found | {
        "edges": edges,
        "nbytes": report.nbytes,
        "compared": compared,
        "sources": sorted({e["source"] for e in edges}),
    }
