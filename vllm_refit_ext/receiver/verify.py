"""Digests of a plan's moves, the same on both sides: of what a source would give, and of what a target holds.

The digest of a tensor on an engine rank is the sum over that rank's moves (`core.digest` is additive over disjoint boxes), each
taken in the target's dtype. So a sender can compute its part from its own shards, and the parts of all trainer ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.digest import digest_torch
from vllm_refit_ext.receiver.writers import InPlaceWriter

MODULUS = 1 << 64


def move_digest(plan: Plan, move: int, box: torch.Tensor) -> int:
    """Digest of a move's content. box: [extent of the move], in the target's dtype."""
    shape = plan.manifest.tensors[plan.names[int(plan.tensor[move])]].shape
    n = len(shape)
    return digest_torch(box[(...,) + (0,) * (box.ndim - n)] if box.ndim > n else box, shape=shape, start=plan.lo[move, :n].tolist())


def sum_by_tensor(plan: Plan, moves: Iterable[int], content: Callable[[int], torch.Tensor]) -> dict[str, int]:
    """Digests by tensor name over `moves`; `content(move)` gives each box in the target's dtype."""
    total: dict[str, int] = {}
    for move in moves:
        name = plan.names[int(plan.tensor[move])]
        total[name] = (total.get(name, 0) + move_digest(plan, move, content(move))) % MODULUS
    return total


def digests_of(writer: InPlaceWriter) -> dict[str, int]:
    """Digests of live parameters, read back."""
    return sum_by_tensor(writer.plan, range(len(writer.plan)), writer.content)
