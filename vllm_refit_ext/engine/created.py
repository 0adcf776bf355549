"""A vLLM model with its tensors as they were created: shapes, classes and loaders of the checkpoint side, and no storage.

After loading, vLLM turns parameters into what its kernels read: packed, shuffled, transposed, replaced by plain tensors. Its
weight loaders only understand the tensors as created, whose metadata vLLM records for its own reload. `as_created` puts meta
tensors of that form into the modules, and afterwards puts every module back exactly: the same tensor objects at the same
addresses, the same attributes, whatever happened in between.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm_refit_ext.copies import storage_id
from vllm_refit_ext.receiver.routes.created import Created

LIVE_TABLES = frozenset(
    {"_expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global", "expert_local_to_global"}
)
"""Tables that loaders read and never write. They keep their values while the rest of the model has none."""


@contextmanager
def as_created(model: nn.Module) -> Iterator[Created]:
    """Within the context, `model` holds meta tensors as it created them; after it, exactly what it held before."""
    modules = list(model.modules())
    saved = [_Saved(module) for module in modules]
    try:
        yield _place(model)
    finally:
        for snapshot in saved:
            snapshot.restore()


class _Saved:
    """A module's attributes, parameters and buffers, and the contents of its plain containers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        # Loaders keep pending tensors and flags in lists, dicts and sets of a module, which are restored by content.
        self.contents: list[tuple[Any, Any]] = [
            (value, value.copy()) for value in self.attributes.values() if type(value) in (dict, list, set)
        ]

    def restore(self) -> None:
        state = self.module.__dict__
        state.clear()
        state.update(self.attributes)
        for container, content in self.contents:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


def _place(model: nn.Module) -> Created:
    created = Created()
    known: dict[Any, torch.Tensor] = {}
    owners: dict[int, str] = {}
    paths: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in paths:
            for name in [*module._parameters, *module._buffers]:
                if name not in LIVE_TABLES:
                    created.aliases[_join(path, name)] = _join(paths[id(module)], name)
            continue
        paths[id(module)] = path
        _place_module(module, path, created, known, owners)
    loaded = created.tensors.keys() - (created.buffers - created.persistent)
    created.aliases = {a: b for a, b in created.aliases.items() if b in loaded}
    return created


def _place_module(module: nn.Module, path: str, created: Created, known: dict[Any, torch.Tensor], owners: dict[int, str]) -> None:
    parameters, buffers = module._parameters, module._buffers
    for tensor in (*parameters.values(), *buffers.values()):
        if tensor is not None and not _uninitialised(tensor):
            created.live.add(storage_id(tensor))
    metadata = _metadata(module)
    tables: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = [(parameters, metadata[0]), (buffers, metadata[1])]
    for table, recorded in tables:
        names = dict.fromkeys([*table, *recorded])
        for name in names:
            live = table.get(name)
            template = recorded.get(name, live)
            if name in LIVE_TABLES or template is None:
                continue
            if name not in recorded and any(metadata) and name not in _not_recorded():
                del table[name]  # made by post-load processing; the model was created without it
                continue
            module.__dict__.pop(name, None)
            meta = _on_meta(template, live, module, name, known)
            table[name] = meta
            full, key = _join(path, name), storage_id(meta)
            if key in owners:
                created.aliases[full] = owners[key]
                continue
            owners[key] = full
            created.tensors[full], created.slots[full] = meta, (module, name)
            if live is not None and not live.is_meta and not _uninitialised(live) and live.shape == meta.shape:
                created.values[key] = live
            if table is buffers:
                created.buffers.add(full)
                if name not in module._non_persistent_buffers_set:
                    created.persistent.add(full)


def _on_meta(
    template: torch.Tensor, live: torch.Tensor | None, module: nn.Module, name: str, known: dict[Any, torch.Tensor]
) -> torch.Tensor:
    """A meta tensor of the template's shape, class and attributes; the same one wherever the model shares the tensor."""
    owner = getattr(template.__dict__.get("weight_loader"), "__self__", None)
    foreign = isinstance(owner, nn.Module) and owner is not module and name in (*owner._parameters, *owner._buffers)
    keys: list[Any] = [] if live is None else [("object", id(live))]
    if foreign:
        # A tied tensor keeps the loader of the module that it was made for, also when processing has parted the two.
        keys.append(("owner", id(owner), name, tuple(template.shape)))
    else:
        keys.append(("owner", id(module), name, tuple(template.shape)))
    meta = next((known[k] for k in keys if k in known and known[k].shape == template.shape), None)
    if meta is None:
        meta = torch.empty(template.shape, dtype=template.dtype, device="meta")
        meta.__class__ = template.__class__
        meta.__dict__.update(template.__dict__)
        for key, value in meta.__dict__.items():
            # A reload that ran before wraps the loaders in the recorded metadata, and the wrappers do nothing outside of one.
            while getattr(value, "__name__", "") == "online_process_loader":
                value = meta.__dict__[key] = value.__wrapped__
            # vLLM's recorded metadata holds loaders bound to a placeholder, so that it keeps no layer alive.
            if isinstance(value, types.MethodType) and type(value.__self__) is object:
                meta.__dict__[key] = types.MethodType(value.__func__, module)
    for key in keys:
        known.setdefault(key, meta)
    return meta


def _metadata(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What vLLM recorded of the module's tensors when it created them: (parameters, buffers), empty if nothing."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    info = LAYERWISE_INFO.get(module)
    return ({}, {}) if info is None else info.restore_metadata


def created_bytes(model: nn.Module, name: str) -> tuple[int, int] | None:
    """(bytes, elements) of the tensors of module `name` as vLLM created them; None where there is no such module."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    tensors = [t for table in _metadata(module) for t in table.values() if not _uninitialised(t)]
    return sum(t.numel() * t.element_size() for t in tensors), sum(t.numel() for t in tensors)


def _not_recorded() -> frozenset[str]:
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    return frozenset(SKIP_TENSORS)


def _uninitialised(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
