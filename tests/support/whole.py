"""A trainer with whole tensors and no Megatron: it offers a checkpoint's tensors from one process over wire `shm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from vllm_refit_ext.client import EngineClient, raise_problems
from vllm_refit_ext.core.messages import PrepareReply, UpdateInfo, UpdateReport
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.wires import shm


class WholeTrainer:
    """Holds `tensors`; `prepare` and `update` drive one engine."""

    def __init__(self, client: EngineClient, folder: Path) -> None:
        self.client = client
        self.tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
        self.publisher: shm.ShmPublisher | None = None

    def info(self) -> dict[str, Any]:
        """state_dict_info in its plain form, as JSON-like values."""
        return {name: [list(t.shape), str(t.dtype)] for name, t in self.tensors.items()}

    def prepare(self, info: Any = None) -> list[PrepareReply]:
        return self.client.prepare(self.info() if info is None else info)

    def publish(self, name: str, **fields: Any) -> UpdateInfo:
        """Fill the segment and return what `update_weights` is to be given."""
        buffers = [Buffer(n, 0, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items()]
        offsets, sizes = shm.segment_offsets(buffers, np.arange(len(buffers)))
        self.close()
        self.publisher = shm.ShmPublisher(0, {i: int(at) for i, at in enumerate(offsets)}, sizes[0])
        segment = self.publisher.publish(dict(enumerate(self.tensors.values())))
        return UpdateInfo(**{"wire": "shm", "version": name, "session": name, "shm": shm.shm_info([segment], offsets), **fields})

    def refit(self, version: str) -> list[UpdateReport]:
        """A whole refit: prepare without problems, publish, update."""
        raise_problems(self.prepare())
        return self.client.update(self.publish(version))

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
