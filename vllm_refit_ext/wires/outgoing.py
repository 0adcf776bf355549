"""What a trainer rank sends: its pieces of every engine rank's rounds, message by message. Rank 0 makes the tables, and each rank
packs its messages by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import Column, pack, unpack
from vllm_refit_ext.kernels.moves import At, CopyMove, Strided, contiguous
from vllm_refit_ext.kernels.table import Table
from vllm_refit_ext.wires.boxes import addresses_of
from vllm_refit_ext.wires.staging import Rounds

Cut = tuple[Plan, Int, Int]
"""Of one engine rank: its pieces; the round of each, int64 [n]; those that a trainer rank sends, in order, int64 [m]."""


class Outgoing(msgspec.Struct):
    """The pieces that one trainer rank sends, sorted by (round, target, place in the message). All int64.

    target: engine rank. number: round, as the target counts them. nbytes: of each piece. tensor: index into the rank's live
    tensors. offset: bytes into it. extent [n, D] elements. strides [n, D] bytes.
    """

    target: Int
    number: Int
    nbytes: Int
    tensor: Int
    offset: Int
    extent: Int
    strides: Int

    @classmethod
    def read(cls, columns: Sequence[Column]) -> Outgoing:
        """What `outgoing` made."""
        return cls(*map(unpack, columns))

    def messages(self) -> Iterator[Sent]:
        """The messages that the pieces make, in the order of sending."""
        new = np.ones(len(self.target), bool)
        new[1:] = (np.diff(self.number) != 0) | (np.diff(self.target) != 0)
        count: Counter[int] = Counter()
        for a, b in pairwise([*np.flatnonzero(new).tolist(), len(new)]):
            target = int(self.target[a])
            yield Sent(target, count[target], a, b, int(self.nbytes[a:b].sum()))
            count[target] += 1


class Sent(msgspec.Struct, frozen=True):
    """A message: pieces first..last, end to end, to engine rank `target`. tag: how many messages to it come before."""

    target: int
    tag: int
    first: int
    last: int
    nbytes: int


def sent_by(cuts: Sequence[Rounds], rank: int) -> Iterator[Cut]:
    """For each engine rank what trainer rank `rank` holds of its rounds. A round has one message of it."""
    for r in cuts:
        rows = np.flatnonzero(r.plan.source_rank == rank)
        yield r.plan, r.number, rows[np.lexsort((r.at[rows], r.number[rows]))]


def outgoing(cuts: Iterable[Cut], plan: Plan, rank: int) -> list[Column]:
    """The columns of `Outgoing` for trainer rank `rank`. cuts: of each engine rank. plan: that of all ranks."""
    first = int(np.searchsorted([b.rank for b in plan.sources], rank))
    depth = plan.extent.shape[1]
    parts: list[tuple[Int, ...]] = [(*(np.zeros(0, np.int64),) * 5, *(np.zeros((0, depth), np.int64),) * 2)]
    for target, (p, number, rows) in enumerate(cuts):
        where = np.full(len(rows), target, np.int64), number[rows]
        box = p.source_offset[rows], p.extent[rows], p.source_strides[rows]
        parts.append((*where, p.nbytes[rows], p.source[rows] - first, *box))
    columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
    order = np.lexsort((columns[0], columns[1]))  # stable: the pieces of a message stay in their order
    return [pack(c[order]) for c in columns]


class Gather:
    """Packs the messages of a trainer rank from its live tensors, a table of moves for each group of them.

    A table is made when its group is first packed, and again when an address has changed.
    """

    def __init__(self, pieces: Outgoing, groups: Sequence[Sequence[tuple[Sent, int]]]) -> None:
        """groups: what one `pack` copies, messages and the byte in the buffer at which each begins."""
        self._pieces, self._groups = pieces, groups
        self.used: list[int] = np.unique(pieces.tensor).tolist()
        """Numbers of the tensors that it reads."""
        self._tensors: Sequence[torch.Tensor] = []
        self._addresses: list[int] = []
        self._tables: dict[int, Table] = {}

    def look(self, tensors: Sequence[torch.Tensor], where: str, known: Sequence[int] | None) -> None:
        """Take the tensors of a refit. known: the addresses of all, see `addresses_of`. Raises WireError for those that are not
        contiguous."""
        addresses = addresses_of(tensors, self.used, where, known)
        self._tensors = tensors
        if addresses != self._addresses:
            self._addresses = addresses
            self._tables.clear()

    def pack(self, group: int, into: torch.Tensor) -> None:
        """Launch the copies of a group into uint8 `into`, the same memory in every refit."""
        if group not in self._tables:
            self._tables[group] = self._table(group, into)
        self._tables[group].launch()

    def _table(self, group: int, into: torch.Tensor) -> Table:
        p, moves, sources = self._pieces, list[CopyMove](), [into]
        for message, at in self._groups[group]:
            for i in range(message.first, message.last):
                tensor = self._tensors[int(p.tensor[i])].detach()
                dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(p.extent[i].tolist())
                source = Strided(At(len(sources), int(p.offset[i])), dtype, shape, tuple(p.strides[i].tolist()))
                moves.append(CopyMove(source, contiguous(At(0, at), dtype, shape), f"piece {i}"))
                sources.append(tensor)
                at += int(p.nbytes[i])
        # Parameters may lie at any multiple of their element's size.
        alignment = {i: t.element_size() for i, t in enumerate(sources) if t.data_ptr() % 16}
        table = Table(moves, into.device, alignment=alignment)
        table.bind(sources)
        return table

    def close(self) -> None:
        """Let go of the tensors."""
        self._tables, self._tensors, self._addresses = {}, [], []
