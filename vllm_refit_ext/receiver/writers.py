"""Writers: execute a rank's moves into a layout.

A writer takes the moves whose target buffer has its layout and a reader that gives the bytes of source buffers. `InPlaceWriter`
copies boxes straight into live parameters. `ReloadWriter` fills tensors of checkpoint shape, only where this rank's routes read,
and hands them one by one to the engine's own reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from vllm_refit_ext.core.coded import CHECKPOINT, PLAIN, dequantised_to
from vllm_refit_ext.core.errors import Problem, VerifyError
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires.boxes import Memory, as_bytes, box_view, source_view, target_view
from vllm_refit_ext.wires.coded import CODES, ScaleMoves, dequantise, gather_scales

Reload = Callable[[Iterator[tuple[str, torch.Tensor]], list[str]], None]


def moves_with_layout(plan: Plan, layout: str) -> Plan:
    """The moves whose target buffer has `layout`."""
    return plan.select(plan.into(lambda buffer: buffer.layout == layout))


class InPlaceWriter:
    """Copies boxes into live parameters of layout `plain`. Every parameter keeps its `data_ptr`."""

    name = "in place"

    def __init__(self, plan: Plan, params: Mapping[str, torch.Tensor]) -> None:
        """plan: this rank's moves. params: live contiguous tensors by target buffer name."""
        self.plan = moves_with_layout(plan, PLAIN)
        self._memory = {int(t): as_bytes(params[plan.targets[int(t)].name]) for t in np.unique(self.plan.target)}
        self._targets = [target_view(self.plan, i, self._memory[int(self.plan.target[i])]) for i in range(len(self.plan))]

    def write(self, reader: Memory) -> None:
        """Execute all moves, casting where the plan allows it."""
        if self._targets:
            torch._foreach_copy_(self._targets, [source_view(self.plan, i, reader) for i in range(len(self.plan))])

    def finish(self) -> None:
        """Raise what was found wrong in what `write` wrote."""

    def check(self, reader: Memory, sample: int, seed: int) -> int:
        """Read back up to `sample` of the moves and compare with their sources. Returns how many; raises VerifyError."""
        chosen = sorted(np.random.default_rng(seed).permutation(len(self.plan))[:sample].tolist())
        wrong = []
        for move in chosen:
            target = self._targets[move]
            if not torch.equal(target, source_view(self.plan, move, reader).to(target.dtype)):
                wrong.append(
                    Problem("memory differs from its source", f"tensor {self.plan.names[int(self.plan.tensor[move])]!r}")
                )
        if wrong:
            raise VerifyError.of(wrong)
        return len(chosen)

    def content(self, move: int) -> torch.Tensor:
        """The live target box of `move` of this writer's plan."""
        return self._targets[move]


class ReloadWriter:
    """Feeds the engine's own reload with tensors of checkpoint shape.

    A tensor is filled when the reload asks for it and dropped when its layer is done, so the peak is one layer. Elements that no
    route of this rank reads stay zero: the loaders skip them. What is sent as MXFP8 and is loaded as floats is dequantised.
    """

    name = "reload"

    def __init__(self, plan: Plan, reload: Reload, device: torch.device | str = "cpu") -> None:
        """plan: this rank's moves. reload: the engine's reload, called with (name, tensor) pairs and all their names. device:
        where the tensors are made."""
        self.plan = plan.select(plan.into(lambda buffer: buffer.layout.startswith(CHECKPOINT)))
        self._reload, self._device = reload, torch.device(device)
        self._scales = ScaleMoves(self.plan)
        self.note: Callable[[int, torch.Tensor], None] | None = None
        """Called with the move and the box of all that is handed over, if somebody wants to see it."""

    def write(self, reader: Memory) -> None:
        """Fill and reload."""
        if len(self.plan):
            names = [self.plan.targets[t].name for t in np.unique(self.plan.target).tolist() if not self._goes_with_codes(t)]
            self._reload(self._tensors(reader), names)

    def _goes_with_codes(self, target: int) -> bool:
        buffer = self.plan.targets[target]
        return bool(dequantised_to(buffer.layout)) and buffer.dtype != CODES

    def _tensors(self, reader: Memory) -> Iterator[tuple[str, torch.Tensor]]:
        # Targets lie module by module, so that the reload holds one at a time. Bytes that are sent come in an order of their own.
        key = self.plan.target
        if reader.ordered:
            _, first, place = np.unique(key, return_index=True, return_inverse=True)
            key = first[place]
        order = np.argsort(key, kind="stable")
        edges = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
        for a, b in zip(edges, edges[1:], strict=False):
            moves = order[a:b].tolist()
            target = int(self.plan.target[moves[0]])
            buffer = self.plan.targets[target]
            tensor = self._filled(moves, buffer, reader)
            if dequantised_to(buffer.layout) and not self._goes_with_codes(target):
                tensor = self._dequantised(moves, tensor, buffer, reader)
            if not self._goes_with_codes(target):
                yield buffer.name, tensor

    def _filled(self, moves: list[int], buffer: Buffer, reader: Memory) -> torch.Tensor:
        tensor = torch.zeros(
            buffer.shape, dtype=torch.uint8 if buffer.dtype == CODES else getattr(torch, buffer.dtype), device=self._device
        )
        tensor = tensor.view(getattr(torch, buffer.dtype))
        memory = as_bytes(tensor)
        for move in moves:
            box = target_view(self.plan, move, memory)
            box.copy_(source_view(self.plan, move, reader))
            if self.note is not None:
                self.note(move, box)
        return tensor

    def _dequantised(self, moves: list[int], codes: torch.Tensor, buffer: Buffer, reader: Memory) -> torch.Tensor:
        """The whole tensor as floats; what was not filled is zero."""
        values = torch.zeros(buffer.shape, dtype=getattr(torch, dequantised_to(buffer.layout)), device=self._device)
        axis, item = len(buffer.shape) - 1, values.element_size()
        for move in moves:
            scales = gather_scales(self.plan, move, self._scales, reader).to(self._device)
            box = target_view(self.plan, move, as_bytes(codes))
            strides = [s * item for s in self.plan.target_strides[move].tolist()]
            place = box_view(
                as_bytes(values),
                values.dtype,
                int(self.plan.target_offset[move]) * item,
                self.plan.extent[move].tolist(),
                strides,
            )
            place.copy_(dequantise(box, scales, axis, int(self.plan.lo[move, axis]) % BLOCK, values.dtype))
        return values
