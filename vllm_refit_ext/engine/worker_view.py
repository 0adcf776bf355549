"""What a receiver needs to know of the vLLM worker it lives in, in one place for every way of getting there.

The worker extension and the `refit` weight-transfer backend both end in the same `WorkerView`; nothing else of the
receiver touches the worker object.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

_SERIALS = itertools.count()


@dataclass
class WorkerView:
    """One engine rank.

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

    @property
    def speaks(self) -> bool:
        """Whether this rank raises an error that all ranks agreed on.

        vLLM's multiprocess executor reads the replies in rank order and stops at the first failure; what later ranks
        answered stays queued and is then taken for the answer to the next call. So only the last rank may raise.
        With the external launcher each rank answers its own caller.
        """
        return self.executor == "external_launcher" or self.rank == self.world_size - 1

    @classmethod
    def of_worker(cls, worker: Any) -> WorkerView:
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
            fresh.serial, fresh.exchange = view.serial, view.exchange
        else:
            fresh.serial = next(_SERIALS)
        worker._refit_view = fresh
        return fresh
