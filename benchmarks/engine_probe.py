"""What the benchmark of peers asks of an engine's worker: memory, and to load weights as each peer does it."""

from __future__ import annotations

import base64
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from vllm_refit_ext.wires import cuda_ipc


class BenchExtension:
    """Methods of a worker, one peer each. `device`, `model_runner`, `model_config` and `vllm_config` are the worker's."""

    device: torch.device
    model_runner: Any
    model_config: Any
    vllm_config: Any

    def bench_memory(self, reset: bool = False) -> dict[str, int]:
        """Bytes that torch has allocated now, and at most since the last reset."""
        torch.cuda.synchronize()
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return {"now": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated()}

    def bench_start(self, layerwise: bool) -> None:
        """Begin a loop of `bench_load`s. layerwise: quantised layers are put back to what they load from."""
        if layerwise:
            with torch.device(self.device):
                initialize_layerwise_reload(self.model_runner.model)

    def bench_load(self, handle: str, entries: list[list[Any]], layerwise: bool) -> None:
        """Load tensors that lie packed in the trainer's buffer: `entries` are [name, offset in bytes, shape], BF16."""
        opened: dict[str, int] = self.__dict__.setdefault("_bench_opened", {})
        if handle not in opened:
            opened[handle] = cuda_ipc.open_handle(base64.b64decode(handle), torch.device(self.device))
        last = entries[-1]
        size = last[1] + 2 * torch.Size(last[2]).numel()
        memory = cuda_ipc.as_tensor(opened[handle], size, torch.device(self.device))
        found = []
        for name, at, shape in entries:
            tensor = memory[at : at + 2 * torch.Size(shape).numel()].view(torch.bfloat16).view(shape)
            # The layerwise reload keeps what it is given until a layer is complete.
            found.append((name, tensor.clone() if layerwise else tensor))
        with torch.no_grad(), torch.device(self.device):
            self.model_runner.model.load_weights(found)
        torch.cuda.synchronize()

    def bench_finish(self, layerwise: bool) -> None:
        """End the loop."""
        if layerwise:
            with torch.device(self.device):
                finalize_layerwise_reload(self.model_runner.model, self.model_config)
        torch.cuda.synchronize()

    def bench_checkpoint_engine(self, socket: str) -> None:
        """checkpoint-engine's own worker, on the other end of a ZMQ socket."""
        import zmq
        from checkpoint_engine.worker import VllmColocateWorkerExtension

        # Its class names the GPU by UUID and keeps a ZMQ context, both as cached properties of the worker that it is mixed into.
        mixed: Any = SimpleNamespace(
            _device_uuid="gpu",
            _zmq_ctx=zmq.Context.instance(),
            device=self.device,
            model_runner=self.model_runner,
            model_config=self.model_config,
        )
        VllmColocateWorkerExtension.update_weights_from_ipc(mixed, {"gpu": socket})

    def bench_modelexpress(self, repeats: int) -> list[float]:
        """ModelExpress' reshard receiver: seconds of its install step, from receive buffers that are on the device already.

        Its own capture decides which buffers there are; what discovers sources and reads from them is not run.
        """
        from modelexpress.engines.vllm.refit.receiver import VllmReshardReceiver

        mixed: Any = SimpleNamespace(
            _model=self.model_runner.model, _vllm_config=self.vllm_config, _model_config=self.model_config, _device=self.device
        )
        mixed._process_and_commit = lambda buffers: VllmReshardReceiver._process_and_commit(mixed, buffers)
        skeleton = VllmReshardReceiver._build_meta_twin(mixed)
        buffers = {
            name: torch.empty_like(parameter, device=self.device).normal_(0, 0.02)
            for name, parameter in skeleton.named_parameters()
        }
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            VllmReshardReceiver._install(mixed, buffers)
            torch.cuda.synchronize()
            found.append(time.perf_counter() - begin)
        return found
