"""Every tensor that a model holds keeps its memory, whatever a reload makes anew.

vLLM's reload keeps parameters and buffers at their addresses. What a post-load step hangs on a module beside them is made anew in
every reload, from the reload's temporary tensors: Marlin's workspaces, absorbed projections, and a kernel's config, whose scales
and biases were the layer's own parameters before. A graph that was captured before goes on with the old address, whose memory by
then belongs to something else; eager steps read the temporary tensor, which no later refit writes.

So the first tensor seen under each name is kept for good. When another has taken its place, its contents go into the first one,
which goes back to where it was.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_refit_ext.engine import inventory


class Anchors:
    """The first tensor of each name that is neither parameter nor buffer: on devices of type `kind`, as only GPUs capture graphs,
    and elsewhere where it was a parameter's or buffer's own memory."""

    def __init__(self, kind: str = "cuda") -> None:
        self._kind = kind
        self._first: dict[str, torch.Tensor] = {}

    def hold(self, model: nn.Module) -> list[str]:
        """Remember tensors whose names are new, and put the first of each name back where it was replaced.

        Returns the names of the latter. A successor of another shape or dtype is left alone: nothing can have used it. One in a
        place that can't be written (a tuple) stays, and the first one gets its contents, for the graphs that read it.
        """
        restored = []
        weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
        for name, kind, tensor, put in inventory.everything(model):
            if kind not in ("derived", "alias") or tensor.is_meta:
                continue
            if tensor.device.type == self._kind or tensor.untyped_storage().data_ptr() in weights:
                self._first.setdefault(name, tensor)
            first = self._first.get(name, tensor)
            if first is tensor or not _alike(first, tensor):
                continue
            # The reload has written the parameters themselves.
            if first.data_ptr() != tensor.data_ptr() and first.untyped_storage().data_ptr() not in weights:
                with torch.no_grad():
                    first.copy_(tensor)
            if put is not None:
                put(first)
            restored.append(name)
        return restored


def _alike(first: torch.Tensor, other: torch.Tensor) -> bool:
    return (first.shape, first.dtype, first.stride(), first.device) == (other.shape, other.dtype, other.stride(), other.device)
