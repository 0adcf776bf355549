"""The names that a model's tensors have without what was wrapped around it, and which of them are the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from vllm_refit_ext.core.errors import ConfigError, Problem

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into the names of the modules that they wrap."""
HEADS = ("module.", "base_model.model.")
"""What DDP and PEFT put before every name."""


class Place(NamedTuple):
    """Where a module keeps a tensor: torch's own table of parameters or buffers, and the name in it."""

    name: str
    table: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found: torch.Tensor = self.table[self.key]
        return found


def plain_names(names: Iterable[str], *, heads: bool) -> list[str]:
    """`names` without what wrappers add, in the same order. heads: without what DDP and PEFT put before all of them, too.

    Raises ConfigError that names those that are no longer distinct.
    """
    raw, plain = list(names), []
    for name in raw:
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        plain.append(name.replace(".base_layer.", "."))
    while head := next((h for h in HEADS if heads and plain and all(n.startswith(h) for n in plain)), ""):
        plain = [n.removeprefix(head) for n in plain]
    first: dict[str, str] = {}
    problems = [
        Problem(f"without its wrappers it has the name of {first[short]!r}", f"tensor {name!r}", short)
        for name, short in zip(raw, plain, strict=True)
        if first.setdefault(short, name) != name
    ]
    if problems:
        raise ConfigError.of(problems)
    return plain


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside torch.compile, DDP and PEFT."""
    while True:
        inner = module._modules
        base = inner.get("base_model")
        if inner.get("_orig_mod") is not None:
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif base is not None and "model" in base._modules and hasattr(module, "peft_config"):
            module = base.get_submodule("model")
        else:
            return module


def places(model: torch.nn.Module) -> Iterator[Place]:
    """Every parameter and every buffer that a checkpoint holds, under all its names, in the modules' order.

    Adapters that are merged into their base are left out, as is the original of a module that PEFT trains as a whole.
    """
    adapters = tuple(f"{path}." for path, _ in adapted(model))
    for path, module in model.named_modules(remove_duplicate=False):
        head = f"{path}." if path else ""
        if head.startswith(adapters) and ".base_layer." not in head and not head.endswith(".base_layer."):
            continue
        if ".original_module." in f".{head}":
            continue
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and not (table is module._buffers and key in module._non_persistent_buffers_set):
                    yield Place(_trained_whole(head) + key, table, key)


def adapted(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The layers that adapters (LoRA and the like) are attached to: path and module."""
    return [(p, m) for p, m in model.named_modules() if "base_layer" in m._modules and hasattr(m, "merged")]


def unmerged(layers: Iterable[tuple[str, Any]]) -> list[Problem]:
    """A problem for each layer whose adapters are not in its weights now."""
    return [
        Problem("its adapter is not merged, so its weight alone is not what the trainer computes with", path, do="merge it first")
        for path, layer in layers
        if not layer.merged
    ]


def _trained_whole(head: str) -> str:
    """PEFT keeps modules that it trains as a whole under the adapter's name."""
    before, found, after = head.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if found else head
