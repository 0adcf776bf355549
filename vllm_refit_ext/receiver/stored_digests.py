"""Digests of what an engine rank holds, read where its kernels read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from vllm_refit_ext.core.coded import PLAIN, coding_of
from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.placement import Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.moves import At, Stack, StoredBox
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.receiver.kernel_moves import Side, matrices, number_buffers, target_buffers
from vllm_refit_ext.wires.boxes import Content
from vllm_refit_ext.wires.digests import Digests, Sums


class StoredDigests(Digests):
    """What one engine rank holds of a plan's moves in place. Values of a parameter stand for all tensors that hold its scales."""

    def __init__(
        self, plan: Plan, params: Mapping[str, torch.Tensor], stored: Mapping[str, StoredParam], device: torch.device
    ) -> None:
        """plan, params, stored: as a writer takes them."""
        super().__init__(plan, device)
        self._params, self._stored = params, stored
        self._numbers = number_buffers(plan, stored)
        plain = plan.into(lambda b: b.layout == PLAIN)
        coded = plan.into(lambda b: b.name in stored and coding_of(b.layout) is not None)
        for move in np.flatnonzero(plain & (plan.depth[plan.tensor] > 0)).tolist():
            target = plan.targets[int(plan.target[move])]
            at = At(self._numbers.plain[target.name], int(plan.target_offset[move]))
            self.add_plain(move, at, target.dtype, plan.target_strides[move].tolist())
        self._add_coded(np.flatnonzero(coded))
        self.rest += np.flatnonzero(~coded & ~(plain & (plan.depth[plan.tensor] > 0))).tolist()

    def _add_coded(self, moves: Int) -> None:
        """Moves whose stored dimensions are the tensor's own, in their order; the rest is read back."""
        if not len(moves):
            return
        plan, width = self.plan, self.plan.lo.shape[1]
        shapes = [spec.shape for spec in plan.manifest.tensors.values()]
        tensors = plan.tensor[moves].tolist()
        flat = np.array([[*row_strides(shapes[t]), *([0] * (width - len(shapes[t])))] for t in tensors], np.int64)
        side = Side((plan.lo[moves] * flat).sum(axis=1), flat)
        found = matrices(plan, moves, self._stored, plan.target_offset[moves], plan.extent[moves], [side])
        odd: set[int] = set()
        boxes = []
        for i, start, size, runs, first, steps in found.rows():
            shape = shapes[tensors[i]]
            whole = (*(0,) * (3 - len(shape)), *row_strides(shape)[-3:])
            if not runs or not 2 <= len(shape) <= 3 or any(n > 1 and a != b for n, a, b in zip(size, steps, whole, strict=True)):
                odd.add(i)
            boxes.append((i, start, size, first))
        for i, start, size, first in boxes:
            if i in odd:
                continue
            move, shape = int(moves[i]), shapes[tensors[i]]
            name = plan.targets[int(plan.target[move])].name
            one, (scales, *_) = self._stored[name], self._numbers.scales[name]
            stack = Stack(one.coding.layout, At(self._numbers.values[name]), At(scales), one.stored, one.count)
            place = [int(n) for n in np.unravel_index(first, shape)]
            blocks = (*shape[:-1], -(-shape[-1] // BLOCK)), (*place[:-1], place[-1] // BLOCK)
            behind = StoredBox(stack, (*start[:-1], start[-1] // BLOCK), (*size[:-1], size[-1] // BLOCK), scales=True)
            self._moves += [self.add(move, StoredBox(stack, start, size), shape, place), self.add(move, behind, *blocks)]
        self.rest += moves[sorted(odd)].tolist()

    def __call__(self, content: Callable[[int], Content]) -> Sums:
        """Digests of what is stored now. content: what a move's box holds, for those that no launch digests."""
        return self.sums(self.launched(target_buffers(self.plan, self._numbers, self._params, self._stored)), content)
