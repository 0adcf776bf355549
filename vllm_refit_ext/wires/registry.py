"""Where published versions stand, and who reads them: the registry, behind four calls.

A trainer puts a version there, engines find it and lease it while they read. The registry holds names, digests, states and
leases; never a byte of a weight and never a table. What an engine needs to read a version (the offer, where memory lies) are
documents, which the publishing ranks serve: an entry says where and what their digests are.

    STAGING    some source rank has not published yet; nobody may read
    READY      all have: set at once, by one write
    RELEASING  who has a lease reads on, nobody gets a new one
    GONE       no entry. What is leased still is revoked; the memory may be written

Engine ranks that hold a version, or read it, have entries of their own (`Replica`), of which others of equal layout copy.

The default is embedded: a torch TCPStore that trainer rank 0 serves. Its keys don't expire by themselves: a lease and a replica's
entry carry the time at which they end unless they are renewed, by the clock of their holder. A clock that is wrong makes a lease
end early, which its holder finds out before its commit, or makes a closer wait longer; it can't make anybody read wrong bytes.
Documents lie in that store too, and go with the entry that names them.
"""

from __future__ import annotations

import abc
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from vllm_refit_ext.core.errors import ConfigError, SessionError, WireError
from vllm_refit_ext.wires.rendezvous import MOST_BYTES, Store, open_store, part_keys

T = TypeVar("T")

VERSIONS = "versions"
NEVER = "-"
"""A value that no key has."""
MAX_LEASES = 1 << 20
"""Leases of one publication, over all of its time."""
LEASE_S = 30.0
"""Seconds after which a lease, or a replica's entry, ends where its holder does not renew it; it does three times meanwhile."""

State = Literal["staging", "ready", "releasing", "gone"]


class Replica(msgspec.Struct, frozen=True):
    """What one engine rank has of a version, in the pieces of `core.pieces`.

    of: epoch of the publication. host: where it is; machine: the kernel that runs there. layout: digest of where which bytes
    lie; the pieces of ranks of equal layout are equal bytes. pieces: how many there are. done: piece -> digest of those that it
    holds. claim: the piece that it reads from elsewhere for all ranks of its host, -1 for none. took: bytes that it read, by
    epoch of the source. info: digest of the document that says how its memory is read.
    """

    of: str
    host: str
    machine: str
    layout: str
    pieces: int
    done: dict[int, str] = {}
    claim: int = -1
    took: dict[str, int] = {}
    info: str = ""


class Entry(msgspec.Struct, frozen=True):
    """A version that was published once, or what an engine rank has of it.

    version: its name. epoch: of this publication; no other has it, so that a restarted trainer's version of the same name is
    another one. wire: how it is read. offer, message: digests of its documents. documents: address of the store that has them.
    publisher: who published it, for errors. number: larger for a newer publication; 0 lets `put` choose. expires: time.time()
    seconds, 0 for never. replica: None for a trainer's.
    """

    version: str
    epoch: str
    state: State
    wire: str
    offer: str = ""
    message: str = ""
    documents: str = ""
    publisher: str = ""
    number: int = 0
    expires: float = 0.0
    replica: Replica | None = None

    @property
    def of(self) -> str:
        """Epoch of the publication whose bytes these are."""
        return self.epoch if self.replica is None else self.replica.of

    @property
    def complete(self) -> bool:
        """Whether all of the version can be read here."""
        return self.state == "ready" and (self.replica is None or len(self.replica.done) == self.replica.pieces)


