"""What an engine derives from its weights, made anew in the old memory at every commit.

Absorbed projections of latent attention are computed once, after loading, and captured graphs keep their addresses. Small
constants of kernels (Marlin's workspaces, which must be zero) live in the weights' memory pool, whose contents a deep sleep
drops.

What a writer fills is no constant, even where it is neither parameter nor buffer: after vLLM's own reload an expert kernel's
config holds its scales in memory of its own. Putting back a copy of those would undo the refit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_refit_ext.engine import inventory

if TYPE_CHECKING:
    from vllm_refit_ext.engine.rank import EngineRank

ABSORBED = ("W_UV", "W_UK_T", "W_UK", "W_K", "W_V", "W_K_scale", "W_V_scale")
"""Attributes that vLLM's latent attention makes from `kv_b_proj`."""
SMALL = 1 << 20
"""Bytes of the largest constant that is kept."""


class Derived:
    """The derived tensors of a rank's model as they are when it is prepared. written: every tensor that its writers fill."""

    def __init__(self, view: EngineRank, written: Iterable[torch.Tensor]) -> None:
        self._absorbing = [
            m for m in view.model.modules() if absorbed(m) and isinstance(getattr(m, "kv_b_proj", None), nn.Module)
        ]
        self._tensors = [absorbed(m) for m in self._absorbing]
        self._dtype = view.vllm_config.model_config.dtype
        mine = {t.untyped_storage().data_ptr() for tensors in self._tensors for t in tensors.values()}
        sleeps = bool(getattr(view.vllm_config.model_config, "enable_sleep_mode", False))
        mine |= {t.untyped_storage().data_ptr() for t in written}
        self._constants = constants(view.model, mine) if sleeps else []

    @property
    def extra_bytes(self) -> int:
        """Bytes of the copies of constants, and of one layer's absorbed projections while they are made anew."""
        constants = sum(saved.numel() * saved.element_size() for _, saved in self._constants)
        return constants + max(
            (sum(t.numel() * t.element_size() for t in tensors.values()) for tensors in self._tensors), default=0
        )

    def refresh(self) -> None:
        """Compute what is derived from the weights as they are now, and put constants back."""
        for tensor, saved in self._constants:
            tensor.copy_(saved)
        for module, tensors in zip(self._absorbing, self._tensors, strict=True):
            owner: Any = module
            owner.process_weights_after_loading(self._dtype)
            for name, old in tensors.items():
                new = module.__dict__.get(name)
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)
                setattr(module, name, old)


def absorbed(module: nn.Module) -> dict[str, torch.Tensor]:
    """The absorbed projections that a module holds, by attribute."""
    return {name: value for name in ABSORBED if isinstance(value := module.__dict__.get(name), torch.Tensor)}


def constants(model: nn.Module, mine: set[int], kind: str = "cuda") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tensor, its copy) of small tensors on devices of type `kind` that are neither parameters nor buffers and share no memory
    with any, nor with the storages `mine` (addresses), which a refit computes or writes."""
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    found: dict[int, torch.Tensor] = {}
    for _, what, tensor, _ in inventory.everything(model):
        if what != "derived" or tensor.device.type != kind:
            continue
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights | mine and tensor.numel() * tensor.element_size() <= SMALL:
            found.setdefault(tensor.data_ptr(), tensor.detach())
    return [(tensor, tensor.clone()) for tensor in found.values()]
