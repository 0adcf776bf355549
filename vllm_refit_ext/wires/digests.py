"""Digests of what a plan's moves hold, by tables that are built once and launched for every check.

A digest of a tensor on an engine rank is the sum over that rank's moves. What lies in memory as it is compared is digested where
it lies, in one launch. What is quantised on its way is quantised again, a bounded piece at a time, and digested there. The rest
(casts, what is dequantised, layouts across K) is made in torch, move by move: `rest` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.coded import CHECKPOINT, coding_of, dequantised_to
from vllm_refit_ext.core.layouts import Stored
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.memory import Buffer
from vllm_refit_ext.kernels.moves import At, DigestMove, QuantizeMove, Stack, StoredBox, Strided, contiguous
from vllm_refit_ext.kernels.table import Table, bound
from vllm_refit_ext.kernels.tuning import WIDE
from vllm_refit_ext.wires.boxes import MODULUS, Content, Memory, move_digest
from vllm_refit_ext.wires.coded import CODES, PlacedScales, ScaleMoves, along_k, scales_missing, sent_content

SCRATCH_BYTES = 256 << 20
"""Most codes that a sender quantises at a time for a check."""

Sums = dict[int, dict[str, int]]
"""Engine rank -> tensor name -> digest, an integer in [0, 2^64)."""


class Digests:
    """Sums over the moves of `plan`. `rest`: the moves that no launch digests."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        pair = plan.target_rank * len(plan.names) + plan.tensor
        self._pairs, out = np.unique(pair, return_inverse=True)
        self._out: list[int] = out.tolist()
        self._seen = np.zeros(len(self._pairs), bool)
        self._moves: list[DigestMove] = []
        self._table: Table | None = None
        self.rest: list[int] = []

    def add(self, move: int, content: Strided | StoredBox, shape: Sequence[int], start: Sequence[int]) -> DigestMove:
        """Digest `content`, a box of a tensor of `shape` at `start`, for `move`."""
        self._seen[self._out[move]] = True
        return DigestMove(content, tuple(shape), tuple(start), self._out[move])

    def add_plain(self, move: int, at: At, dtype: str, strides: Sequence[int]) -> None:
        """Digest the box of `move` as it lies at `at`, with byte `strides`."""
        shape = self.plan.manifest.tensors[self.plan.names[int(self.plan.tensor[move])]].shape
        depth = len(shape)
        box = Strided(at, dtype, tuple(self.plan.extent[move, :depth].tolist()), tuple(strides[:depth]))
        self._moves.append(self.add(move, box, shape, self.plan.lo[move, :depth].tolist()))

    def _extent(self, move: int) -> tuple[int, ...]:
        return tuple(self.plan.extent[move, : self.plan.depth[self.plan.tensor[move]]].tolist())

    def blocks(self, move: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the scales of a move's tensor, and where those of its box begin."""
        shape = self.plan.manifest.tensors[self.plan.names[int(self.plan.tensor[move])]].shape
        start = self.plan.lo[move, : len(shape)].tolist()
        return (*shape[:-1], -(-shape[-1] // BLOCK)), (*start[:-1], start[-1] // BLOCK)

    def launched(self, buffers: Sequence[Buffer]) -> list[int]:
        """Digests by pair, of what `buffers` hold now."""
        if not self._moves:
            return [0] * len(self._pairs)
        self._table = bound(self._moves, self.device, buffers, self._table)
        self._table.launch()
        found = self._table.digest_values()
        return found + [0] * (len(self._pairs) - len(found))

    def sums(self, total: list[int], content: Callable[[int], Content]) -> Sums:
        """By engine rank and tensor: `total` by pair, with the content of `rest` added."""
        seen = self._seen.copy()
        for move in self.rest:
            box = content(move)
            if box is not None:
                total[self._out[move]] += move_digest(self.plan, move, box)
                seen[self._out[move]] = True
        sums: Sums = {}
        for pair, value, known in zip(self._pairs.tolist(), total, seen.tolist(), strict=True):
            if known:
                rank, tensor = divmod(pair, len(self.plan.names))
                sums.setdefault(rank, {})[self.plan.names[tensor]] = value % MODULUS
        return sums


class SentDigests(Digests):
    """What engines must hold, from what a trainer rank holds."""

    def __init__(self, plan: Plan, device: torch.device, scales: ScaleMoves | PlacedScales) -> None:
        """plan: the moves out of this rank. device: of its tensors. scales: where those of its codes lie."""
        super().__init__(plan, device)
        self._pieces: list[_Piece] = []
        self._scratch: list[torch.Tensor] = []
        for move in range(len(plan)):
            source, target = plan.sources[int(plan.source[move])], plan.targets[int(plan.target[move])]
            depth, coding = int(plan.depth[plan.tensor[move]]), coding_of(target.layout)
            place = At(int(plan.source[move]), int(plan.source_offset[move])), source.dtype, plan.source_strides[move].tolist()
            if target.layout.startswith(CHECKPOINT) or not (coding or dequantised_to(target.layout)):
                if depth and source.dtype == target.dtype:
                    self.add_plain(move, *place)
                else:
                    self.rest.append(move)
            elif coding and target.dtype == CODES:
                self.add_plain(move, *place)
                self._add_scales(move, scales)
            elif coding and target.dtype != "uint8" and depth in (2, 3) and along_k(plan, move) == depth - 1:
                self._add_quantised(move, Strided(*place[:2], self._extent(move), tuple(place[2][:depth])), coding.rule)
            elif target.dtype != "uint8":
                self.rest.append(move)

    def _add_scales(self, move: int, scales: ScaleMoves | PlacedScales) -> None:
        shape, _ = self.blocks(move)
        lo, size = scales.blocks(move)
        filled = 0
        for first, last, number, offset, strides in scales.where(move):
            a, b = np.maximum(lo, first)[: len(shape)], np.minimum(lo + size, last)[: len(shape)]
            if (b > a).all():
                at = At(number, offset + int(((a - first[: len(shape)]) * strides[: len(shape)]).sum()))
                box = Strided(at, "uint8", tuple((b - a).tolist()), tuple(strides[: len(shape)].tolist()))
                self._moves.append(self.add(move, box, shape, a.tolist()))
                filled += int(np.prod(b - a))
        if filled < int(np.prod(size)):
            raise scales_missing(self.plan, move, filled, int(np.prod(size)))

    def _add_quantised(self, move: int, box: Strided, rule: Rule) -> None:
        if not self._pieces or self._pieces[-1].codes + int(np.prod(box.shape)) > SCRATCH_BYTES:
            self._pieces.append(_Piece())
        shape, start = self.blocks(move)
        codes, blocks = self._pieces[-1].quantise(box, rule, self.plan.names[int(self.plan.tensor[move])])
        whole = self.plan.manifest.tensors[self.plan.names[int(self.plan.tensor[move])]].shape
        self._pieces[-1].digest(self.add(move, codes, whole, self.plan.lo[move, : len(shape)].tolist()))
        self._pieces[-1].digest(self.add(move, blocks, shape, start))

    def __call__(self, memory: Memory, scales: ScaleMoves | PlacedScales) -> Sums:
        """Digests of what `memory` and `scales` hold now."""
        buffers: list[Buffer] = [0] * len(self.plan.sources)
        for number in np.unique(self.plan.source).tolist():
            address = memory.address(number) if self.device.type == "cuda" else None
            buffers[number] = memory.memory(number) if address is None else address
        total = self.launched([*buffers, *scales.extra])
        if self._pieces and not self._scratch:
            sizes = max(p.codes for p in self._pieces), max(p.blocks for p in self._pieces)
            self._scratch = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes]
        for piece in self._pieces:
            for out, value in piece.run(self.device, buffers, self._scratch):
                total[out] += value
        return self.sums(total, lambda move: sent_content(self.plan, move, memory, scales))


class _Piece:
    """Boxes that are quantised into scratch together, and the digests of what lies there then. codes, blocks: scratch, bytes.

    Its tables know the buffers and the sums of this piece alone, in numbers of their own: 0 and 1 are the scratch.
    """

    def __init__(self) -> None:
        self.codes = self.blocks = 0
        self._sources: dict[int, int] = {}
        self._outs: dict[int, int] = {}
        self._moves: list[QuantizeMove] = []
        self._digests: list[DigestMove] = []
        self._quantise: Table | None = None
        self._digest: Table | None = None

    def quantise(self, box: Strided, rule: Rule, name: str) -> tuple[Strided, Strided]:
        """Quantise `box`, too. Returns where its codes and its scales will lie."""
        *lead, rows, k = box.shape
        codes, scales = At(0, self.codes), At(1, self.blocks)
        number = self._sources.setdefault(box.at.buffer, 2 + len(self._sources))
        box = msgspec.structs.replace(box, at=At(number, box.at.offset))
        self._moves.append(
            QuantizeMove(box, Stack("plain", codes, scales, Stored(rows, k), *lead), (0,) * len(box.shape), rule, name)
        )
        size = int(np.prod(box.shape))
        self.codes += -(-size // WIDE) * WIDE
        self.blocks += -(-size // BLOCK // WIDE) * WIDE
        return contiguous(codes, "uint8", box.shape), contiguous(scales, "uint8", (*lead, rows, k // BLOCK))

    def digest(self, move: DigestMove) -> None:
        """Digest what `quantise` made, too."""
        self._digests.append(msgspec.structs.replace(move, out=self._outs.setdefault(move.out, len(self._outs))))

    def run(self, device: torch.device, buffers: Sequence[Buffer], scratch: Sequence[Buffer]) -> Iterable[tuple[int, int]]:
        """Quantise, then digest. buffers: sources by the plan's numbers. Returns what is to be added to which sum."""
        mine = [*scratch, *(buffers[number] for number in self._sources)]
        self._quantise = bound(self._moves, device, mine, self._quantise)
        self._quantise.launch()
        self._digest = bound(self._digests, device, scratch, self._digest)
        self._digest.launch()
        return zip(self._outs, self._digest.digest_values(), strict=True)