class Registry(abc.ABC):
    """Four calls, each at most until its deadline (time.monotonic seconds). An entry is changed by its publisher alone; leases by
    their holders, and by the publisher when it is gone.

    All raise WireError when the registry can't be reached and DeadlineError when it does not answer; the next call connects anew.
    """

    @abc.abstractmethod
    def put(self, entry: Entry, deadline: float) -> None:
        """Add an entry, or replace the one of its epoch, in one write. GONE removes it together with its leases and documents.

        Raises SessionError when another publication that is not gone has its version's name, and when a replica claims a piece
        that another one of its host and layout has or claims.
        """

    @abc.abstractmethod
    def entries(self, deadline: float) -> list[Entry]:
        """All entries that have not expired, in the order in which their epochs were put first."""

    @abc.abstractmethod
    def lease(self, epoch: str, holder: str, deadline: float, held: bool = True) -> None:
        """Take or renew a lease, or give it back (held False; never raises for a lease that is not there). It ends by itself
        `LEASE_S` seconds later.

        Of a version that is not READY no lease is given, and none renewed once it is gone: SessionError. Whoever sees RELEASING
        or GONE after it put a state there sees every lease that was given before.
        """

    @abc.abstractmethod
    def leases(self, epoch: str, deadline: float) -> list[str]:
        """Holders of leases that were not given back and have not ended."""


_stores: dict[str, Store] = {}
"""Connections of this process by address: all registries and documents at one address share one, for connecting takes longer than
most calls. torch's store lets its threads take turns."""
os.register_at_fork(after_in_child=_stores.clear)


