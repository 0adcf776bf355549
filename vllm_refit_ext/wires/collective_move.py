"""Both ends of a transfer: a trainer rank packs and sends its messages, an engine rank receives rounds and offers them.

Each end has a ring of two staging buffers, made once. While one bucket is sent the other is packed, or written into the
engine. So the bytes in flight at a rank are at most two buckets, and a batch has at most 16 operations.
"""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from vllm_refit_ext.core.errors import RefitError, WireError
from vllm_refit_ext.wires.collective_group import P2POp
from vllm_refit_ext.wires.outgoing import Gather, Outgoing, Sent
from vllm_refit_ext.wires.staging import RING, BucketReader, Message, RoundBuffers, Rounds, padded

OPERATIONS = 16
"""Most operations in one batch. NCCL makes progress on all operations of a small group at once; on thousands it stalls."""


class Waiter(Protocol):
    """Operations under way."""

    def wait(self, deadline: float) -> None: ...


class Transport(Protocol):
    """What sends and receives: `collective_group.Group`, or a stand-in of the same kind."""

    @property
    def device(self) -> torch.device: ...

    @property
    def independent(self) -> bool: ...

    def post(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> Waiter: ...


class Packer:
    """A trainer rank's end: what to pack where, found once; run for every refit."""

    def __init__(self, pieces: Outgoing, first: int, bucket_bytes: int) -> None:
        """first: group rank of engine rank 0. bucket_bytes: most payload of a batch."""
        self._first, self._messages = first, list(pieces.messages())
        self._batches = [list(_placed(batch)) for batch in _batches(self._messages, bucket_bytes)]
        self._room = max((padded(at + message.nbytes) for batch in self._batches for message, at in batch), default=0)
        self._gather = Gather(pieces, self._batches)
        self._ring: list[torch.Tensor] = []
        self.lost: dict[int, RefitError] = {}

    @property
    def peers(self) -> set[int]:
        """Group ranks that it sends to."""
        return {self._first + message.target for message in self._messages}

    @property
    def staging_bytes(self) -> int:
        """Memory of the ring."""
        return RING * self._room

    def look(self, tensors: Sequence[torch.Tensor], known: Sequence[int] | None = None) -> None:
        """Take the tensors of a refit, as `Gather.look` does."""
        self._gather.look(list(tensors), "wire collective", known)

    def run(self, transport: Transport, deadline: float) -> dict[int, int]:
        """Send everything. Returns payload bytes by engine rank. Raises WireError, DeadlineError.

        Where messages of a transport stand apart, an engine rank that is gone is put into `lost`, with its error, and the others
        get their bytes.
        """
        self.lost = {}
        self._ring = self._ring or [torch.empty(self._room, dtype=torch.uint8, device=transport.device) for _ in range(RING)]
        pending: list[list[tuple[int, Waiter]]] = [[] for _ in range(RING)]
        for index, batch in enumerate(self._batches):
            slot = self._ring[index % RING]
            self._wait(transport, pending[index % RING], deadline)
            self._gather.pack(index, slot)
            ops = [P2POp(self._first + m.target, m.tag, slot[at : at + m.nbytes]) for m, at in batch]
            pending[index % RING] = self._post(transport, ops)
        for started in pending:
            self._wait(transport, started, deadline)
        sent: dict[int, int] = {}
        for message in self._messages:
            if self._first + message.target in self.lost:
                continue
            sent[message.target] = sent.get(message.target, 0) + message.nbytes
        return sent

    def _post(self, transport: Transport, ops: list[P2POp]) -> list[tuple[int, Waiter]]:
        """Start a batch, in one where all its messages end as one. Returns what to wait for, with the peer of each."""
        if not transport.independent:
            return [(-1, transport.post(ops, []))]
        started = []
        for op in ops:
            if op.peer not in self.lost:
                try:
                    started.append((op.peer, transport.post([op], [])))
                except WireError as error:
                    self.lost[op.peer] = error
        return started

    def _wait(self, transport: Transport, started: list[tuple[int, Waiter]], deadline: float) -> None:
        for peer, waiter in started:
            try:
                waiter.wait(deadline)
            except WireError as error:
                if not transport.independent:
                    raise
                self.lost.setdefault(peer, error)


def _placed(batch: Sequence[Sent]) -> Iterator[tuple[Sent, int]]:
    """Messages with the byte of a staging buffer at which each begins."""
    at = 0
    for message in batch:
        yield message, at
        at += padded(message.nbytes)


def _batches(messages: Sequence[Sent], bucket_bytes: int) -> Iterator[list[Sent]]:
    """Consecutive messages, as many as fit a bucket and the bound on operations; at least one."""
    batch: list[Sent] = []
    size = 0
    for message in messages:
        if batch and (size + message.nbytes > bucket_bytes or len(batch) == OPERATIONS):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += message.nbytes
    if batch:
        yield batch


class Buffers(RoundBuffers):
    """An engine rank's memory for its rounds. Kept from refit to refit, and never moved, so that `token` names it.

    messages: those of each round, each with the number of messages of the same source that come before it.
    """

    def __init__(self, cut: Rounds, device: torch.device) -> None:
        self.token = secrets.token_hex(8)
        count: Counter[int] = Counter()
        self.messages: list[list[tuple[Message, int]]] = []
        for found in cut.messages:
            self.messages.append([(message, count[message.source]) for message in found])
            count.update(message.source for message in found)
        self.peers = set(count)
        """Group ranks that it receives from."""
        slot = functools.partial(torch.empty, dtype=torch.uint8, device=device)
        super().__init__(cut, cut.staged(), [cut.size(r) for r in range(len(cut.messages))], slot, device)


class Unpacker(BucketReader):
    """An engine rank's end, for one refit. A round lies in one buffer."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__(buffers, "wire collective")
        self.buffers, self.token = buffers, buffers.token
        self._transport: Transport | None = None
        self._deadline, self._done = 0.0, False
        self._recvs: list[list[Waiter]] = []

    def begin(self, transport: Transport, deadline: float) -> None:
        """Start the refit. deadline: time.monotonic seconds."""
        self._transport, self._deadline = transport, deadline

    def confirm(self) -> None:
        """Raise WireError when rounds were left."""
        self._check_read()
        self._done = True

    def close(self) -> None:
        """Nothing is held that is not kept."""

    def _bring(self, here: int) -> torch.Tensor:
        """Wait for the next round. What was launched until now reads those before it: a receive is ordered behind that. Later
        rounds start early, as long as staging is free for them."""
        kept = len(self.buffers.kept)
        ahead = min(here + (RING if here < kept else RING - 1), len(self.buffers.messages) - 1)
        while len(self._recvs) <= ahead:
            self._recvs.append(self._receive(len(self._recvs)))
        for waiter in self._recvs[here]:
            waiter.wait(self._deadline)
        for message, _ in self.buffers.messages[here]:
            self.received[message.source] = self.received.get(message.source, 0) + message.nbytes
        return self.buffers.place(here)

    def _receive(self, number: int) -> list[Waiter]:
        """Start to receive round `number`, in batches."""
        assert self._transport is not None
        slot, messages = self.buffers.place(number), self.buffers.messages[number]
        ops = [P2POp(m.source, tag, slot[m.at : m.at + m.nbytes]) for m, tag in messages]
        return [self._transport.post([], ops[i : i + OPERATIONS]) for i in range(0, len(ops), OPERATIONS)]
