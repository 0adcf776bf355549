"""A trainer rank's half of wire `ipc_staged`: it packs its own messages and passes on those of other sites, in the order of
`ipc_lanes`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.messages import IpcStagedInfo, RingInfo
from vllm_refit_ext.core.table import Column, unpack
from vllm_refit_ext.kernels.moves import At, CopyMove, Strided, contiguous
from vllm_refit_ext.kernels.table import Table
from vllm_refit_ext.wires.collective_group import Backend
from vllm_refit_ext.wires.ipc_lanes import RING, Task, tasks_of
from vllm_refit_ext.wires.ipc_relay import Flight, Meeting
from vllm_refit_ext.wires.ipc_ring import RingOwner, Stoppable, Words
from vllm_refit_ext.wires.shm import FOLDER

WHERE = "wire ipc_staged"


class Share(msgspec.Struct):
    """What a trainer rank must know: its tasks as `ipc_lanes.table_of` makes them, and its pieces, one column each, sorted by
    (round, target, place in the message).

    trainers, engines: ranks of both sides. sites: whether the trainer ranks live on several. lanes: of the whole plan, as in the
    message, for rank 0 alone. slots: bytes of a ring buffer for each engine rank. target, number: engine rank and round. buffer,
    at, offset: buffer of this rank, bytes from the message's start, bytes into the buffer. extent [n, D] elements, strides [n, D]
    bytes.
    """

    trainers: int
    engines: int
    bucket_bytes: int
    sites: bool
    lanes: Column | None
    slots: list[int]
    tasks: Column
    columns: list[Column]


class StagedSender:
    """A trainer rank's half. `staging_bytes`: memory of its ring, with what it relays, and of the buffers that it sends from."""

    def __init__(self, rank: int, share: Share, tensors: Sequence[torch.Tensor]) -> None:
        self.rank, self._share = rank, share
        self._columns = [unpack(c) for c in share.columns]
        self._tasks = tasks_of(unpack(share.tasks))
        self._rows = list(self._rows_of())
        used = np.unique(self._columns[2]).tolist()
        self._device = tensors[used[0] if used else 0].device if len(tensors) else torch.device("cpu")
        self._ring = RingOwner(rank, share.slots, self._device)
        room = max((t.nbytes for t in self._tasks if t.count < 0), default=0)
        self._outbox = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(RING if room else 0)]
        self.staging_bytes = self._ring.nbytes + sum(t.nbytes for t in self._outbox)
        peers = {task.peer for task in self._tasks if task.peer >= 0}
        self._backend: Backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._meeting = Meeting(rank, share.trainers, self._backend, peers) if share.sites else None
        self._tables: dict[int, Table] = {}
        self._tensors: list[torch.Tensor] = []
        self._nonce = 0
        self._addresses: list[int] = []
        self._bound: set[int] = set()

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Remember the live tensors and clear the words. Returns this rank's part of the message."""
        self._tensors, self._nonce = list(tensors), secrets.randbits(62) | 1
        addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            self._addresses = addresses
            self._bound.clear()
            self._tables.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ring.words.clear(self._nonce)
        info = msgspec.structs.replace(self._ring.info, nonce=self._nonce)
        host, port = self._meeting.address if self._meeting is not None else ("", 0)
        share = self._share
        return msgspec.msgpack.encode(Part(info, share.bucket_bytes, share.engines, self._backend, share.lanes, host, port))

    def transfer(self, session: str, info: IpcStagedInfo, deadline: float) -> dict[int, int]:
        """Pack, send and pass on every message when its buffer is free. deadline: time.monotonic seconds.

        Returns bytes of this rank's own by engine rank. Raises WireError when an engine rank or a trainer rank gave up or rank 0
        was told that an engine refused, DeadlineError when one does not go on.
        """
        mine = self._ring.words
        if self._meeting is not None:
            return self._travel(self._meeting, session, info, deadline)
        lead = next(r for r in info.rings if r.rank == 0)
        words = mine if self.rank == 0 else Words(FOLDER / lead.name, len(lead.slots), lead.site)
        try:
            return self._work(None, (words,), deadline)
        except BaseException:
            mine.stop()
            raise
        finally:
            if self.rank != 0:
                words.close()

    def _travel(self, meeting: Meeting, session: str, info: IpcStagedInfo, deadline: float) -> dict[int, int]:
        """`transfer` where the trainer spans sites."""
        try:
            group = meeting.start(session, info, deadline)
            flight = None
            if group is not None:
                flight = Flight(group, self._ready, lambda: meeting.stopped, deadline)
            return self._work(flight, (meeting,), deadline)
        except BaseException as error:
            self._ring.words.stop()
            told = meeting.fail(error)
            if told is error:
                raise
            raise told from error

    def _work(self, flight: Flight | None, others: Sequence[Stoppable], deadline: float) -> dict[int, int]:
        words, sent = self._ring.words, dict[int, int]()
        shown: dict[int, int] = {}
        number = sends = 0
        for task in self._tasks:
            if flight is not None:
                flight.look()
            if task.count >= 0:
                if flight is not None and words.read(task.target, 1) < task.after:
                    flight.land()
                words.wait(task.target, 1, task.after, deadline, self._where(task.target), others)
                shown[task.target] = task.count + 1
                into = self._ring.slot(task.target, task.half)[task.at : task.at + task.nbytes]
                if not task.own:
                    assert flight is not None
                    flight.receive(task, into)
                    continue
            else:
                assert flight is not None
                flight.room_to_send()
                into = self._outbox[sends % RING][: task.nbytes]
                sends += 1
            self._pack(number, into)
            number += 1
            sent[task.target] = sent.get(task.target, 0) + task.nbytes
            if task.count < 0:
                assert flight is not None
                flight.send(task, into)
            elif flight is not None:
                flight.packed(task)
            else:
                self._ready(task)
        if flight is not None:
            flight.land()
        for target, count in shown.items():
            words.wait(target, 1, count, deadline, self._where(target), others)
        return sent

    def _where(self, target: int) -> str:
        return f"{WHERE}, trainer rank {self.rank} to engine rank {target}"

    def _ready(self, task: Task) -> None:
        """Show the message of a task to its reader."""
        self._ring.words.write(task.target, 0, task.count + 1)

    def refuse(self, session: str, error: RefitError, deadline: float) -> None:
        """On rank 0: an engine's call failed; every rank that packs stops."""
        if self._meeting is not None:  # first, so that the other sites hear of this cause and not of what follows from it
            self._meeting.refuse(session, error, deadline)
        self._ring.words.stop()

    def _rows_of(self) -> Iterator[range]:
        """The pieces of each of this rank's own messages, in the order of its tasks."""
        target, number = self._columns[0], self._columns[1]
        new = np.ones(len(target), bool)
        new[1:] = (np.diff(number) != 0) | (np.diff(target) != 0)
        for a, b in pairwise([*np.flatnonzero(new).tolist(), len(target)]):
            yield range(a, b)

    def _pack(self, number: int, into: torch.Tensor) -> None:
        """Gather this rank's own message `number` in `into`, the same memory in every refit."""
        _, _, buffer, at, place, extent, strides = self._columns
        rows = self._rows[number]
        if number not in self._tables:
            moves = []
            for slot, i in enumerate(rows, start=1):
                dtype, shape = _name(self._tensors[int(buffer[i])].dtype), tuple(extent[i].tolist())
                source = Strided(At(slot, int(place[i, 0])), dtype, shape, tuple(strides[i].tolist()))
                moves.append(CopyMove(source, contiguous(At(0, int(at[i])), dtype, shape), f"piece {i}"))
            # Parameters may lie at any multiple of their element's size.
            alignment = {
                slot: self._tensors[int(buffer[i])].element_size()
                for slot, i in enumerate(rows, start=1)
                if self._tensors[int(buffer[i])].data_ptr() % 16
            }
            self._tables[number] = Table(moves, self._device, alignment=alignment)
        table = self._tables[number]
        if number not in self._bound:
            table.bind([into, *(self._tensors[int(buffer[i])].detach() for i in rows)])
            self._bound.add(number)
        table.launch()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Free the ring and leave the group. Safe to call twice."""
        self._ring.close()
        self._outbox = []
        if self._meeting is not None:
            self._meeting.close()


class Part(msgspec.Struct):
    """What a trainer rank tells rank 0; lanes, host and port only from rank 0 itself."""

    ring: RingInfo
    bucket_bytes: int
    engines: int
    backend: Backend
    lanes: Column | None
    host: str
    port: int


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
