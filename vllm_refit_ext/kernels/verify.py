"""Verify mode: recompute a sample of moves by the reference and compare the bytes that are in memory now.

The reference (`core`, numpy on a CPU) shares no code with the kernels, so it also finds a kernel or a compiler that is
wrong. The cost is the sampled sources and targets over the bus plus numpy's time, about 0.1 s for a 768 x 2048 expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_refit_ext.core import mxfp8
from vllm_refit_ext.core.errors import VerifyError
from vllm_refit_ext.core.layouts import layout_of
from vllm_refit_ext.kernels.memory import Buffer, byte_view, view
from vllm_refit_ext.kernels.moves import CopyMove, DigestMove, Move, QuantizeMove, Stack, size3, start3

Bytes = mxfp8.Bytes


@dataclass
class VerifyReport:
    """What a verification compared: moves, bytes of targets, and a line for each move that differs."""

    moves: int = 0
    nbytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def raise_if_wrong(self) -> None:
        """Raise VerifyError naming every move that differs."""
        if self.wrong:
            raise VerifyError(
                "memory differs from the reference",
                got="; ".join(self.wrong[:20]),
                wanted=f"{self.moves} moves equal",
                do="keep the engine out of service; run a full refit and report this",
            )


def verify(moves: Sequence[Move | DigestMove], buffers: Sequence[Buffer], *, sample: int, seed: int = 0) -> VerifyReport:
    """Compare up to `sample` moves, drawn by `seed`, with the reference. Sources must still hold what the launch read.

    `buffers` are tensors, as bound. Moves without a target in an engine (digests, read-backs) are not drawn. Waits.
    """
    writing = [m for m in moves if not isinstance(m, DigestMove) and not getattr(m, "inverse", False)]
    report = VerifyReport()
    chosen = np.random.default_rng(seed).permutation(len(writing))[:sample]
    for i in sorted(chosen.tolist()):
        move = writing[i]
        got, want = _copy(move, buffers) if isinstance(move, CopyMove) else _mxfp8(move, buffers)
        report.moves += 1
        report.nbytes += want.size
        differ = np.flatnonzero(got != want)
        if differ.size:
            report.wrong.append(
                f"{move.name or f'move {i}'}: {differ.size} of {want.size} bytes, first at byte {differ[0]} of the box"
            )
    return report


def _copy(move: CopyMove, buffers: Sequence[Buffer]) -> tuple[Bytes, Bytes]:
    source, target = (view(buffers[box.at.buffer], box).detach().cpu().contiguous() for box in (move.source, move.target))
    if move.casts:
        source = source.to(target.dtype)
        nan = source.isnan() & target.isnan()
        source = torch.where(nan, target, source)
    return tuple(t.reshape(-1).view(torch.uint8).numpy() for t in (target, source))  # type: ignore[return-value]


def _mxfp8(move: Move, buffers: Sequence[Buffer]) -> tuple[Bytes, Bytes]:
    if isinstance(move, QuantizeMove):
        x = view(buffers[move.source.at.buffer], move.source).detach().cpu().float().numpy()
        codes, scales = mxfp8.quantize(x, move.rule, allow_nonfinite=True)
    else:
        assert not isinstance(move, CopyMove)
        codes, scales = (
            view(buffers[b.at.buffer], b).detach().cpu().view(torch.uint8).numpy() for b in (move.codes, move.scales)
        )
    got = [_stored(move.target, move.start, c.shape, buffers, scales=s) for c, s in ((codes, False), (scales, True))]
    return np.concatenate([g.reshape(-1) for g in got]), np.concatenate([codes.reshape(-1), scales.reshape(-1)])


def _stored(stack: Stack, start: tuple[int, ...], shape: tuple[int, ...], buffers: Sequence[Buffer], *, scales: bool) -> Bytes:
    """The bytes that `stack` holds for a canonical box, gathered by the reference's offsets."""
    form, stored = layout_of(stack.layout), stack.stored
    matrix, row, col = start3(start)
    count, rows, width = size3(shape)
    place, nbytes = (stack.scales, stack.scale_bytes) if scales else (stack.values, stack.value_bytes)
    by_row, by_col = (form.scale_row, form.scale_col) if scales else (form.value_row, form.value_col)
    col = col // mxfp8.BLOCK if scales else col
    offsets = by_row(stored, np.arange(row, row + rows))[:, None] + by_col(stored, np.arange(col, col + width))[None, :]
    first = place.offset + matrix * nbytes
    memory = byte_view(buffers[place.buffer])[first : first + count * nbytes].cpu().numpy().reshape(count, nbytes)
    return memory[:, offsets]
