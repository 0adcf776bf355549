"""Memory beyond the weights that a refit takes on an engine rank, known before it is taken."""

from __future__ import annotations

import torch
from torch import nn

from vllm_refit_ext.core.coded import CHECKPOINT
from vllm_refit_ext.receiver.targets import Targets
from vllm_refit_ext.receiver.worker_view import WorkerView

COPIES = {"cpu": 4}
"""Sizes of a module that its post-load step holds at most, on devices of this type; elsewhere 2, the module as created and as
processed. A CPU's kernels transpose and pack beside that (measured: a reload of one large module takes five times its size)."""


def reload_bytes(view: WorkerView, targets: Targets) -> int:
    """Bytes that the engine's own reload holds at most.

    A module's checkpoint tensors are held until it is complete; then its tensors are made as created and processed. A module that
    is never complete, because a part of it is padding or is written in place, is held to the end.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    modules = dict(view.model.named_modules())
    staged: dict[str, int] = {}
    for buffer in targets.placements.buffers:
        if buffer.layout.startswith(CHECKPOINT):
            module = targets.module_of.get(buffer.name, "")
            staged[module] = staged.get(module, 0) + buffer.nbytes
    to_the_end = peak = 0
    for name, nbytes in staged.items():
        created, total = _created(get_layerwise_info(modules[name]).restore_metadata) if name in modules else (0, 0)
        peak = max(peak, to_the_end + nbytes + COPIES.get(view.device.type, 2) * created)
        written = sum(n for p, n in targets.reloaded.items() if p.rpartition(".")[0] == name)
        to_the_end += nbytes if written < total else 0
    return peak


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`, memory that torch holds and does not use included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    return int(psutil.virtual_memory().available)


def _created(metadata: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]) -> tuple[int, int]:
    """(bytes, elements) of a module's tensors as created."""
    tensors = [t for table in metadata for t in table.values() if not isinstance(t, nn.parameter.UninitializedParameter)]
    return sum(t.numel() * t.element_size() for t in tensors), sum(t.numel() for t in tensors)
