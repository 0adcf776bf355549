"""What GPU tests ask a worker: the bytes and addresses of everything that its model holds, its kernels, its memory."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.gpu_engine import sha
from vllm_refit_ext.engine import inventory
from vllm_refit_ext.engine.extension import RefitWorkerExtension


class ProbeExtension(RefitWorkerExtension):
    """The product's extension with questions."""

    def probe_tensors(self) -> dict[str, list[Any]]:
        """Name -> [sha256, address, dtype, shape] of every tensor of the model."""
        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        return {
            n: [sha(t), t.data_ptr(), str(t.dtype), list(t.shape)] for n, t in inventory.tensors(model).items() if not t.is_meta
        }

    def probe_kernels(self) -> dict[str, int]:
        """Quantisation methods with their kernels, and how many modules have each."""
        count: dict[str, int] = {}
        for module in self.model_runner.model.modules():  # type: ignore[attr-defined]
            method = getattr(module, "quant_method", None)
            if method is not None:
                parts = [type(module).__name__, type(method).__name__, type(getattr(method, "kernel", None)).__name__]
                parts += [str(getattr(method, n, "")) for n in ("fp8_backend", "mxfp8_backend", "unquantized_backend")]
                count[" ".join(parts)] = count.get(" ".join(parts), 0) + 1
        return count

    def probe_memory(self) -> dict[str, int]:
        """Bytes that torch holds, and free bytes of the device."""
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": torch.cuda.mem_get_info()[0],
        }

    def probe_peak(self, reset: bool = False) -> int:
        """Most bytes that torch held since the last reset."""
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()

    def probe_update(self, info: Any, repeats: int = 1) -> list[Any]:
        """Run an update `repeats` times inside the worker; seconds of each by phase, without the way there."""
        import time

        from vllm_refit_ext.engine.extension import receiver_of

        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            report = receiver_of(self).update(info)
            found.append({"all": time.perf_counter() - begin, **report.seconds})
        return found
