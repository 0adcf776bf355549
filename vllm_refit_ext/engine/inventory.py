"""Every live tensor of a worker's model after post-load processing: parameters, buffers, and what was derived from them.

Kernels read more than parameters: absorbed MLA projections, scales held a second time by a MoE kernel's config, workspaces,
KV scales with their copies on the host. After a refit each of them must equal a fresh engine's, and each tensor must still
lie at its old address, because captured graphs keep addresses.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

DEPTH = 10
"""Objects that are followed from a module: quant method, modular kernel, its implementation, experts, their config, a tensor."""

NOT_WEIGHTS = frozenset({"_parameters", "_buffers", "_modules", "kv_cache"})
"""Attributes that are torch's own tables, or memory that a refit has nothing to do with."""

PLAIN = (str, bytes, bool, int, type(None), torch.dtype, torch.device, torch.Size, type, types.ModuleType)
FOREIGN = (
    "abc",
    "asyncio",
    "concurrent",
    "contextlib",
    "enum",
    "logging",
    "multiprocessing",
    "numpy",
    "re",
    "threading",
    "torch",
    "transformers",
    "triton",
    "weakref",
)
"""Packages whose objects hold no weights of a layer. Configs and groups of vLLM belong to the engine: see `_engine_wide`."""


class Found(NamedTuple):
    """A tensor or float that a model holds: its path, its kind ("alias": a tensor that was found before under another name), and
    how to put another in its place (None where it can't be replaced)."""

    name: str
    kind: str
    value: Any
    put: Callable[[Any], None] | None = None


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that `model` holds, by name, each under its first."""
    return {f.name: f.value for f in everything(model) if f.kind != "alias" and isinstance(f.value, torch.Tensor)}


def everything(model: nn.Module) -> Iterator[Found]:
    """Parameters, buffers, and whatever hangs on modules: through objects, containers, partial functions, closures, methods."""
    modules = list(model.named_modules())
    for kind, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
        for path, module in modules:
            for name, value in list(getattr(module, table).items()):
                if value is not None:
                    yield Found(_join(path, name), kind, value)
    seen = {id(module) for _, module in modules}
    known = {id(v) for _, m in modules for t in (m._parameters, m._buffers) for v in t.values()}
    for path, module in modules:
        for name, value, put in _attributes(module):
            yield from _derived(_join(path, name), value, put, seen, known, DEPTH)


def _derived(
    path: str, value: Any, put: Callable[[Any], None] | None, seen: set[int], known: set[int], depth: int
) -> Iterator[Found]:
    if isinstance(value, torch.Tensor):
        yield Found(path, "alias" if id(value) in known else "derived", value, put)
        known.add(id(value))
        return
    if isinstance(value, float):
        yield Found(path, "float", value, put)
        return
    if depth == 0 or isinstance(value, PLAIN) or id(value) in seen or _engine_wide(value):
        return
    seen.add(id(value))
    for name, item, place in _parts(value):
        yield from _derived(f"{path}{name}", item, place, seen, known, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any, Callable[[Any], None] | None]]:
    """(path from `value`, item, how to replace it) of everything that an object refers to."""
    if isinstance(value, dict):
        for key in list(value):
            yield f"[{key!r}]", value[key], functools.partial(value.__setitem__, key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield f"[{i}]", item, functools.partial(value.__setitem__, i)
    elif isinstance(value, tuple | set | frozenset):
        for i, item in enumerate(value):
            yield f"[{i}]", item, None
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func, None), (".args", value.args, None), (".keywords", value.keywords, None))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__, None
        yield ".__func__", value.__func__, None
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
            except ValueError:
                continue  # not bound yet
        yield ".__defaults__", value.__defaults__, None
        yield ".__kwdefaults__", value.__kwdefaults__, None
    elif isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] not in FOREIGN:
        if isinstance(value, nn.Module):  # one that the model does not list: a kernel that hangs on a quant method
            yield from ((f".{n}", v, functools.partial(setattr, value, n)) for n, v in list(value._parameters.items()))
            yield from ((f".{n}", v, functools.partial(setattr, value, n)) for n, v in list(value._buffers.items()))
            yield from ((f".{n}", v, None) for n, v in list(value._modules.items()))
        yield from ((f".{name}", item, put) for name, item, put in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Instance attributes, in `__dict__` or slots, and how to replace each (also in a frozen dataclass)."""
    named = dict(getattr(value, "__dict__", {}))
    for slot in (slot for kind in type(value).__mro__ for slot in _slots(kind)):
        if hasattr(value, slot):
            named[slot] = getattr(value, slot)
    for name, item in named.items():
        if name not in NOT_WEIGHTS:
            yield name, item, functools.partial(object.__setattr__, value, name)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _engine_wide(value: Any) -> bool:
    """Configs and groups belong to the engine, not to the weights."""
    return type(value).__module__.startswith(("vllm.config", "vllm.distributed", "vllm.forward_context"))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
