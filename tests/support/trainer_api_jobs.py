"""Trainers that use vLLM's trainer-side factory with sources of both protocols, on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from vllm_refit_ext.sender import RefitTrainerInitInfo, SenderConfig

Pairs = Iterator[tuple[str, Any]]


class Whole(WeightSource):
    """The protocol of 0.28 to 0.32: whole tensors, gathered one by one."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, p.dtype, tuple(p.shape)) for n, p in self.model.named_parameters()]

    def __iter__(self) -> Pairs:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


class OneBuffer(Whole):
    """Gives every tensor in the same memory, as producers that pack do."""

    def __iter__(self) -> Pairs:
        buffer = torch.empty(max(p.numel() for p in self.model.parameters()))
        for name, tensor in super().__iter__():
            yield name, buffer[: tensor.numel()].copy_(tensor.detach().reshape(-1)).view(tensor.shape)


class Split(Whole):
    """With `held_names` (0.32): rank 0 holds what is not in a layer, rank 1 the layers, and both the final norm."""

    def held_names(self) -> set[str]:
        names = [m.name for m in self.metadata()]
        return {n for n in names if (".layers." in n) == (dist.get_rank() == 1) or n == "model.norm.weight"}

    def __iter__(self) -> Pairs:
        held = self.held_names()
        for name, tensor in super().__iter__():
            yield name, tensor if name in held else None


@dataclass(frozen=True)
class Shard:
    """vLLM 0.33's: this mesh axis cuts `dim` as torch.chunk does."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """vLLM 0.33's: every coordinate of this mesh axis holds all."""


@dataclass(frozen=True)
class Meta33:
    """What vLLM 0.33's `ParamMeta` says."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Any, ...] | None = None


class Local33:
    """The protocol of 0.33, written to the signatures in its wheel: pieces, on a mesh of 1 x 2 owners."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @functools.cached_property
    def metadata(self) -> list[Meta33]:
        ranks = tuple(range(dist.get_world_size()))
        mesh = {"owners": ranks, "mesh_shape": (1, len(ranks)), "placements": (Replicate(), Shard(0))}
        return [Meta33(n, p.dtype, tuple(p.shape), **mesh) for n, p in self.model.named_parameters()]

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Pairs:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.to_local()


class Full33(Local33):
    """The same without pieces; the last tensor is rank 1's alone."""

    @functools.cached_property
    def metadata(self) -> list[Meta33]:
        metas = [Meta33(m.name, m.dtype, m.shape) for m in Local33(self.model).metadata]
        return [*metas[:-1], Meta33(metas[-1].name, metas[-1].dtype, metas[-1].shape, owners=(1,))]

    def implements_iter_local(self) -> bool:
        return False

    def implements_iter_full(self) -> bool:
        return True

    def iter_full(self) -> Pairs:
        for meta, (name, parameter) in zip(self.metadata, self.model.named_parameters(), strict=True):
            tensor = parameter.full_tensor()
            if meta.owners is None or dist.get_rank() in meta.owners:
                yield name, tensor


SOURCES = {c.__name__: c for c in (ModuleSource, Whole, OneBuffer, Split, Local33, Full33)}
PRELOAD = ("tests.support.trainer_api_jobs", "transformers.models.qwen3.modeling_qwen3")


class FourCalls:
    """A client of a user's own: the four methods alone, around vLLM's."""

    def __init__(self, inner: HTTPVLLMWeightSyncClient) -> None:
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            setattr(self, name, getattr(inner, name))


def send(folder: str, kind: str, url: str, config: dict[str, Any]) -> dict[str, Any]:
    """Other weights, then the checkpoint's, both by vLLM's factory. Returns what travelled and the tensors kept meanwhile."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    rank = dist.get_rank()
    client: Any = HTTPVLLMWeightSyncClient(url)
    client = FourCalls(client) if kind == "Whole" else client
    info = RefitTrainerInitInfo(rank=rank, config=SenderConfig(hash_reloaded=True, **config))
    engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=SOURCES[kind](model))
    final = [p.detach().clone() for p in model.parameters()]
    for factor in (1.5, 1.0):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), final, strict=True):
                parameter.copy_(value * factor)
        report = engine.send_weights()
    source = engine.sender.prepared.offered.source
    kept = len(getattr(source, "tensors", ())) if kind not in ("ModuleSource",) else 0
    sources = sorted(set(engine.sender.prepared.plan.source.tolist())) if rank == 0 else []
    plan = engine.sender.prepared.plan
    compared = engine.sender.verify() if kind != "Whole" else 0
    engine.shutdown()
    ranks = sorted({plan.sources[i].rank for i in sources})
    return {"version": report.version, "nbytes": report.nbytes, "kept": kept, "ranks": ranks, "compared": compared}
