"""Taking: an engine finds a published version in the registry and refits itself from it, without a call of the trainer.

Rank 0 speaks with the registry and hands what it found to the others, so that all ranks take the same version. The rest is a
refit as any other: the same message, the same agreements, the same outcomes. Two things are added. The engine prepares by itself
from the publisher's offer, once: again only when the offer's digest is another one, which a trainer that restarts with new
handles does not change. And it holds a lease while it reads, which is checked after the last byte was read and before the commit.
Where the registry does not answer then, the mark in the publisher's memory decides, which every rank reads for itself
(`wires.Sender.end`): a registry that dies can't tear an engine that has read all it needs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from vllm_refit_ext.core.coverage import check_consumed, unread_parts
from vllm_refit_ext.core.errors import ConfigError, DeadlineError, PlanError, SessionError, WireError
from vllm_refit_ext.core.manifest import Manifest
from vllm_refit_ext.core.messages import Published, UpdateInfo, decoded
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.table import PackedPlacements, pack_placements, unpack_placements
from vllm_refit_ext.wires.leases import Leases
from vllm_refit_ext.wires.registry import Documents, Entry, StoreRegistry, find

LATEST = "latest"
COPIED_BY = ("shm", "ipc")
"""Wires by which engines copy from each other."""
CHECK_S = 5.0
"""Seconds that the registry has to say that a lease still stands, and to take it back."""
RETRY_S = 0.02
"""Pause before another look for the latest version, where the one that was found could not be leased any more."""


class Leased(msgspec.Struct, frozen=True):
    """A version that this engine has a lease on. message: a `Published`. session: of this attempt."""

    entry: Entry
    message: bytes
    session: str

    def update(self, deadline_s: float, caches: Any) -> tuple[UpdateInfo, Published]:
        """The argument of `update_weights`, and the rest of the publisher's message. Raises WireError where it can't be read."""
        published = decoded(Published, self.message, self.where, "the publisher's message can't be read")
        update = msgspec.structs.replace(published.update, session=self.session, deadline_s=deadline_s, caches=caches)
        if update.version != self.entry.version or (self.entry.replica is None and update.wire != self.entry.wire):
            got = f"version {update.version!r} by wire {update.wire}"
            raise WireError("the publisher's message is of another version", where=self.where, got=got)
        return update, published

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"version {self.entry.version!r}"


class Versions:
    """One engine's connection to a registry. No call waits beyond its deadline (time.monotonic seconds)."""

    def __init__(self, address: str) -> None:
        """address: of the registry, host:port. Raises ConfigError; nothing is connected yet."""
        self.address = address
        self.registry = StoreRegistry(address)
        self._leases: dict[str, Leases] = {}
        self.holder = f"{platform.node()}, process {os.getpid()}, {secrets.token_hex(4)}"

    def lease(self, version: str, served: str, deadline: float, layout: str = "") -> Leased | None:
        """Find a version and lease it. version: its name, or `latest` for the newest that is READY. served: the epoch of the
        publication that this engine serves. layout: of this rank, see `wires.registry.find`. None where the newest is that one,
        or nothing is READY; a version that is named is leased again.

        Raises SessionError for a named version that can't be read, WireError, DeadlineError.
        """
        while True:
            entry = find(self.registry.entries(deadline), version, version == LATEST, layout)
            if entry is None or (version == LATEST and entry.of == served):
                return None
            leases = Leases(self.address, self.holder)
            try:
                leases.take(entry.epoch, deadline)
            except SessionError:
                if version != LATEST or time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)  # released between the two calls; a newer one may be there
                continue
            try:
                message = Documents(entry.documents, entry.epoch).get(entry.message, deadline)
            except BaseException:
                leases.give_back()
                raise
            self._leases[entry.epoch] = leases
            return Leased(entry, message, f"{entry.epoch}-{secrets.token_hex(4)}")

    def check(self, entry: Entry) -> None:
        """Raise SessionError where the lease was revoked. A registry that does not answer is no revocation."""
        with contextlib.suppress(WireError, DeadlineError):
            if all(e.epoch != entry.epoch for e in self.registry.entries(time.monotonic() + CHECK_S)):
                raise SessionError(
                    "the lease was revoked while this engine read: the trainer has closed the version",
                    where=f"version {entry.version!r}",
                    do="take the next version; give engines a longer deadline in `close`",
                )

    def give_back(self, entry: Entry) -> None:
        """Let the publisher go on. Never raises: a lease that is left ends by itself."""
        if (leases := self._leases.pop(entry.epoch, None)) is not None:
            leases.give_back()


@contextlib.contextmanager
def reading(versions: Versions, leased: Leased) -> Iterator[Callable[[], None]]:
    """Hold a lease for as long as the block runs. Gives what checks it."""
    try:
        yield lambda: versions.check(leased.entry)
    finally:
        versions.give_back(leased.entry)


def offer_of(entry: Entry, deadline: float) -> bytes:
    """What the publisher offers, as `prepare_refit_info` takes it. Raises WireError, DeadlineError."""
    return Documents(entry.documents, entry.epoch).get(entry.offer, deadline)


def pack_targets(targets: Placements, kept: list[str]) -> bytes:
    """What one rank reads, for the others."""
    return zlib.compress(msgspec.msgpack.encode((pack_placements(targets), kept)), 1)


def check_read(manifest: Manifest, packed: list[bytes | None], unused: list[str]) -> None:
    """Raise PlanError where the ranks of this engine together do not read all that is offered. packed: of all ranks."""
    read = [msgspec.msgpack.decode(zlib.decompress(p or b""), type=tuple[PackedPlacements, list[str]]) for p in packed]
    tables = [unpack_placements(table) for table, _ in read]
    spared = {*unused, *(name for _, kept in read for name in kept)}
    names = {t.names[i] for t in tables for i in set(t.tensor.tolist())}
    problems = check_consumed(manifest, names, spared) + unread_parts(manifest, concatenate(tables), spared)
    if problems:
        raise PlanError.of(problems, f"{len(problems)} offered tensor(s) go nowhere")


def check_request(version: object, registry: object, deadline_s: object, serve: object = "") -> tuple[str, float]:
    """The version and the deadline that an RPC was given. Raises ConfigError."""
    if not isinstance(version, str) or not version:
        wanted = "a version's name, or 'latest'"
        raise ConfigError("no such version", where="refit_take, version", got=repr(version)[:80], wanted=wanted)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s <= 1e6:
        wanted = "seconds, more than 0 and at most 1e6"
        raise ConfigError("no such deadline", where="refit_take, deadline_s", got=repr(deadline_s)[:80], wanted=wanted)
    if not isinstance(registry, str):
        raise ConfigError("no address", where="refit_take, registry", got=repr(registry)[:80], wanted="host:port")
    if serve and serve not in COPIED_BY:
        wanted = "empty, or " + " or ".join(COPIED_BY)
        raise ConfigError("replicas are not read by this wire", where="refit_take, serve", got=repr(serve)[:80], wanted=wanted)
    return version, float(deadline_s)
