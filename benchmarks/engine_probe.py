"""What the refit benchmark asks of an engine's worker: memory, and loading as a gather-and-load loop does it."""

from __future__ import annotations

import base64
from typing import Any

import torch

from vllm_refit_ext.engine.extension import RefitWorkerExtension
from vllm_refit_ext.wires import cuda_ipc


class BenchExtension(RefitWorkerExtension):
    """The product's extension with the benchmark's questions."""

    def bench_memory(self, reset: bool = False) -> dict[str, int]:
        """Bytes that torch holds now and at most since the last reset."""
        torch.cuda.synchronize()
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}

    def bench_start(self, layerwise: bool) -> None:
        """Begin a loop of `bench_load`s. layerwise: quantised layers are put back to what they load from."""
        if layerwise:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            with torch.device(self.device):  # type: ignore[attr-defined]
                initialize_layerwise_reload(self.model_runner.model)  # type: ignore[attr-defined]

    def bench_load(self, handle: str, entries: list[list[Any]], layerwise: bool) -> None:
        """Load tensors that lie packed in the trainer's buffer: `entries` are [name, offset in bytes, shape], BF16."""
        opened: dict[str, int] = self.__dict__.setdefault("_bench_opened", {})
        if handle not in opened:
            opened[handle] = cuda_ipc.open_handle(base64.b64decode(handle), torch.device(self.device))  # type: ignore[attr-defined]
        last = entries[-1]
        size = last[1] + 2 * torch.Size(last[2]).numel()
        memory = cuda_ipc.as_tensor(opened[handle], size, torch.device(self.device))  # type: ignore[attr-defined]
        found = []
        for name, at, shape in entries:
            tensor = memory[at : at + 2 * torch.Size(shape).numel()].view(torch.bfloat16).view(shape)
            # The layerwise reload keeps what it is given until a layer is complete.
            found.append((name, tensor.clone() if layerwise else tensor))
        with torch.no_grad(), torch.device(self.device):  # type: ignore[attr-defined]
            self.model_runner.model.load_weights(found)  # type: ignore[attr-defined]
        torch.cuda.synchronize()

    def bench_finish(self, layerwise: bool) -> None:
        """End the loop."""
        if layerwise:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            with torch.device(self.device):  # type: ignore[attr-defined]
                finalize_layerwise_reload(self.model_runner.model, self.model_config)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
