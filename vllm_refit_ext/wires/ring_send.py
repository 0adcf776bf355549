"""A trainer rank's half of wire `ring`: it packs its messages into buffers as these become free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import torch

from vllm_refit_ext.core.errors import RefitError, WireError, gave_up
from vllm_refit_ext.core.messages import RingInfo, RingRank
from vllm_refit_ext.core.table import Column
from vllm_refit_ext.wires import Sender
from vllm_refit_ext.wires.boxes import launched
from vllm_refit_ext.wires.outgoing import Gather, Outgoing, Sent
from vllm_refit_ext.wires.ring_buffers import DONE, READY, REFUSED, RingMapping, RingOwner, Words
from vllm_refit_ext.wires.staging import RING

WHERE = "wire ring"


class SendTable(msgspec.Struct):
    """What a trainer rank must know: the number of engine ranks, most payload of a message, the columns of its `Outgoing`."""

    engines: int
    bucket_bytes: int
    pieces: list[Column]


def rest_of(bucket_bytes: int, engines: int) -> bytes:
    """Fields of `RingInfo` that every ring's seal covers."""
    return msgspec.msgpack.encode((bucket_bytes, engines))


class RingSender(Sender):
    """A trainer rank's half. `staging_bytes`: memory of its ring."""

    sends = True

    def __init__(self, rank: int, table: SendTable, tensors: Sequence[torch.Tensor]) -> None:
        self.rank, self._table, self._rest = rank, table, rest_of(table.bucket_bytes, table.engines)
        pieces = Outgoing.read(table.pieces)
        self._messages = list(pieces.messages())
        self._gather = Gather(pieces, [[(message, 0)] for message in self._messages])
        self._device = tensors[(self._gather.used or [0])[0]].device if len(tensors) else torch.device("cpu")
        slots = [0] * table.engines
        for message in self._messages:
            slots[message.target] = max(slots[message.target], message.nbytes)
        self._ring = RingOwner(rank, slots, self._device, self._rest)
        self.staging_bytes = self._ring.nbytes
        self._session, self._lock = "", threading.Lock()
        self._refused: dict[str, list[tuple[tuple[int, ...], RefitError]]] = {}

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Remember the live tensors; the ring goes on to its next epoch. Returns this rank's part of the message.

        Raises WireError for tensors that are not contiguous.
        """
        self._gather.look(list(tensors), f"{WHERE}, trainer rank {self.rank}", self.addresses)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return msgspec.msgpack.encode(Part(self._ring.begin(), self._table.bucket_bytes, self._table.engines))

    def transfer(self, session: str, info: RingInfo, deadline: float) -> dict[int, int]:
        """Pack every message when its buffer is free. deadline: time.monotonic seconds.

        An engine rank that gives up, or whose engine refuses, is left out from then on; the others get their bytes. Returns bytes
        by engine rank. Raises WireError when an engine rank or trainer rank 0 gave up, DeadlineError when one does not go on.
        """
        epoch = self._ring.info.epoch
        self._session = session
        lead, lost = None, None
        try:
            if self.rank != 0:
                first = next(r for r in info.rings if r.rank == 0)
                lead = RingMapping(first, None, self._rest), first.epoch
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

    def _work(self, side: _Side, deadline: float) -> dict[int, int]:
        sent: dict[int, int] = {}
        shown: dict[int, int] = {}
        for number, message in enumerate(self._messages):
            target, count = message.target, message.tag
            if not side.wait(target, count - RING + 1, deadline, self._where(target)):
                continue
            self._gather.pack(number, self._ring.slot(target, count % RING)[: message.nbytes])
            side.launched(message, launched(self._device))
            shown[target] = count + 1
            sent[target] = sent.get(target, 0) + message.nbytes
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

    def close(self) -> None:
        """Free the ring. Safe to call twice."""
        self._ring.close()
        self._gather.close()


class _Side:
    """What a trainer rank sees in one refit: the words of its own ring, and those of rank 0's. lost: engine ranks that gave up or
    were refused."""

    def __init__(self, words: Words, epoch: int, lead: tuple[RingMapping, int] | None) -> None:
        self._words, self._epoch, self._lead = words, epoch, lead
        self._packing: deque[tuple[Sent, Callable[[], bool]]] = deque()
        self.lost: set[int] = set()

    def launched(self, message: Sent, ended: Callable[[], bool]) -> None:
        """Show a message to its reader once its copies have ended, at the next look."""
        self._packing.append((message, ended))
        self._show()

    def _show(self) -> None:
        while self._packing and self._packing[0][1]():
            message = self._packing.popleft()[0]
            self._words.write(message.target, READY, self._epoch, message.tag + 1)

    def wait(self, target: int, least: int, deadline: float, where: str) -> bool:
        """Wait until an engine rank is done with so many messages; False for a rank that is lost. Raises WireError, DeadlineError
        where the refit ends for all."""
        if target not in self.lost and not self._given_up(target):
            try:
                self._words.wait(target, DONE, least, self._epoch, deadline, where, lambda: self._stops(target))
            except WireError:
                if not self._given_up(target):
                    raise
            else:
                return True
        self.lost.add(target)
        self._words.write(target, REFUSED, self._epoch)
        return False

    def _given_up(self, target: int) -> bool:
        words, epoch = (self._lead[0].words, self._lead[1]) if self._lead is not None else (self._words, self._epoch)
        return self._words.given_up(target, self._epoch) or words.given_up(target, epoch)

    def _stops(self, target: int) -> bool:
        """At every look: show what has been packed, and see whether this rank or all have given up."""
        self._show()
        return self._given_up(target) or (self._lead is not None and self._lead[0].words.stopped(self._lead[1]))


class Part(msgspec.Struct):
    """What a trainer rank sends to rank 0."""

    ring: RingRank
    bucket_bytes: int
    engines: int
