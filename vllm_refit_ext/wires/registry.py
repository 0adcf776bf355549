"""Where published versions stand, and who reads them: the registry, behind four calls.

A trainer puts a version there, engines find it and lease it while they read. The registry holds names, digests, states and
leases; never a byte of a weight and never a table. What an engine needs to read a version (the offer, where memory lies) are
documents, which the publishing ranks serve: an entry says where and what their digests are.

    STAGING    some source rank has not published yet; nobody may read
    READY      all have: set at once, by one write
    RELEASING  who has a lease reads on, nobody gets a new one
    GONE       no entry. What is leased still is revoked; the memory may be written

The default is embedded: a torch TCPStore that trainer rank 0 serves. Its keys don't expire, and need not: a lease ends with its
version, so one that a dead engine left is revoked when the trainer closes the version. Documents lie in that store too, as rank 0
is a publishing rank: an offer and a message for each version, dropped with it.
"""

from __future__ import annotations

import abc
import hashlib
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from vllm_refit_ext.core.errors import ConfigError, DeadlineError, SessionError, WireError
from vllm_refit_ext.wires.rendezvous import Store, open_store

T = TypeVar("T")

VERSIONS = "versions"
DOCUMENT_BYTES = 1 << 30
"""The largest document that is served. The offer of a model of 1T parameters is a tenth of it."""

State = Literal["staging", "ready", "releasing", "gone"]


class Entry(msgspec.Struct, frozen=True):
    """A version that was published once.

    version: its name. epoch: of this publication; no other has it, so that a restarted trainer's version of the same name is
    another one. wire: how it is read. offer, message: digests of its documents. documents: address of the store that has them.
    publisher: who published it, for errors.
    """

    version: str
    epoch: str
    state: State
    wire: str
    offer: str = ""
    message: str = ""
    documents: str = ""
    publisher: str = ""


class Registry(abc.ABC):
    """Four calls, each at most until its deadline (time.monotonic seconds). An entry is changed by its publisher alone; leases by
    their holders, and by the publisher when it is gone.

    All raise WireError when the registry can't be reached and DeadlineError when it does not answer; the next call connects anew.
    """

    @abc.abstractmethod
    def put(self, entry: Entry, deadline: float) -> None:
        """Add an entry, or replace the one of its epoch, in one write. GONE removes it together with its leases.

        Raises SessionError when another epoch that is not gone has its version's name.
        """

    @abc.abstractmethod
    def entries(self, deadline: float) -> list[Entry]:
        """All entries, in the order in which their epochs were put first."""

    @abc.abstractmethod
    def lease(self, epoch: str, holder: str, deadline: float, held: bool = True) -> None:
        """Take a lease, or give it back (held False; never raises for a lease that is not there).

        Of a version that is not READY no lease is given: SessionError. Whoever sees RELEASING or GONE after it put a state there
        sees every lease that was given before.
        """

    @abc.abstractmethod
    def leases(self, epoch: str, deadline: float) -> list[str]:
        """Holders of leases that were not given back."""


