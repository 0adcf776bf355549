"""Large tensors without storage, so that a model of any size is built in seconds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class LargeOnMeta(TorchFunctionMode):
    """Makes new tensors of at least `elements` elements on the meta device, and leaves the others real: they may be tables that
    are computed with. `placed`: also those that a device was named for.
    """

    FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})

    def __init__(self, elements: int, *, placed: bool = False) -> None:
        super().__init__()
        self._elements, self._placed = elements, placed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES and (self._placed or kwargs.get("device") is None):
            size = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", args)
            if math.prod(n for n in size if isinstance(n, int)) >= self._elements:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
