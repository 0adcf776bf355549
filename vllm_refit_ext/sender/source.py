"""What a trainer rank must say about its weights, whatever it trains with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Placements


class Source(Protocol):
    """What one trainer rank offers. It is made from metadata: no collective, no copy of a weight.

    Attributes
    ----------
    specs: Hugging Face name -> shape and dtype of the whole tensor, for every tensor that this rank holds a part of. Ranks that
        hold parts of the same tensor say the same.
    aliases: second name of a tied tensor -> the name that is sent.
    placements: one row a box of a checkpoint tensor, one `Buffer` a tensor of `tensors`, in the same order. Byte offsets and
        strides count from the tensor's first element. The sender numbers the ranks, so a buffer's rank may be left at 0.
    tensors: the live memory, one contiguous tensor a buffer, of the buffer's shape and dtype. An optimizer step changes it in
        place.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def placements(self) -> Placements: ...

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def refresh(self) -> object:
        """Called on every trainer rank at the end of `prepare` and before each refit and `verify`, so it may communicate.

        Afterwards `tensors` is the current weights: memory that moved is pointed to anew. Shapes, dtypes and `placements` stay
        what they were. What it returns is not read. Raises WireError that names every tensor whose memory was given back or no
        longer fits.

        A source that looks at every tensor's address, shape, dtype and strides itself may keep the addresses in an attribute
        `addresses`, a list in the order of `tensors` and the same list while nothing has moved. The sender then looks no more.
        """
        ...
