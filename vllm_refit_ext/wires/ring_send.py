"""A trainer rank's half of wire `ring`: it packs its own messages and passes on those of other hosts, in the order of
`ring_order`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from vllm_refit_ext.core.errors import RefitError, WireError, gave_up
from vllm_refit_ext.core.messages import RingInfo, RingRank
from vllm_refit_ext.core.table import Column, unpack
from vllm_refit_ext.wires import Sender
from vllm_refit_ext.wires.boxes import launched, wait_for
from vllm_refit_ext.wires.collective_group import Backend
from vllm_refit_ext.wires.outgoing import Gather, Outgoing
from vllm_refit_ext.wires.ring_buffers import DONE, READY, REFUSED, RingMapping, RingOwner, Words
from vllm_refit_ext.wires.ring_order import Task, tasks_of
from vllm_refit_ext.wires.ring_relay import Communicator, Pending
from vllm_refit_ext.wires.staging import RING

WHERE = "wire ring"


class SendTable(msgspec.Struct):
    """What a trainer rank must know: its tasks as `ring_order.table_of` makes them, and the columns of its `Outgoing`.

    trainers, engines: ranks of both sides. several_hosts: whether the trainer ranks live on several. relays: of the whole plan,
    as in the message. slots: bytes of a ring buffer for each engine rank.
    """

    trainers: int
    engines: int
    bucket_bytes: int
    several_hosts: bool
    relays: Column | None
    slots: list[int]
    tasks: Column
    pieces: list[Column]

    def rest(self) -> bytes:
        """What the message says beside the rings, for `seal_of`."""
        return rest_of(self.bucket_bytes, self.engines, self.relays)


def rest_of(bucket_bytes: int, engines: int, relays: Column | None) -> bytes:
    """Fields of `RingInfo` that every ring's seal covers."""
    return msgspec.msgpack.encode((bucket_bytes, engines, relays))


class RingSender(Sender):
    """A trainer rank's half. `staging_bytes`: memory of its ring, with what it relays, and of the buffers that it sends from."""

    sends = True

    def __init__(self, rank: int, table: SendTable, tensors: Sequence[torch.Tensor]) -> None:
        self.rank, self._table = rank, table
        pieces = Outgoing.read(table.pieces)
        self._gather = Gather(pieces, [[(message, 0)] for message in pieces.messages()])
        self._tasks = tasks_of(unpack(table.tasks))
        self._device = tensors[(self._gather.used or [0])[0]].device if len(tensors) else torch.device("cpu")
        self._ring = RingOwner(rank, table.slots, self._device, table.rest())
        room = max((t.nbytes for t in self._tasks if t.count < 0), default=0)
        self._outbox = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(RING if room else 0)]
        self.staging_bytes = self._ring.nbytes + sum(t.nbytes for t in self._outbox)
        peers = {task.peer for task in self._tasks if task.peer >= 0}
        self._backend: Backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._communicator = Communicator(rank, table.trainers, self._backend, peers) if table.several_hosts else None
        self._session, self._lock = "", threading.Lock()
        self._refused: dict[str, list[tuple[tuple[int, ...], RefitError]]] = {}

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Remember the live tensors; the ring goes on to its next epoch. Returns this rank's part of the message.

        Raises WireError for tensors that are not contiguous.
        """
        self._gather.look(list(tensors), f"{WHERE}, trainer rank {self.rank}", self.addresses)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        info = self._ring.begin()
        host, port = self._communicator.address if self._communicator is not None else ("", 0)
        table, relays = self._table, self._table.relays if self.rank == 0 else None
        return msgspec.msgpack.encode(Part(info, table.bucket_bytes, table.engines, self._backend, relays, host, port))

    def transfer(self, session: str, info: RingInfo, deadline: float) -> dict[int, int]:
        """Pack, send and pass on every message when its buffer is free. deadline: time.monotonic seconds.

        An engine rank that gives up, or whose engine refuses, is left out from then on; the others get their bytes. Returns bytes
        of this rank's own by engine rank. Raises WireError when an engine rank or a trainer rank gave up, DeadlineError when one
        does not go on.
        """
        epoch = self._ring.info.epoch
        self._session = session
        if self._communicator is not None:
            return self._transfer_between_hosts(self._communicator, session, info, epoch, deadline)
        lead, lost = None, None
        try:
            if self.rank != 0:
                first = next(r for r in info.rings if r.rank == 0)
                lead = RingMapping(first, None, self._table.rest()), first.epoch
            with self._lock:
                self._refuse_now(session)
            side = _Side(self._ring.words, epoch, lead)
            sent = self._work(side, deadline)
            if side.lost:
                lost = self._error_of(side.lost, session)
        except BaseException:
            self._ring.words.stop(epoch)
            raise
        finally:
            with self._lock:
                self._session, self._refused = "", {}
            if lead is not None:
                lead[0].close()
        if lost is not None:  # the others have theirs, so nothing is stopped
            raise lost
        return sent

    def _transfer_between_hosts(
        self, communicator: Communicator, session: str, info: RingInfo, epoch: int, deadline: float
    ) -> dict[int, int]:
        """`transfer` where the trainer spans hosts: whoever gives up stops all, since messages of all engine ranks pass through
        the same trainer ranks."""
        try:
            group = communicator.start(session, info, deadline)
            pending, side = None, _Side(self._ring.words, epoch, communicator=communicator)
            if group is not None:
                pending = Pending(group, lambda task: side.ready(task), lambda: communicator.stopped, deadline)
            return self._work(side, deadline, pending)
        except BaseException as error:
            self._ring.words.stop(epoch)
            cause = communicator.fail(error)
            if cause is error:
                raise
            raise cause from error
        finally:
            self._session = ""

    def _work(self, side: _Side, deadline: float, pending: Pending | None = None) -> dict[int, int]:
        sent: dict[int, int] = {}
        shown: dict[int, int] = {}
        number = sends = 0
        for task in self._tasks:
            if pending is not None:
                pending.poll()
            own, number = number, number + task.own
            if task.count >= 0:
                if pending is not None and not side.done(task.target, task.after):
                    pending.drain()
                if not side.wait(task.target, task.after, deadline, self._where(task.target)):
                    continue
                shown[task.target] = task.count + 1
                into = self._ring.slot(task.target, task.half)[task.at : task.at + task.nbytes]
                if not task.own:
                    assert pending is not None
                    pending.receive(task, into)
                    continue
            else:
                assert pending is not None
                pending.room_to_send()
                into = self._outbox[sends % RING][: task.nbytes]
                sends += 1
            self._pack(own, into)
            sent[task.target] = sent.get(task.target, 0) + task.nbytes
            if pending is None:
                side.launched(task, launched(self._device))
                continue
            wait_for(self._device)
            if task.count < 0:
                pending.send(task, into)
            else:
                pending.packed(task)
        if pending is not None:
            pending.drain()
        for target, count in shown.items():
            side.wait(target, count, deadline, self._where(target))
        return sent

    def _error_of(self, lost: set[int], session: str) -> RefitError:
        """Why engine ranks got no bytes: what their engines said, else that they gave up."""
        known = [error for ranks, error in self._refused.get(session, []) if lost & set(ranks or lost)]
        if known:
            return type(known[0]).of([p for error in known for p in error.problems])
        names = ", ".join(f"engine rank {rank}" for rank in sorted(lost))
        return WireError.of([gave_up(f"{WHERE}, {names}")])

    def _where(self, target: int) -> str:
        return f"{WHERE}, trainer rank {self.rank} to engine rank {target}"

    def refuse(self, session: str, error: RefitError, deadline: float, ranks: Sequence[int] = ()) -> None:
        """On rank 0: the call of the engine with these `ranks` failed; nobody waits for them in `session`. None: for nobody."""
        if self._communicator is not None:  # first, so that the other hosts hear of this cause and not of what follows from it
            self._communicator.refuse(session, error, deadline)
        with self._lock:
            self._refused.setdefault(session, []).append((tuple(ranks), error))
            if session == self._session:
                self._refuse_now(session)

    def _refuse_now(self, session: str) -> None:
        """Say in the ring what was refused in `session`, and forget the refusals of others."""
        self._refused = {session: self._refused.get(session, [])}
        for ranks, _ in self._refused[session]:
            for rank in ranks or range(self._table.engines):
                self._ring.words.write(rank, REFUSED, self._ring.info.epoch)

    def _pack(self, number: int, into: torch.Tensor) -> None:
        """Launch the copies of this rank's own message `number` into `into`, the same memory in every refit."""
        self._gather.pack(number, into)

    def close(self) -> None:
        """Free the ring and leave the group. Safe to call twice."""
        self._ring.close()
        self._gather.close()
        self._outbox = []
        if self._communicator is not None:
            self._communicator.close()


