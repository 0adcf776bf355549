"""The one look that a refit takes at the trainer's tensors: where they lie, and whether they are what the plan was made for.

It is all of a refit that grows with the number of tensors. A pass in C over each question costs a tenth of a microsecond a
tensor; a loop in Python over all of them costs ten times that. So what a tensor must be stands in lists that are made once, and
only where the lists differ are the tensors asked one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from vllm_refit_ext.core.dtypes import dtype_name
from vllm_refit_ext.core.errors import Problem
from vllm_refit_ext.core.placement import Buffer

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Look:
    """What the tensors of `buffers` must be: contiguous, of their shapes and dtypes."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._shapes = [buffer.shape for buffer in buffers]
        self._dtypes = [getattr(torch, buffer.dtype) for buffer in buffers]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """The addresses of `tensors`, one a buffer, where all are as they must be; None where `misfits` has something to name.
        Memory that was given back has address 0."""
        with torch._C.DisableTorchFunction():  # a mode, such as a default device, would make each question a call of Python
            if (
                len(tensors) == len(self._shapes)
                and all(map(torch.Tensor.is_contiguous, tensors))
                and all(map(operator.eq, map(_SHAPE, tensors), self._shapes))  # no list of new objects for the collector
                and list(map(_DTYPE, tensors)) == self._dtypes
            ):
                return list(map(torch.Tensor.data_ptr, tensors))
        return None


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
