"""One rank of a vLLM engine, as `receiver.engine.Engine` asks for it, made from the worker that it lives in.

The worker extension and the `refit` weight-transfer backend both end here; nothing else touches the worker object.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.engine import guard, reload
from vllm_refit_ext.engine.anchors import Anchors
from vllm_refit_ext.engine.created import created_bytes
from vllm_refit_ext.engine.derived import Derived
from vllm_refit_ext.engine.live_layout import look_at
from vllm_refit_ext.engine.record import record_routes
from vllm_refit_ext.engine.stored import config_scale, has_config, is_mxfp8
from vllm_refit_ext.engine.versions import version
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.receiver.routes.table import Routes

_SERIALS = itertools.count()


@dataclass
class EngineRank:
    """One engine rank, see `receiver.engine.Engine`.

    `model`: the served module (with LoRA wrappers if there are any). `rank`, `world_size`: within one engine replica
    (tensor x pipeline parallel), not across data parallel replicas. `replica`: the data parallel index. `executor`: vLLM's
    name for how ranks are run ("mp", "uni", "ray", "external_launcher", or a class name). `serial`: number of this engine among
    those of this process, in the order of their first calls. `exchange`: see `agree`. `recorded`: see `recording`.
    """

    model: torch.nn.Module
    vllm_config: Any
    device: torch.device
    rank: int
    world_size: int
    replica: int = 0
    executor: str = "uni"
    worker: Any = None
    model_runner: Any = None
    serial: int = 0
    exchange: Any = field(default=None, repr=False)
    recorded: Any = field(default=None, repr=False)
    anchors: Anchors = field(default_factory=Anchors, repr=False)

    @property
    def speaks(self) -> bool:
        """Whether this rank raises an error that all ranks agreed on.

        vLLM's multiprocess executor reads the replies in rank order and stops at the first failure; what later ranks
        answered stays queued and is then taken for the answer to the next call. So only the last rank may raise.
        With the external launcher each rank answers its own caller.
        """
        return self.executor == "external_launcher" or self.rank == self.world_size - 1

    @classmethod
    def of_worker(cls, worker: Any) -> EngineRank:
        """The view of a live vLLM worker, made once and kept on it (`worker._refit_view`)."""
        view = worker.__dict__.get("_refit_view")
        if isinstance(view, cls) and view.model is worker.model_runner.model:
            return view
        parallel = worker.vllm_config.parallel_config
        backend = parallel.distributed_executor_backend
        fresh = cls(
            model=worker.model_runner.model,
            vllm_config=worker.vllm_config,
            device=torch.device(worker.device),
            rank=worker.rank % parallel.world_size,
            world_size=parallel.world_size,
            replica=parallel.data_parallel_index,
            executor=backend if isinstance(backend, str) else getattr(backend, "__name__", "uni"),
            worker=worker,
            model_runner=worker.model_runner,
        )
        if isinstance(view, cls):
            fresh.serial, fresh.exchange, fresh.anchors = view.serial, view.exchange, view.anchors
        else:
            fresh.serial = next(_SERIALS)
        worker._refit_view = fresh
        return fresh

    @property
    def name(self) -> str:
        """See `Engine`, as for all that follows."""
        return f"vllm {version()}"

    @property
    def dtype(self) -> str:
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")

    @property
    def pipelined(self) -> bool:
        return bool(self.vllm_config.parallel_config.pipeline_parallel_size > 1)

    @property
    def has_mxfp8(self) -> bool:
        return any(is_mxfp8(module) for module in self.model.modules())

    def record(self, entries: Mapping[str, tuple[Sequence[int], str]], rank: int) -> Routes:
        return record_routes(self.model, entries, rank=rank, vllm_config=self.vllm_config)

    def renamed(self, name: str) -> str:
        mapper: Any = getattr(self.model, "hf_to_vllm_mapper", None)
        return "" if mapper is None else str(mapper._map_name(name) or "")

    def look(self, created: Iterable[Buffer], live: Mapping[str, torch.Tensor]) -> tuple[dict[str, StoredParam], dict[str, str]]:
        return look_at(self, created, live)

    def second_scales(self, slots: Iterable[tuple[nn.Module, str]]) -> list[Callable[[], int]]:
        return [functools.partial(config_scale, m, a) for m, a in slots if a.endswith("weight") and has_config(m)]

    def created(self, module: str) -> tuple[int, int] | None:
        return created_bytes(self.model, module)

    def derived(self, written: Iterable[torch.Tensor]) -> Derived:
        return Derived(self, written)

    def anchor(self) -> None:
        self.anchors.hold(self.model)

    def reload(self, tensors: Iterator[tuple[str, torch.Tensor]], names: Collection[str], written: Mapping[str, int]) -> None:
        reload.reload_weights(self, tensors, names, written)
        self.anchor()

    def recover(self) -> None:
        reload.recover(self)

    def mark_torn(self, reason: str) -> None:
        guard.mark_torn(self.worker, reason)

    def commit(self) -> None:
        guard.commit(self.worker)
