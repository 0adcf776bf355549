"""The writer of GPUs: one table of moves into live parameters, launched once a refit; on a CPU the torch reference runs the same
moves.

It copies, casts, quantises and shuffles straight from the source's memory to where the engine's kernels read. What is sent as
MXFP8 and ends in a parameter of floats is dequantised here as well, tensor by tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch

from vllm_refit_ext.core.coded import CHECKPOINT, DEQUANTISED, PLAIN, dequantised_to
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels import torch_moves
from vllm_refit_ext.kernels.moves import At, Stack
from vllm_refit_ext.kernels.table import Table, alignment_of, bound, check_finite
from vllm_refit_ext.kernels.verify import verify
from vllm_refit_ext.receiver.engine import StoredParam
from vllm_refit_ext.receiver.kernel_moves import KernelMoves, Side, kernel_moves, matrices, target_buffers
from vllm_refit_ext.wires.boxes import Content, Memory, as_bytes, box_view, source_view, target_view
from vllm_refit_ext.wires.coded import CODES, ScaleMoves, along_k, dequantise, gather_scales

UPLOAD_BYTES = 256 << 20
"""Bytes of source buffers that are brought to the device at a time when they lie on the host; a larger buffer comes alone."""


class _Uploaded(Memory):
    """Source buffers that were brought to the device."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors = tensors

    def memory(self, buffer: int) -> torch.Tensor:
        return self._tensors[buffer]


