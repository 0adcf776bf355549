"""What planning puts in the place of a running job: attributes set for a while, groups without processes, and silence."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

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