class _Side:
    """What a trainer rank sees in one refit: the words of its own ring, and either those of rank 0's or the communicator. lost:
    engine ranks that gave up or were refused."""

    def __init__(
        self, words: Words, epoch: int, lead: tuple[RingMapping, int] | None = None, communicator: Communicator | None = None
    ) -> None:
        self._words, self._epoch, self._lead, self._communicator = words, epoch, lead, communicator
        self._packing: deque[tuple[Task, Callable[[], bool]]] = deque()
        self.lost: set[int] = set()

    def ready(self, task: Task) -> None:
        """Show the message of a task to its reader."""
        self._words.write(task.target, READY, self._epoch, task.count + 1)

    def launched(self, task: Task, ended: Callable[[], bool]) -> None:
        """Show the message of a task to its reader once its copies have ended, at the next look."""
        self._packing.append((task, ended))
        self._show()

    def _show(self) -> None:
        while self._packing and self._packing[0][1]():
            self.ready(self._packing.popleft()[0])

    def done(self, target: int, least: int) -> bool:
        """Whether an engine rank is done with so many messages."""
        return self._words.read(target, DONE, self._epoch) >= least

    def wait(self, target: int, least: int, deadline: float, where: str) -> bool:
        """Wait for `done`; False for a rank that is lost. Raises WireError, DeadlineError where the refit ends for all."""
        if target not in self.lost and not self._given_up(target):
            try:
                self._words.wait(target, DONE, least, self._epoch, deadline, where, lambda: self._stops(target))
            except WireError:
                if self._communicator is not None or not self._given_up(target):
                    raise
            else:
                return True
        if self._communicator is not None:
            raise WireError.of([gave_up(where)])
        self.lost.add(target)
        self._words.write(target, REFUSED, self._epoch)
        return False

    def _given_up(self, target: int) -> bool:
        words, epoch = (self._lead[0].words, self._lead[1]) if self._lead is not None else (self._words, self._epoch)
        return self._words.given_up(target, self._epoch) or words.given_up(target, epoch)

    def _stops(self, target: int) -> bool:
        """At every look: show what has been packed, and see whether this rank or all have given up."""
        self._show()
        if self._communicator is not None:
            return self._communicator.stopped
        return self._given_up(target) or (self._lead is not None and self._lead[0].words.stopped(self._lead[1]))


class Part(msgspec.Struct):
    """What a trainer rank sends to rank 0; relays, host and port only from rank 0 itself."""

    ring: RingRank
    bucket_bytes: int
    engines: int
    backend: Backend
    relays: Column | None
    host: str
    port: int