class Connection:
    """A store at `address` (host:port). A call that fails drops the connection, and the next one makes another."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a text that is no address. Nothing is connected yet."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            do = "pass the address that the sender's `registry` says"
            raise ConfigError("not the address of a registry", where="registry", got=address[:120], wanted="host:port", do=do)
        self.address, self._host, self._port = address, host.strip("[]"), int(port)

    def call(self, work: Callable[[Store], T], deadline: float) -> T:
        """`work(store)`, which must bear being done twice: a connection may be found to be gone in it, and is made anew once.

        Raises WireError, DeadlineError.
        """
        known = _stores.get(self.address)
        store = known
        if store is None:
            store = _stores[self.address] = _Store(self._host, self._port, deadline)
        try:
            return work(store)
        except WireError:
            if not store.lost or known is None:
                raise
        finally:
            if store.lost and _stores.get(self.address) is store:  # another thread may have another one already
                del _stores[self.address]
        return self.call(work, deadline)


class StoreRegistry(Registry):
    """The registry in a torch TCPStore. Its keys: the list of entries under one name, and for each epoch a counter, the
    holders by number, and a key for each lease that is held.

    A lease's key is written before its state is read, and a state is put before the leases are read; so of a lease that is taken
    while its version is released either the publisher sees the lease, or the holder sees the state and gives it up.
    """

    def __init__(self, address: str) -> None:
        """address: host:port, as `serve` returned it. Raises ConfigError."""
        self.connection = Connection(address)
        self._slots: dict[tuple[str, str], int] = {}

    def put(self, entry: Entry, deadline: float) -> None:
        def work(store: Any) -> None:
            while True:
                raw = bytes(store.get(VERSIONS))
                known = _read(raw)
                changed = msgspec.json.encode(_changed(known, entry))
                if bytes(store.compare_set(VERSIONS, raw, changed)) == changed:
                    break
            gone = [e for e in known if not _lives(e) and e.epoch != entry.epoch]
            if entry.state == "gone":
                gone += [entry, *(e for e in known if e.epoch == entry.epoch)]
            for each in gone:
                _clear(store, each)

        self.connection.call(lambda store: store.call(work, deadline), deadline)

    def entries(self, deadline: float) -> list[Entry]:
        return self.connection.call(lambda store: store.call(_entries, deadline), deadline)

    def lease(self, epoch: str, holder: str, deadline: float, held: bool = True) -> None:
        def work(store: Any) -> str:
            if not held:
                store.delete_key(_key(epoch, self._slots.pop((epoch, holder), 0)))
                return "ready"
            renewed = (epoch, holder) in self._slots
            if not renewed:
                self._slots[epoch, holder] = store.add(_count(epoch), 1)
                store.set(_holder(epoch, self._slots[epoch, holder]), holder)
            slot = self._slots[epoch, holder]
            if renewed and not store.check([_key(epoch, slot)]):
                return "gone"
            store.set(_key(epoch, slot), repr(time.time() + LEASE_S))
            state = next((e.state for e in _entries(store) if e.epoch == epoch), "gone")
            if state != "ready" and not (renewed and state == "releasing"):
                store.delete_key(_key(epoch, self._slots.pop((epoch, holder))))
                if state == "gone":  # its publisher may have cleared up before
                    store.delete_key(_holder(epoch, slot))
                    store.delete_key(_count(epoch))
                return state
            return "ready"

        state = self.connection.call(lambda store: store.call(work, deadline), deadline)
        if state != "ready":
            do = "take the latest version"
            raise SessionError("the version can't be leased", where="registry", got=state, wanted="ready", do=do)

    def leases(self, epoch: str, deadline: float) -> list[str]:
        def work(store: Any) -> list[str]:
            held = [slot for slot in _slots(store, epoch) if _ends(store, epoch, slot) > time.time()]
            return [_peek(store, _holder(epoch, slot)) for slot in held]

        return self.connection.call(lambda store: store.call(work, deadline), deadline)


class Documents:
    """What publishing ranks serve to engines, by digest: sha256 in hexadecimal digits."""

    def __init__(self, address: str, epoch: str = "") -> None:
        """address: of the store, host:port. epoch: of the entry that the documents belong to. Raises ConfigError."""
        self._connection, self._epoch = Connection(address), epoch

    def put(self, document: bytes, deadline: float) -> str:
        """Serve `document`; its digest. Raises ConfigError for one that is too large."""
        if len(document) > MOST_BYTES:
            raise ConfigError("a document is too large", where="registry", got=len(document), wanted=f"{MOST_BYTES} bytes")
        digest = hashlib.sha256(document).hexdigest()
        self._connection.call(lambda store: store.put(_document(self._epoch, digest), document, deadline), deadline)
        return digest

    def get(self, digest: str, deadline: float) -> bytes:
        """The document. Raises WireError when it is not there, or is another one."""
        document = self._connection.call(lambda store: store.take(_document(self._epoch, digest), deadline), deadline)
        if hashlib.sha256(document).hexdigest() != digest:
            raise WireError("a document is not what its entry says", where="registry", wanted=f"sha256 {digest[:16]}")
        return document


class _Store(Store):
    @property
    def _where(self) -> str:
        return f"registry at {self.host}:{self.port}"


def serve(port: int = 0) -> tuple[str, Any]:
    """Serve an empty registry from this process: its address, and the store, which must be kept. port: 0 lets the kernel choose.

    The host is that of `rendezvous.open_store`. Raises WireError when the port is taken or the address is not of this host.
    """
    host, port, store = open_store("registry", port)
    store.set(VERSIONS, b"[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", store


def find(entries: list[Entry], version: str, latest: bool = False, layout: str = "") -> Entry | None:
    """The READY entry of `version`, or with `latest` the newest one that is READY; None where nothing is. layout: of the rank
    that asks, once it is known. A replica's entry where the trainer's is no longer there: a whole one, of that layout.

    Raises SessionError for a named version that can't be read, saying what there is.
    """
    ready = [e for e in entries if e.complete and (e.replica is None or layout in ("", e.replica.layout))]
    newest = max((e for e in ready if latest or e.version == version), key=lambda e: (e.number, e.replica is None), default=None)
    if newest is None and not latest:
        state = next((e.state for e in entries if e.version == version and e.replica is None), "not published, or gone")
        names = dict.fromkeys(e.version for e in ready)
        wanted = "ready; the registry has " + (", ".join(map(repr, names)) or "none")
        do = "take one of these, or 'latest'"
        raise SessionError("the version can't be read", where=f"version {version!r}", got=state, wanted=wanted, do=do)
    return newest


def wait_for_leases(registry: Registry, epoch: str, deadline: float, poll_s: float = 0.01) -> list[str]:
    """Wait until no lease of `epoch` is left, until `deadline` at most. Returns the holders of those that are."""
    while holders := registry.leases(epoch, max(deadline, time.monotonic() + 5.0)):
        if time.monotonic() >= deadline:
            break
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
    return holders


def _changed(known: list[Entry], entry: Entry) -> list[Entry]:
    """The list with `entry` put in, without those that have expired."""
    living = [e for e in known if _lives(e) or e.epoch == entry.epoch]
    index = next((i for i, e in enumerate(living) if e.epoch == entry.epoch), len(living))
    rest = [*living[:index], *living[index + 1 :]]
    if entry.state == "gone":
        return rest
    if (mine := entry.replica) is None:
        other = next((e for e in rest if e.version == entry.version and e.replica is None), None)
        if other is not None:
            do = "close that publication, or publish under another name"
            where, got = f"version {entry.version!r}", f"{other.state}, published by {other.publisher}"
            raise SessionError("the registry has a version of this name already", where=where, got=got, do=do)
    elif mine.claim >= 0:
        near = [r for e in rest if (r := e.replica) and (r.of, r.host, r.layout) == (mine.of, mine.host, mine.layout)]
        if any(mine.claim == r.claim or mine.claim in r.done for r in near):
            raise SessionError("another rank of this host reads this piece", where=f"version {entry.version!r}", got=mine.claim)
    number = entry.number or next((e.number for e in living[index : index + 1]), 0)
    number = number or 1 + max((e.number for e in rest), default=0)
    return [*living[:index], msgspec.structs.replace(entry, number=number), *living[index + 1 :]]


def _lives(entry: Entry) -> bool:
    return not entry.expires or time.time() < entry.expires


def _clear(store: Any, entry: Entry) -> None:
    """Remove what belongs to an entry: leases and documents."""
    for slot in _slots(store, entry.epoch):
        store.delete_key(_key(entry.epoch, slot))
        store.delete_key(_holder(entry.epoch, slot))
    store.delete_key(_count(entry.epoch))
    for digest in filter(None, (entry.offer, entry.message, entry.replica.info if entry.replica else "")):
        key = _document(entry.epoch, digest)
        if store.check([key]):
            for name in (key, *part_keys(store, key)):
                store.delete_key(name)


def _entries(store: Any) -> list[Entry]:
    return [e for e in _read(bytes(store.get(VERSIONS))) if _lives(e)]


def _read(raw: bytes) -> list[Entry]:
    """The list of entries. Raises WireError for one that can't be read, as another program might leave it."""
    try:
        return msgspec.json.decode(raw, type=list[Entry])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("the registry's entries can't be read", where="registry", got=str(error)[:200]) from None


def _slots(store: Any, epoch: str) -> range:
    """Numbers of the leases that an epoch ever had. Raises WireError where there can't be so many."""
    count = int(store.add(_count(epoch), 0))
    if count > MAX_LEASES:
        raise WireError("the registry counts more leases than there can be", where="registry", got=count, wanted=MAX_LEASES)
    return range(1, count + 1)


def _ends(store: Any, epoch: str, slot: int) -> float:
    """When a lease ends, in time.time() seconds; 0 where it is not there or says nothing that can be read."""
    try:
        return float(_peek(store, _key(epoch, slot)) or 0)
    except ValueError:
        return 0.0


def _peek(store: Any, key: str) -> str:
    """The value of a key, empty where it is not there: a `get` would wait for a key that was deleted meanwhile."""
    value = bytes(store.compare_set(key, NEVER, NEVER)).decode(errors="replace")
    return "" if value == NEVER else value


def _document(epoch: str, digest: str) -> str:
    return f"document/{epoch}/{digest}"


def _count(epoch: str) -> str:
    return f"leases/{epoch}"


def _key(epoch: str, slot: int) -> str:
    return f"lease/{epoch}/{slot}"


def _holder(epoch: str, slot: int) -> str:
    return f"holder/{epoch}/{slot}"
