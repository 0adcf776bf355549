"""Replicas: an engine rank copies a version from ranks that have it, and hands on what it has.

A rank that hands on (`Source`) has an entry in the registry and makes its final bytes readable by a one-sided wire, piece by
piece as it gets them. Before anything else is written there, it ends the leases on it. A rank that reads (`PiecesReader`) takes
each piece from the trainer or from such ranks, as `core.pieces.next_step` says; a piece that it copied has the digest that its
source says, or it is taken again from another one.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch

from vllm_refit_ext.core.errors import DeadlineError, RefitError, SessionError, WireError
from vllm_refit_ext.core.hosts import Hosts, machine, this_host
from vllm_refit_ext.core.messages import UpdateInfo, WireName, decoded
from vllm_refit_ext.core.pieces import Peer, Step, given_by, next_step
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.receiver.final import Final
from vllm_refit_ext.wires import Reader, Sender, release, wire
from vllm_refit_ext.wires import registry as registries
from vllm_refit_ext.wires.boxes import Memory
from vllm_refit_ext.wires.leases import CALL_S, Leases
from vllm_refit_ext.wires.registry import Documents, Entry, Replica, StoreRegistry, wait_for_leases

GRACE_S = 2.0
"""Seconds that readers of a rank have to finish, before it begins a refit of its own."""
POLL_S = 0.005
LOCAL = ("shm", "ipc")
"""Wires that reach memory of the same machine only."""
STALL_S = 2.0
"""Seconds that a rank waits for a piece that another one of its host claims, before it reads that piece itself."""


class Source:
    """One rank's entry, and the memory that it makes readable. Its calls may come from the engine's loop and, to renew the entry,
    from a thread."""

    def __init__(self, address: str, wire_name: WireName, final: Final, publisher: str) -> None:
        """Makes room where the wire copies. Raises WireError where the rank's memory can't be made readable."""
        self.address, self.wire, self.final, self._publisher = address, wire_name, final, publisher
        self._registry = StoreRegistry(address)
        module = wire(wire_name)
        (share,) = module.send_tables(final.plan, Hosts.single(1, 1))
        self._sender: Sender = module.open_sender(0, share, final.tensors)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.entry: Entry | None = None
        self._beat: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Memory beside the weights."""
        return self._sender.copied

    def open(self, origin: Entry, documents: dict[str, bytes], deadline: float) -> None:
        """Have an entry of the version that `origin` is of, with nothing of it yet. documents: `offer` and `message`, on the rank
        whose entry is found; elsewhere none. Raises WireError, DeadlineError."""
        epoch = secrets.token_hex(8)
        self._sender.only = []
        self._sender.forget()
        part = self._sender.begin(self.final.tensors)
        self._sender.only = None
        fields: dict[str, Any] = {self.wire: wire(self.wire).info([part])}
        update = UpdateInfo(wire=self.wire, version=origin.version, session=epoch, **fields)
        served = Documents(self.address, epoch)
        digests = {name: served.put(document, deadline) for name, document in documents.items()}
        replica = Replica(
            of=origin.of,
            host=this_host(),
            machine=machine(),
            layout=self.final.layout,
            pieces=self.final.pieces,
            info=served.put(msgspec.msgpack.encode(update), deadline),
        )
        self.entry = Entry(
            origin.version,
            epoch,
            "ready",
            self.wire,
            documents=self.address,
            publisher=self._publisher,
            number=origin.number,
            replica=replica,
            offer=digests.get("offer", ""),
            message=digests.get("message", ""),
        )
        self._put(deadline)
        if self._beat is None:
            self._beat = threading.Thread(target=self._renew, name="refit-replica", daemon=True)
            self._beat.start()

    def _put(self, deadline: float, **changes: Any) -> None:
        with self._lock:
            if self.entry is not None and self.entry.replica is not None:
                replica = msgspec.structs.replace(self.entry.replica, **changes)
                expires = time.time() + registries.LEASE_S
                entry = msgspec.structs.replace(self.entry, replica=replica, expires=expires)
                self._registry.put(entry, deadline)
                self.entry = entry

    def _renew(self) -> None:
        while not self._stop.wait(registries.LEASE_S / 3):
            with contextlib.suppress(RefitError):
                self._put(time.monotonic() + CALL_S)

    def claim(self, piece: int, deadline: float) -> bool:
        """Say that this rank reads a piece for its host; False where another one does."""
        try:
            self._put(deadline, claim=piece)
        except SessionError:
            return False
        return True

    def have(self, piece: int, digest: str, took: dict[str, int], deadline: float) -> None:
        """A piece is there: readers may copy it."""
        self._sender.more({i: self.final.tensors[i] for i in self.final.of_piece(piece)})
        if self.entry is not None and self.entry.replica is not None:
            self._put(deadline, claim=-1, done=self.entry.replica.done | {piece: digest}, took=dict(took))

    def end(self) -> None:
        """Before the memory is written again: no new leases, a moment for those there are, then none. Never raises."""
        with self._lock:
            entry, self.entry = self.entry, None
            if entry is None:
                return
            with contextlib.suppress(RefitError):
                soon = time.monotonic() + GRACE_S
                self._registry.put(msgspec.structs.replace(entry, state="releasing"), soon)
                wait_for_leases(self._registry, entry.epoch, soon)
            self._sender.end()
            with contextlib.suppress(RefitError):
                self._registry.put(msgspec.structs.replace(entry, state="gone"), time.monotonic() + GRACE_S)

    def close(self) -> None:
        """Hand on no more, and give back what the wire holds."""
        self._stop.set()
        self.end()
        self._sender.close()