class KernelWriter:
    """Executes a rank's moves into plain, MXFP8 and dequantised parameters. Every parameter keeps its `data_ptr`.

    `launches`: kernels that the last write started.
    """

    name = "in place"

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, torch.Tensor],
        stored: Mapping[str, StoredParam],
        device: torch.device,
        made: KernelMoves | None = None,
    ) -> None:
        """plan: this rank's moves. params: live tensors by name, for plain and dequantised buffers. stored: MXFP8 parameters by
        name. made: what `kernel_moves` made of the same plan, if it was made.

        Raises LayoutError for a move that no kernel takes.
        """
        self.plan = plan.select(plan.into(lambda buffer: not buffer.layout.startswith(CHECKPOINT)))
        self.device = device
        self._params, self._stored = params, stored
        made = made or kernel_moves(self.plan, stored)
        for error in made.unfit.values():
            raise error
        self._numbers, self._moves = made.numbers, made.moves
        codes = self.plan.into(lambda buffer: buffer.layout.startswith(DEQUANTISED) and buffer.dtype == CODES)
        self._dequantised: list[int] = np.flatnonzero(codes).tolist()
        self._used: list[int] = np.unique(self.plan.source).tolist()
        self._table: Table | None = None
        self._token: object = None
        self._parts: list[tuple[KernelWriter, list[int]]] = []
        self._launched: list[Table] = []

    @functools.cached_property
    def _scales(self) -> ScaleMoves:
        return ScaleMoves(self.plan)

    @property
    def launches(self) -> int:
        """Kernels that one write starts."""
        return len(self._table.kernels) if self._table is not None else 0

    def write(self, reader: Memory) -> None:
        """Launch all moves on the current stream; `finish` says how they went."""
        self._launched = []
        if self._moves and self._on_host(reader):
            for part, buffers in self._parts or self._cut_in_parts():
                part.write(_Uploaded({b: reader.memory(b).to(self.device) for b in buffers}))
                self._launched += part._launched
            return
        if self._moves:
            table = self._bound(reader)
            table.launch()
            self._launched = [table]
        for move in self._dequantised:
            self._dequantise(move, reader)
        if self._table is not None and self._token is None:
            self._table.release()  # memory of this refit alone, which may be an upload

    def finish(self) -> None:
        """Wait for what was quantised. Raises LayoutError that names tensors with NaN or Inf in it."""
        for table in self._launched:
            check_finite(table)

    @property
    def nbytes(self) -> int:
        """Memory of the table on the device, 0 before there is one."""
        return self._table.nbytes if self._table is not None else 0

    def compile(self) -> None:
        """On a GPU: make the table and compile its kernels, so that the first write need not. A refit whose sources do not lie on
        whole 16 bytes makes another table."""
        if self._moves and self.device.type == "cuda":
            targets = target_buffers(self.plan, self._numbers, self._params, self._stored)
            self._table = Table(self._moves, self.device, alignment=alignment_of(targets))
            self._table.compile()

    def check(self, reader: Memory, sample: int, seed: int) -> int:
        """Recompute up to `sample` of the moves by the reference and compare bytes. Returns how many; raises VerifyError."""
        if not self._moves:
            return 0
        buffers = target_buffers(self.plan, self._numbers, self._params, self._stored)
        for number in self._used:
            buffers[number] = reader.memory(number)
        report = verify(self._moves, buffers, sample=sample, seed=seed)
        report.raise_if_wrong()
        return report.moves

    def _on_host(self, reader: Memory) -> bool:
        """Whether the sources lie in memory that this device's kernels do not read."""
        return (
            self.device.type == "cuda"
            and reader.address(self._used[0]) is None
            and reader.memory(self._used[0]).device.type != "cuda"
        )

    def _cut_in_parts(self) -> list[tuple[KernelWriter, list[int]]]:
        """Writers for groups of source buffers that are uploaded together, with the numbers of these; scales go with their
        codes."""
        plan, group, groups, size = self.plan, list[int](), list[list[int]](), 0
        for number in self._used:
            if group and size + plan.sources[number].nbytes > UPLOAD_BYTES:
                groups.append(group)
                group, size = [], 0
            group.append(number)
            size += plan.sources[number].nbytes
        groups.append(group)
        for group in groups:
            part = plan.select(plan.with_scales(np.isin(plan.source, group) & ~plan.is_scale))
            if len(part):
                writer = KernelWriter(part, self._params, self._stored, self.device)
                self._parts.append((writer, np.unique(part.source).tolist()))
        return self._parts

    def _bound(self, reader: Memory) -> Table:
        token = reader.token
        if self._table is not None and token is not None and token == self._token:
            return self._table
        buffers = target_buffers(self.plan, self._numbers, self._params, self._stored)
        for number in self._used:
            address = reader.address(number) if self.device.type == "cuda" else None
            buffers[number] = reader.memory(number) if address is None else address
        self._table = bound(self._moves, self.device, buffers, self._table)
        self._token = token
        return self._table

    def _dequantise(self, move: int, reader: Memory) -> None:
        buffer = self.plan.targets[int(self.plan.target[move])]
        scales = gather_scales(self.plan, move, self._scales, reader)
        values = dequantise(
            source_view(self.plan, move, reader), scales, *self._along(move), dtype_of(dequantised_to(buffer.layout))
        )
        self._float_box(move).copy_(values)

    def _along(self, move: int) -> tuple[int, int]:
        """The last dimension of a move's tensor, and where in a block its box begins."""
        depth = len(self.plan.manifest.tensors[self.plan.names[int(self.plan.tensor[move])]].shape)
        return depth - 1, int(self.plan.lo[move, depth - 1]) % BLOCK

    def _float_box(self, move: int) -> torch.Tensor:
        """Where a dequantised box lies in its parameter. The plan counts it in one-byte codes, so its strides are in elements."""
        param = self._params[self.plan.targets[int(self.plan.target[move])].name]
        item = param.element_size()
        strides = [s * item for s in self.plan.target_strides[move].tolist()]
        return box_view(
            as_bytes(param), param.dtype, int(self.plan.target_offset[move]) * item, self.plan.extent[move].tolist(), strides
        )

    def content(self, move: int) -> Content:
        """What the engine holds of `move`: the box, or (codes, scales) of one that was quantised. None for the scales that
        were sent beside codes which are read back with these, or that were dequantised away."""
        plan, buffer = self.plan, self.plan.targets[int(self.plan.target[move])]
        if buffer.layout == PLAIN:
            return target_view(plan, move, as_bytes(self._params[buffer.name]))
        if buffer.layout.startswith(DEQUANTISED):
            return self._float_box(move) if buffer.dtype == CODES else None
        if buffer.name not in self._stored:
            return None
        return read_back(plan, move, self._stored[buffer.name])


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def read_back(plan: Plan, move: int, one: StoredParam) -> tuple[torch.Tensor, torch.Tensor]:
    """Canonical (codes uint8 [extent], scales uint8 [extent, last dimension of blocks]) of a move's box in an MXFP8 parameter."""
    extent, along = plan.extent[move].tolist(), along_k(plan, move)
    stack = Stack(one.coding.layout, At(0), At(1), one.stored, one.count)
    buffers = [one.values, one.scales[0]]
    codes = torch.empty(extent, dtype=torch.uint8, device=one.values.device)
    shape = [n // BLOCK if d == along else n for d, n in enumerate(extent)]
    scales = torch.empty(shape, dtype=torch.uint8, device=one.values.device)
    whole = [Side(np.zeros(1, np.int64), np.array([t.stride()], np.int64)) for t in (codes, scales)]
    row = np.array([move])
    found = matrices(
        plan, row, {plan.targets[int(plan.target[move])].name: one}, plan.target_offset[row], plan.extent[row], whole
    )
    for _, start, size, _, at, steps, scale_at, scale_steps in found.rows():
        blocks, first = (*size[:-1], size[-1] // BLOCK), (*start[:-1], start[-1] // BLOCK)
        codes.as_strided(size, steps, at).copy_(torch_moves.get(stack, start, size, buffers))
        scales.as_strided(blocks, scale_steps, scale_at).copy_(torch_moves.get(stack, first, blocks, buffers, scales=True))
    return codes, scales
