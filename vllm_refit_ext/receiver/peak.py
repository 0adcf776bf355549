"""Memory beyond the weights that a refit takes on an engine rank, known before it is taken."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from vllm_refit_ext.core.coded import CHECKPOINT, SCALE, SCALE_OF, dequantised_to
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.receiver.engine import Engine
from vllm_refit_ext.receiver.targets import Targets
from vllm_refit_ext.wires.cuda_ipc import is_mapped


class ReloadBytes(NamedTuple):
    """certain: bytes that the engine's own reload surely holds at once. most: its peak, but for what single kernels hold while
    they run."""

    certain: int
    most: int


def reload_bytes(view: Engine, targets: Targets) -> ReloadBytes:
    """What the engine's own reload holds beside the live tensors at its peak.

    It keeps the checkpoint tensors of a module until all have come, makes the module's tensors as they were created, and copies:
    that much is certain, as far as this rank reads the tensors and its loaders do not compute with them. The module's post-load
    step then makes its output beside that. A module that is never complete, because a part of it is padding or is written in
    place, keeps its tensors to the end.
    """
    certain = most = kept = late = 0
    for name, (loaded, read) in _loaded(targets).items():
        sizes = view.created(name)
        if sizes is None:
            continue
        created, total = sizes
        live = sum(t.numel() * t.element_size() for t in view.model.get_submodule(name).parameters(recurse=False))
        # What a CPU multiplies with is packed, in memory that no tensor names.
        processed = max(live, created) if view.device.type == "cpu" else live
        certain = max(certain, read + created)
        written = sum(n for p, n in targets.reloaded.items() if p.rpartition(".")[0] == name)
        if written < total:
            kept, late = kept + loaded, max(late, created + processed)
        else:
            most = max(most, kept + loaded + created + processed)
    return ReloadBytes(certain, max(most, kept + late))


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`, memory that torch holds and does not use included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    import psutil

    return int(psutil.virtual_memory().available)


def _loaded(targets: Targets) -> dict[str, list[int]]:
    """Module -> bytes of the checkpoint tensors that its loading keeps, and of what is surely kept of them."""
    table = targets.placements
    read = np.bincount(table.buffer, np.prod(table.hi - table.lo, axis=1), len(table.buffers)).astype(np.int64)
    found: dict[str, list[int]] = {}
    for buffer, elements in zip(table.buffers, read.tolist(), strict=True):
        if not buffer.layout.startswith(CHECKPOINT) or SCALE_OF in buffer.name:
            continue
        name = buffer.name if buffer.name in targets.module_of else buffer.name.removesuffix(SCALE)
        size = ITEMSIZE[dequantised_to(buffer.layout) or buffer.dtype]
        both = found.setdefault(targets.module_of.get(name, ""), [0, 0])
        both[0] += math.prod(buffer.shape) * size
        both[1] += elements * size if name not in targets.computed else 0
    return found


def asleep(targets: Targets) -> str:
    """The name of a weight whose memory a sleep has taken away, or nothing. All weights sleep together, so a few are looked
    at."""
    written = {**targets.params, **{name: stored.values for name, stored in targets.stored.items()}}
    for name in list(written)[:: max(1, len(written) // 4)]:
        if written[name].device.type == "cuda" and written[name].numel() and not is_mapped(written[name].data_ptr()):
            return name
    return ""