class Connection:
    """A store at `address` (host:port). A call that fails drops the connection, and the next one makes another."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for a text that is no address. Nothing is connected yet."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            do = "pass the address that the sender's `registry` says"
            raise ConfigError("not the address of a registry", where="registry", got=address[:120], wanted="host:port", do=do)
        self.address, self._host, self._port = address, host.strip("[]"), int(port)
        self._store: Store | None = None

    def call(self, work: Callable[[Store], T], deadline: float) -> T:
        """`work(store)`. Raises WireError, DeadlineError."""
        try:
            if self._store is None:
                self._store = _Store(self._host, self._port, deadline)
            return work(self._store)
        except (WireError, DeadlineError):
            self._store = None
            raise


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
        def change(known: list[Entry]) -> list[Entry]:
            index = next((i for i, e in enumerate(known) if e.epoch == entry.epoch), len(known))
            other = next((e for e in known if e.version == entry.version and e.epoch != entry.epoch), None)
            if other is not None and entry.state != "gone":
                do = "close that publication, or publish under another name"
                where, got = f"version {entry.version!r}", f"{other.state}, published by {other.publisher}"
                raise SessionError("the registry has a version of this name already", where=where, got=got, do=do)
            return [*known[:index], *([] if entry.state == "gone" else [entry]), *known[index + 1 :]]

        def work(store: Any) -> None:
            while True:
                raw = bytes(store.get(VERSIONS))
                changed = msgspec.json.encode(change(msgspec.json.decode(raw, type=list[Entry])))
                if bytes(store.compare_set(VERSIONS, raw, changed)) == changed:
                    break
            if entry.state == "gone":
                count = store.add(_count(entry.epoch), 0)
                for slot in range(1, count + 1):
                    store.delete_key(_key(entry.epoch, slot))
                    store.delete_key(_holder(entry.epoch, slot))
                store.delete_key(_count(entry.epoch))

        self.connection.call(lambda store: store.call(work, deadline), deadline)

    def entries(self, deadline: float) -> list[Entry]:
        return self.connection.call(lambda store: store.call(_entries, deadline), deadline)

    def lease(self, epoch: str, holder: str, deadline: float, held: bool = True) -> None:
        def work(store: Any) -> str:
            if not held:
                store.delete_key(_key(epoch, self._slots.pop((epoch, holder), 0)))
                return "ready"
            slot = self._slots[epoch, holder] = store.add(_count(epoch), 1)
            store.set(_holder(epoch, slot), holder)
            store.set(_key(epoch, slot), "")
            state = next((e.state for e in _entries(store) if e.epoch == epoch), "gone")
            if state != "ready":
                store.delete_key(_key(epoch, self._slots.pop((epoch, holder))))
                if state == "gone":  # its publisher may have cleared up before
                    store.delete_key(_holder(epoch, slot))
                    store.delete_key(_count(epoch))
            return state

        state = self.connection.call(lambda store: store.call(work, deadline), deadline)
        if state != "ready":
            do = "take the latest version"
            raise SessionError("the version can't be leased", where="registry", got=state, wanted="ready", do=do)

    def leases(self, epoch: str, deadline: float) -> list[str]:
        def work(store: Any) -> list[str]:
            slots = range(1, store.add(_count(epoch), 0) + 1)
            return [bytes(store.get(_holder(epoch, slot))).decode() for slot in slots if store.check([_key(epoch, slot)])]

        return self.connection.call(lambda store: store.call(work, deadline), deadline)


class Documents:
    """What publishing ranks serve to engines, by digest: sha256 in hexadecimal digits."""

    def __init__(self, address: str) -> None:
        """address: of the store, host:port. Raises ConfigError."""
        self._connection = Connection(address)

    def put(self, document: bytes, deadline: float) -> str:
        """Serve `document`; its digest. Raises ConfigError for one that is too large."""
        if len(document) > DOCUMENT_BYTES:
            raise ConfigError("a document is too large", where="registry", got=len(document), wanted=f"{DOCUMENT_BYTES} bytes")
        digest = hashlib.sha256(document).hexdigest()
        self._connection.call(lambda store: store.put(f"document/{digest}", document, deadline), deadline)
        return digest

    def get(self, digest: str, deadline: float) -> bytes:
        """The document. Raises WireError when it is not there, or is another one."""
        document = self._connection.call(lambda store: store.take(f"document/{digest}", deadline), deadline)
        if hashlib.sha256(document).hexdigest() != digest:
            raise WireError("a document is not what its entry says", where="registry", wanted=f"sha256 {digest[:16]}")
        return document

    def drop(self, digest: str, deadline: float) -> None:
        """Serve it no longer."""

        def work(store: Any) -> None:
            key = f"document/{digest}"
            if store.check([key]):
                for name in (key, *(f"{key}/{i}" for i in range(int(store.get(key))))):
                    store.delete_key(name)

        self._connection.call(lambda store: store.call(work, deadline), deadline)


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


def find(entries: list[Entry], version: str, latest: bool = False) -> Entry | None:
    """The READY entry of `version`, or with `latest` the newest one that is READY; None where nothing is.

    Raises SessionError for a named version that can't be read, saying what there is.
    """
    ready = [e for e in entries if e.state == "ready"]
    if latest:
        return ready[-1] if ready else None
    found = next((e for e in ready if e.version == version), None)
    if found is None:
        state = next((e.state for e in entries if e.version == version), "not published, or gone")
        wanted = "ready; the registry has " + (", ".join(repr(e.version) for e in ready) or "none")
        do = "take one of these, or 'latest'"
        raise SessionError("the version can't be read", where=f"version {version!r}", got=state, wanted=wanted, do=do)
    return found


def wait_for_leases(registry: Registry, epoch: str, deadline: float, poll_s: float = 0.01) -> list[str]:
    """Wait until no lease of `epoch` is left, until `deadline` at most. Returns the holders of those that are."""
    while holders := registry.leases(epoch, max(deadline, time.monotonic() + 5.0)):
        if time.monotonic() >= deadline:
            break
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
    return holders


def _entries(store: Any) -> list[Entry]:
    try:
        return msgspec.json.decode(bytes(store.get(VERSIONS)), type=list[Entry])
    except msgspec.MsgspecError as error:
        raise WireError("the registry's entries can't be read", where="registry", got=error) from None


def _count(epoch: str) -> str:
    return f"leases/{epoch}"


def _key(epoch: str, slot: int) -> str:
    return f"lease/{epoch}/{slot}"


def _holder(epoch: str, slot: int) -> str:
    return f"holder/{epoch}/{slot}"
