"""Buffers as memory: an address and what lies behind it."""

from __future__ import annotations

import torch

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.kernels.moves import Strided

Buffer = torch.Tensor | int
"""A tensor, standing for the memory from its first element to the end of its storage, or a bare device address."""


def address_of(buffer: Buffer) -> int:
    """The address of the buffer's first byte."""
    return buffer.data_ptr() if isinstance(buffer, torch.Tensor) else buffer


def extent_of(buffer: Buffer) -> int | None:
    """Bytes from the first element to the storage's end; None for a bare address."""
    if not isinstance(buffer, torch.Tensor):
        return None
    return int(buffer.untyped_storage().nbytes()) - int(buffer.storage_offset()) * buffer.element_size()


def byte_view(buffer: Buffer) -> torch.Tensor:
    """The buffer's memory as uint8 [extent]. Raises LayoutError for a bare address."""
    if not isinstance(buffer, torch.Tensor):
        raise LayoutError("the torch reference need tensors", got="an address", wanted="a tensor")
    storage = buffer.untyped_storage()
    first = buffer.storage_offset() * buffer.element_size()
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage, first, (storage.nbytes() - first,), (1,))


def view(buffer: Buffer, box: Strided) -> torch.Tensor:
    """`box` of `buffer` as a tensor of its dtype that shares the memory."""
    dtype: torch.dtype = getattr(torch, box.dtype)
    base = byte_view(buffer)
    size = dtype.itemsize
    offset = base.storage_offset() + box.at.offset
    if offset % size:
        raise LayoutError(
            "an element does not lie on its own size", got=f"byte {offset} of the storage", wanted=f"a multiple of {size}"
        )
    strides = tuple(s // size for s in box.strides)
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset // size, box.shape, strides)
