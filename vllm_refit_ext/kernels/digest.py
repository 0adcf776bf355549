"""The digest of torch tensors without Triton, for whole models on a CPU. `core.digest` states the formula and does the work."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_refit_ext.core.digest import digest, words_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_torch(tensor: torch.Tensor, *, shape: Sequence[int], start: Sequence[int]) -> int:
    """`core.digest.digest` of a torch tensor, an integer in [0, 2^64).

    `tensor` is a box of a tensor of `shape` that begins at `start`: any dtype of 1, 2, 4 or 8 bytes, any strides. On a CPU
    nothing is copied; a GPU tensor is brought over whole, so use a `Table` of `DigestMove` there. Raises LayoutError for other
    element sizes or a box that does not lie in the tensor.
    """
    words_of(tensor.element_size())
    bits = tensor.detach().view(_WORDS[tensor.element_size()])
    return digest(bits.cpu().numpy(), shape=tuple(shape), start=tuple(start))