class PiecesReader(Reader):
    """Reads a version piece by piece. `received`: bytes by trainer rank. `forwarded`: bytes by engine rank that they were
    copied of, as errors name it."""

    received: dict[int, int]
    forwarded: dict[str, int]

    def __init__(
        self,
        origin: Entry,
        plan: Plan,
        final: Final,
        trainer: Reader | None,
        source: Source | None,
        documents: dict[str, bytes],
        leases: Leases,
    ) -> None:
        """origin: what was found of the version. plan: all of this rank's moves. trainer: reads what the trainer published; None
        where that can't be read. source, documents: of this rank, if it hands on."""
        self.whole, self._final, self._origin, self._trainer, self._documents = plan, final, origin, trainer, documents
        self._source, self._leases = source, leases
        self._registry = StoreRegistry(origin.documents)
        self._deadline = time.monotonic() + CALL_S
        self._peers: dict[str, tuple[Entry, dict[str, Any], UpdateInfo]] = {}
        self._bad: dict[str, str] = {}
        self._done: dict[int, str] = {}
        self._took: dict[str, int] = {}
        self._now: Memory | None = self._trainer
        self._failed: list[RefitError] = []
        self.received, self.forwarded = {}, {}
        self.steps = self._steps()

    def start(self, deadline: float) -> None:
        self._deadline = deadline
        if self._source is not None:
            self._source.open(self._origin, self._documents, deadline)

    # -- what a writer asks --------------------------------------------------------------------------------------------------

    def memory(self, buffer: int) -> torch.Tensor:
        assert self._now is not None
        return self._now.memory(buffer)

    def address(self, buffer: int) -> int | None:
        assert self._now is not None
        return self._now.address(buffer)

    @property
    def token(self) -> object:  # type: ignore[override]
        return self._now.token if self._now is not None else None

    # -- the steps -----------------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Plan]:
        waited = time.monotonic()
        first = secrets.randbelow(max(self._final.pieces, 1))
        while len(self._done) < self._final.pieces:
            if time.monotonic() > self._deadline:
                raise DeadlineError("the version did not come in time", where=self._where, got=self._lacking())
            entries = self._entries()
            step = self._next(entries, first, time.monotonic() - waited > STALL_S)
            if step is None:
                if not self._others(entries):
                    raise WireError.of(
                        [p for e in self._failed for p in e.problems]
                        or WireError("nobody has the version any more", where=self._where, got=self._lacking()).problems
                    )
                time.sleep(POLL_S)
                continue
            if step.claimed and self._source is not None and not self._source.claim(step.piece, self._deadline):
                continue
            try:
                yield from self._from_peers(step, entries) if step.sources else self._from_trainer(step.piece)
            except _AgainError as error:
                self._failed.append(error.why)
                continue
            digest = self._final.digest_of(step.piece)
            if self._differs(step, digest, entries):
                continue
            self._done[step.piece] = digest
            if self._source is not None:
                self._source.have(step.piece, digest, self._took, self._deadline)
            waited = time.monotonic()

    @property
    def _where(self) -> str:
        return f"version {self._origin.version!r}"

    def _lacking(self) -> str:
        return f"{len(self._done)} of {self._final.pieces} pieces"

    def _entries(self) -> dict[str, Entry]:
        """What others have of the version, by epoch, without those that failed here."""
        mine = self._source.entry.epoch if self._source is not None and self._source.entry is not None else ""
        known = self._registry.entries(min(self._deadline, time.monotonic() + CALL_S))
        return {
            e.epoch: e
            for e in known
            if e.state == "ready"
            and e.epoch != mine
            and e.epoch not in self._bad
            and (r := e.replica) is not None
            and (r.of, r.layout, r.pieces) == (self._origin.of, self._final.layout, self._final.pieces)
            and (e.wire not in LOCAL or r.machine == machine())
        }

    def _others(self, entries: dict[str, Entry]) -> bool:
        """Whether somebody reads what is lacking here."""
        return any(r.claim >= 0 for e in entries.values() if (r := e.replica) is not None)

    def _next(self, entries: dict[str, Entry], first: int, stalled: bool) -> Step | None:
        here = this_host()
        found = [(e.epoch, r) for e in entries.values() if (r := e.replica) is not None]
        given = given_by([*(r.took for _, r in found), self._took])
        peers = [Peer(epoch, r.host == here, r.done, r.claim, given.get(epoch, 0)) for epoch, r in found]
        trainer = self._trainer is not None
        # Ranks that begin together begin with other pieces each: by their place among those of the host.
        place = sum(1 for p in peers if p.near)
        start = place * self._final.pieces // (place + 1) if place else first
        shares = self._source is not None
        return next_step(self._final.pieces, self._done, peers, trainer, given.get(self._origin.of, 0), start, shares, stalled)

    def _from_trainer(self, piece: int) -> Iterator[Plan]:
        reader = self._trainer
        assert reader is not None
        plan, self._now = self._final.from_trainer(piece), reader
        yield plan
        self._final.settle(plan)
        try:
            reader.confirm()
        except RefitError as error:
            self._trainer = None
            raise _AgainError(error) from None
        for edge in plan.edges():
            self.received[edge.source] = self.received.get(edge.source, 0) + edge.nbytes
            self._took[self._origin.of] = self._took.get(self._origin.of, 0) + edge.nbytes

    def _from_peers(self, step: Step, entries: dict[str, Entry]) -> Iterator[Plan]:
        """Copy a piece in equal parts of all that have it."""
        plans = self._final.from_peers(step.piece, len(step.sources))
        turn = step.piece % len(plans)
        for plan, epoch in zip([*plans[turn:], *plans[:turn]], step.sources, strict=True):
            if not len(plan):
                continue
            entry = entries[epoch]
            reader: Reader | None = None
            try:
                try:
                    reader = self._open(entry, plan)
                    self._now = reader
                    yield plan
                    self._final.settle(plan)
                    reader.confirm()
                finally:
                    if reader is not None:
                        reader.close()
            except RefitError as error:
                self._bad[epoch] = str(error)
                raise _AgainError(error) from None
            nbytes = int(plan.nbytes.sum())
            self.forwarded[entry.publisher] = self.forwarded.get(entry.publisher, 0) + nbytes
            self._took[epoch] = self._took.get(epoch, 0) + nbytes

    def _open(self, entry: Entry, plan: Plan) -> Reader:
        """Lease a rank's bytes and map them."""
        if entry.epoch not in self._peers:
            self._leases.take(entry.epoch, min(self._deadline, time.monotonic() + CALL_S))
            replica = entry.replica
            assert replica is not None
            raw = Documents(entry.documents, entry.epoch).get(replica.info, min(self._deadline, time.monotonic() + CALL_S))
            update = memory_of(entry, raw)
            self._peers[entry.epoch] = entry, {}, update
        _, kept, update = self._peers[entry.epoch]
        return wire(update.wire).open_reader(update, plan, kept)

    def _differs(self, step: Step, digest: str, entries: dict[str, Entry]) -> bool:
        """Whether a copied piece has not the digest that its sources say; these are not asked again then."""
        wrong = []
        for epoch in step.sources:
            replica = entries[epoch].replica
            if replica is not None and replica.done.get(step.piece) != digest:
                wrong.append(entries[epoch])
        for entry in wrong:
            self._bad[entry.epoch] = "other bytes than it says"
            what = "a piece that was copied has another digest than its source says"
            self._failed.append(WireError(what, where=entry.publisher, got=digest[:16]))
        return bool(wrong)

    def confirm(self) -> None:
        """Each piece was confirmed when it was read."""

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        for _, kept, _ in self._peers.values():
            release(kept)
        self._peers = {}


class _AgainError(Exception):
    """A piece has to be taken again, from somebody else."""

    def __init__(self, why: RefitError) -> None:
        super().__init__(str(why))
        self.why = why


def memory_of(entry: Entry, raw: bytes) -> UpdateInfo:
    """Where a replica says that its bytes lie. Raises WireError for what can't be read, and for another wire than its entry's."""
    update = decoded(UpdateInfo, raw, entry.publisher, "what it says of its memory can't be read")
    if update.wire != entry.wire or entry.wire not in LOCAL:
        wanted = f"{entry.wire}, one of {', '.join(LOCAL)}"
        raise WireError("a replica names a wire that is not its entry's", where=entry.publisher, got=update.wire, wanted=wanted)
    return update


def holders(entries: Iterable[Entry], of: str, layout: str) -> bool:
    """Whether some rank of this layout has a part of a publication."""
    return any(e.replica is not None and (e.replica.of, e.replica.layout) == (of, layout) and e.replica.done for e in entries)
