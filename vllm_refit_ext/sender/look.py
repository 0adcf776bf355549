"""The one look that a refit takes at the trainer's tensors: where they lie, and whether they are what the plan was made for.

It is all of a refit that grows with the number of tensors. A pass in C over each question costs a tenth of a microsecond a
tensor, and more where the caches are cold; a loop in Python over all of them costs ten times that. So torch's own guards, which
ask each tensor everything at once, are tried first; then lists of what the tensors must be, that are made once; and only where
the lists differ are the tensors asked one by one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from vllm_refit_ext.core.dtypes import dtype_name
from vllm_refit_ext.core.errors import Problem
from vllm_refit_ext.core.placement import Buffer

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    """What torch's compiler asks of tensors before it runs code that was made for them: type, dtype, device, shape, strides.
    None where this torch has no such thing."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        shapes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    except (ImportError, TypeError, ValueError, RuntimeError, SystemError):
        return None


@functools.cache
def _guards_hold() -> bool:
    """Whether this torch's guards, which are private to it, see all that must be seen."""
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
    tensor = torch.nn.Parameter(zeros(4, 6))
    guards = _guards([tensor])
    if guards is None or not guards.check(tensor):
        return False
    for other in (zeros(4, 6).bfloat16(), zeros(6, 4), zeros(6, 4).t(), zeros(24)):
        tensor.data = other
        if guards.check(tensor):
            return False
    tensor.data = zeros(4, 6)
    return bool(guards.check(tensor))


class Look:
    """What the tensors of `buffers` must be: contiguous, of their shapes and dtypes."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._shapes = [buffer.shape for buffer in buffers]
        self._dtypes = [getattr(torch, buffer.dtype) for buffer in buffers]
        self._guards: Any = None
        self._made = False

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """The addresses of `tensors`, one a buffer, where all are as they must be; None where `misfits` has something to name.
        Memory that was given back has address 0."""
        with torch._C.DisableTorchFunction():  # a mode, such as a default device, would make each question a call of Python
            if len(tensors) != len(self._shapes):
                return None
            if self._guards is None or not self._guards.check(*tensors):
                if not self._fit(tensors):
                    return None
                if not self._made and _guards_hold():
                    self._guards = _guards(tensors)
                self._made = True  # once: guards that refuse what fits (another mode of autograd) would be made in every refit
            return list(map(torch.Tensor.data_ptr, tensors))

    def _fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        return (
            all(map(torch.Tensor.is_contiguous, tensors))
            and all(map(operator.eq, map(_SHAPE, tensors), self._shapes))  # no list of new objects for the collector
            and list(map(_DTYPE, tensors)) == self._dtypes
        )


def misfits(tensors: Sequence[torch.Tensor], buffers: Sequence[Buffer]) -> list[Problem]:
    """A problem for every tensor that is not the contiguous memory that its buffer describes."""
    problems = []
    for tensor, buffer in zip(tensors, buffers, strict=True):
        got, wanted = (f"{dtype_name(tensor.dtype)} {list(tensor.shape)}", f"{buffer.dtype} {list(buffer.shape)}")
        if got != wanted:
            problems.append(Problem("its shape or dtype changed", buffer.name, got, wanted, "prepare again"))
        elif tensor.numel() and not tensor.untyped_storage().nbytes():
            problems.append(Problem("its memory was given back", buffer.name, do="load it back before a refit"))
        elif not tensor.is_contiguous():
            what, do = "it is no longer contiguous in memory", "store it row-major"
            problems.append(Problem(what, buffer.name, f"strides {list(tensor.stride())}", f"shape {list(tensor.shape)}", do))
    return problems
