"""The tensors of a model as its loader knows them, for the recording of routes."""

from __future__ import annotations

import torch
from torch import nn


class Created:
    """The tensors of a model as created.

    Attributes
    ----------
    tensors: full name -> meta tensor, shared ones once, under their first name. buffers: the names among them that are
    buffers; `persistent` those that a checkpoint may hold. aliases: other full name -> first name.
    live: storage ids of the tensors that the model really holds, which nothing may write.
    values: storage id of a meta tensor -> the real tensor that it stands for, where shapes agree.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.buffers: set[str] = set()
        self.persistent: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.live: set[int] = set()
        self.values: dict[int, torch.Tensor] = {}
        self.slots: dict[str, tuple[nn.Module, str]] = {}
