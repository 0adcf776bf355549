"""Every live tensor of a worker's model after post-load processing: parameters, buffers, and what was derived from them.

Kernels read more than parameters: absorbed MLA projections, scales held a second time by a MoE kernel's config, workspaces,
KV scales with their copies on the host. After a refit each of them must equal a fresh engine's, and each tensor must still
lie at its old address, because captured graphs keep addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import nn

DEPTH = 4
"""Objects that `inventory` follows from a module before it stops: module -> quant method -> kernel -> config -> tensor."""

NOT_WEIGHTS = frozenset({"_parameters", "_buffers", "_modules", "kv_cache"})
"""Attributes of modules that are torch's own tables, or memory that a refit has nothing to do with."""

PLAIN = (str, bytes, bool, int, type(None), torch.dtype, torch.device, torch.Size)


class Held(msgspec.Struct, frozen=True):
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


def inventory(model: nn.Module) -> list[Held]:
    """All tensors that `model` holds, by name: parameters and buffers, then those on modules, quant methods and kernels."""
    held: list[Held] = []
    for name, kind, value in _everything(model):
        if isinstance(value, torch.Tensor):
            held.append(_tensor(name, kind, value))
        else:
            held.append(Held(name, kind, value=value))
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    return [_shared(entry, first) for entry in held]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `inventory`, by the same names, to compare or to write."""
    return {name: value for name, _, value in _everything(model) if isinstance(value, torch.Tensor)}


def _everything(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    modules = list(model.named_modules())
    for path, module in modules:
        for name, value in module._parameters.items():
            if value is not None:
                yield _join(path, name), "parameter", value
    for path, module in modules:
        for name, value in module._buffers.items():
            if value is not None:
                yield _join(path, name), "buffer", value
    seen = {id(module) for _, module in modules}
    known = {id(v) for _, m in modules for t in (m._parameters, m._buffers) for v in t.values()}
    for path, module in modules:
        for name, value in module.__dict__.items():
            if name not in NOT_WEIGHTS and not _engine_wide(value):
                yield from _derived(_join(path, name), value, seen, known, DEPTH)


def _derived(path: str, value: Any, seen: set[int], known: set[int], depth: int) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            known.add(id(value))
            yield path, "derived", value
        return
    if isinstance(value, float):
        yield path, "float", value
        return
    if depth == 0 or isinstance(value, (*PLAIN, type, nn.Module)) or id(value) in seen or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif type(value).__module__.partition(".")[0] in ("vllm", "vllm_refit_ext"):
        parts = [(f"{path}.{name}", item) for name, item in _attributes(value) if not _engine_wide(item)]
    else:
        return
    for name, item in parts:
        yield from _derived(name, item, seen, known, depth - 1)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Instance attributes, in `__dict__` or slots."""
    named = dict(getattr(value, "__dict__", {}))
    for slot in getattr(type(value), "__slots__", ()) or ():
        if isinstance(slot, str) and hasattr(value, slot):
            named[slot] = getattr(value, slot)
    return list(named.items())


def _engine_wide(value: Any) -> bool:
    """Configs and groups belong to the engine, not to the weights."""
    return type(value).__module__.startswith(("vllm.config", "vllm.distributed"))


def _tensor(name: str, kind: str, value: torch.Tensor) -> Held:
    dtype = str(value.dtype).removeprefix("torch.")
    address = 0 if value.is_meta else value.data_ptr()
    return Held(name, kind, address, tuple(value.shape), tuple(value.stride()), dtype, str(value.device))


def _shared(entry: Held, first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str]) -> Held:
    if not entry.data_ptr:
        return entry
    name = first.setdefault((entry.data_ptr, entry.shape, entry.stride), entry.name)
    return entry if name == entry.name else msgspec.structs.replace(entry, shared=name)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
