"""Every tensor and float of a model with its address, to compare before and after."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from vllm_refit_ext.engine.inventory import everything


class Entry(msgspec.Struct, frozen=True):
    """One tensor, or one float, that a model holds.

    `name` is the path from the model; `kind` is "parameter", "buffer", "derived" (a tensor that is neither) or "float". For
    tensors `data_ptr` is the address of the first element, `stride` in elements, `dtype` torch's name, `shared` the name
    under which the same memory was listed first (empty if here). A float has its `value`.
    """

    name: str
    kind: str
    data_ptr: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    shared: str = ""
    value: float = 0.0


def inventory(model: nn.Module) -> list[Entry]:
    """All tensors that `model` holds, by name: parameters and buffers, then those on modules, quant methods and kernels."""
    entries: list[Entry] = []
    for found in everything(model):
        if isinstance(found.value, torch.Tensor):
            entries.append(_tensor(found.name, found.kind, found.value))
        else:
            entries.append(Entry(found.name, found.kind, value=found.value))
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    return [_shared(entry, first) for entry in entries if entry.kind != "alias"]


def _tensor(name: str, kind: str, value: torch.Tensor) -> Entry:
    dtype = str(value.dtype).removeprefix("torch.")
    address = 0 if value.is_meta else value.data_ptr()
    return Entry(name, kind, address, tuple(value.shape), tuple(value.stride()), dtype, str(value.device))


def _shared(entry: Entry, first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str]) -> Entry:
    if not entry.data_ptr:
        return entry
    name = first.setdefault((entry.data_ptr, entry.shape, entry.stride), entry.name)
    return entry if name == entry.name else msgspec.structs.replace(entry, shared=name)
