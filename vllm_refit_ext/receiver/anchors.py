"""Tensors that captured graphs read and no one else keeps: a reload must not take their memory away.

vLLM's reload keeps parameters and buffers at their addresses. What a kernel's post-load step hangs on a module beside them is
made anew in every reload: Marlin's workspaces, absorbed projections, tables of experts. A graph that was captured before goes
on with the old address, whose memory by then belongs to something else: it computes with foreign bytes and writes into them.

So the first tensor seen under each name is kept for good. When another has taken its place, its contents go into the first one,
which goes back to where it was.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_refit_ext.receiver import inventory


class Anchors:
    """The first derived tensor of each name on devices of type `kind`. Only GPUs capture graphs."""

    def __init__(self, kind: str = "cuda") -> None:
        self._kind = kind
        self._first: dict[str, torch.Tensor] = {}

    def hold(self, model: nn.Module) -> list[str]:
        """Remember tensors whose names are new, and give those that were replaced their first memory back.

        Returns the names of the latter. A successor of another shape or dtype is left alone: no captured graph can have used it.
        """
        restored = []
        modules = dict(model.named_modules())
        derived = {entry.name for entry in inventory.inventory(model) if entry.kind == "derived"}
        for name, tensor in inventory.tensors(model).items():
            if name not in derived or tensor.device.type != self._kind:
                continue
            first = self._first.setdefault(name, tensor)
            if first is tensor or not _alike(first, tensor):
                continue
            if first.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    first.copy_(tensor)
            path, _, attribute = name.rpartition(".")
            # A tensor of an object inside a module (a kernel, its config) belongs to an object that was made anew as well.
            # The new one stays there for eager steps; the first one serves the graphs.
            owner = modules.get(path)
            if owner is not None and attribute in vars(owner):
                setattr(owner, attribute, first)
            restored.append(name)
        return restored


def _alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    return first.shape == other.shape and first.dtype == other.dtype and first.stride() == other.stride()
