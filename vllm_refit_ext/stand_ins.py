"""What planning puts in the place of a running job: groups without processes, tensors without storage, and silence."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MISSING = object()


def swap(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set `owner.name` until `stack` is closed."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    stack.callback(delattr, owner, name) if before is _MISSING else stack.callback(setattr, owner, name, before)


class Members:
    """Stands for a process group: models ask it for its size and rank when they are built."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    def rank(self) -> int:
        """This rank's number in it."""
        return self._rank


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


@contextlib.contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """No warnings, and no log lines up to `level`. May be nested; the outer one's level is put back."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, level))
        try:
            yield
        finally:
            logging.disable(before)
