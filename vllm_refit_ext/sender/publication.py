"""Publishing: the current weights as a version that engines take by themselves, and the end of it.

    publication = sender.publish("step-7")              # returns once the version is READY
    ...                                                 # engines take it, each at its own pace
    publication.close(deadline_s=30)                    # no new leases; waits for those there are; revokes what is left

One publication of a sender is open at a time, as all its publications and refits use the same memory. How long engines may read
is what leases are for; what the trainer may do meanwhile depends on `retain`:

    in_place    engines read the weights themselves (wire `ipc`): close before the next optimizer step. No memory. The next
                publish or refit is refused while engines hold leases
    snapshot    the weights are copied first, so the trainer goes on at once. The next publish or refit waits for the leases,
                until the sender's deadline, and then revokes them

Wire `shm` copies the weights to its segment in any case, so there the trainer may always go on; what it says about the next
publish holds all the same.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec
import torch

from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError
from vllm_refit_ext.core.messages import Published, UpdateInfo
from vllm_refit_ext.core.part import patterns_of
from vllm_refit_ext.sender.config import SenderConfig
from vllm_refit_ext.sender.prepared import Prepared
from vllm_refit_ext.sender.ranks import Answer, Ranks, answer_of
from vllm_refit_ext.wires import ONE_SIDED, wire
from vllm_refit_ext.wires.registry import Documents, Entry, Registry, StoreRegistry, serve, wait_for_leases

Retain = Literal["in_place", "snapshot"]
NAMES_KEPT = 10_000
"""Names of closed versions that a sender remembers, to refuse a second publication of one."""


class Publication:
    """An open version. Every trainer rank has one of its own.

    version, epoch, retain: of the publication. seconds: of publishing, by phase: `quantise`, `copy`, `publish`, `total`.
    """

    def __init__(self, publisher: Publisher, version: str, epoch: str, retain: Retain, seconds: dict[str, float]) -> None:
        self._publisher = publisher
        self.version, self.epoch, self.retain, self.seconds = version, epoch, retain, seconds

    def close(self, deadline_s: float | None = None) -> list[str]:
        """End the publication; collective over the trainer's ranks. Returns the holders of leases that were revoked.

        deadline_s: seconds that engines have to finish reading, the sender's deadline at most and by default. An engine whose
        lease was revoked finds that out before its commit. Closing twice does nothing.
        """
        return self._publisher.close(self, deadline_s)

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Publisher:
    """One trainer rank's part of publishing. `registry`: on rank 0, once it serves."""

    def __init__(self, ranks: Ranks, config: SenderConfig) -> None:
        self.ranks, self.config = ranks, config
        self.address = ""
        self.open: Publication | None = None
        self.registry: Registry
        self._entry: Entry | None = None
        self._names: dict[str, None] = {}
        self._prepared: Prepared | None = None
        self._snapshot: list[torch.Tensor] | None = None
        self._serving: Any = None

    def serve(self) -> None:
        """On rank 0: serve the registry, from the first `prepare` on. Raises WireError."""
        if not self.address and self.config.registry_port is not None:
            self.address, self._serving = serve(self.config.registry_port)
            self.registry = StoreRegistry(self.address)

    def memory(self, prepared: Prepared) -> dict[str, int]:
        """Bytes beside the weights that each way to retain takes on this rank."""
        copied = prepared.half.copied
        whole = sum(t.numel() * t.element_size() for t in prepared.offered.tensors)
        return {"in_place": copied, "snapshot": copied or whole}

    # -- publish -------------------------------------------------------------------------------------------------------------

    def publish(self, ready: Callable[[], Prepared], version: str, retain: Retain, part: Sequence[str]) -> Publication:
        """See `RefitSender.publish`. ready: what is prepared; raises SessionError where nothing is."""
        start = time.perf_counter()
        seconds: dict[str, float] = {}
        self.ranks.call(f"publish {version!r}")
        if self.open is not None and self.open.version == version:
            return self._again(self.open, ready)
        self.make_way(f"publish {version!r}")
        epoch = secrets.token_hex(8)
        publisher = f"{platform.node()}, process {os.getpid()}"
        entry = Entry(version, epoch, "staging", self.config.wire, documents=self.address, publisher=publisher)

        def begin() -> bytes:
            self._check(version, retain)
            check_part(part, self.config.wire)
            prepared = self._prepared = ready()
            tensors = prepared.offered.current(seconds)
            addresses: list[int] | None = prepared.offered.addresses
            if self.ranks.rank == 0:
                self.registry.put(entry, self._deadline())
                self._entry = entry
            copy = time.perf_counter()
            if retain == "snapshot" and not prepared.half.copied:
                tensors, addresses = self._copied(tensors), None
                seconds["copy"] = time.perf_counter() - copy
            prepared.half.forget()  # who comes late has no message
            mine = prepared.begin(tensors, part, addresses)
            seconds["publish"] = time.perf_counter() - copy
            return mine

        def announce(parts: list[bytes]) -> list[bytes]:
            self._announce(entry, parts, part)
            return [epoch.encode()] * self.ranks.size

        try:
            raw = self.ranks.exchange(answer_of(begin), announce)
        except BaseException:
            self._drop()
            raise
        self.open = Publication(self, version, raw.decode(), retain, seconds)
        self._names[version] = None
        if len(self._names) > NAMES_KEPT:
            del self._names[next(iter(self._names))]
        seconds["total"] = time.perf_counter() - start
        return self.open

    def _check(self, version: object, retain: object) -> None:
        if self.config.registry_port is None:
            do = "give SenderConfig a registry_port: 0, or the port that trainer rank 0 serves the registry at"
            raise ConfigError("this sender was not made to publish", where="publish", do=do)
        if not isinstance(version, str) or not version or version == "latest":
            wanted = "a text that is not empty, and not 'latest'"
            raise SessionError("a publication needs a version", where="publish", got=repr(version)[:80], wanted=wanted)
        if retain not in get_args(Retain):
            wanted = " or ".join(get_args(Retain))
            raise ConfigError("unknown way to retain a version", where="publish, retain", got=repr(retain)[:80], wanted=wanted)
        if version in self._names:
            do = "publish under a name of its own: engines can't tell two versions of one name apart"
            raise SessionError("the version was published before, and closed", where=f"version {version!r}", do=do)

    def _copied(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._snapshot is None:
            self._snapshot = [torch.empty_like(t, requires_grad=False) for t in tensors]
        if tensors:
            torch._foreach_copy_(self._snapshot, [t.detach() for t in tensors])
        return self._snapshot

    def _announce(self, entry: Entry, parts: list[bytes], part: Sequence[str]) -> None:
        """On rank 0: the version is READY, with all that an engine needs to read it."""
        deadline = self._deadline()
        assert self._prepared is not None
        field: dict[str, Any] = {entry.wire: wire(entry.wire).info(parts)}
        update = UpdateInfo(
            wire=self.config.wire,
            version=entry.version,
            session=entry.epoch,
            sample=self.config.sample,
            hash_reloaded=self.config.hash_reloaded,
            part=list(part),
            **field,
        )
        message = Published(update=update, unused=list(self.config.unused), keep=list(self.config.keep))
        documents = Documents(self.address, entry.epoch)
        self._entry = msgspec.structs.replace(
            entry,
            state="ready",
            offer=documents.put(self._prepared.offer, deadline),
            message=documents.put(msgspec.msgpack.encode(message), deadline),
        )
        self.registry.put(self._entry, deadline)

    def _again(self, known: Publication, ready: Callable[[], Prepared]) -> Publication:
        """The open publication, if it has the same bytes."""

        def compare() -> bytes:
            half, tensors = ready().half, ready().offered.current({})
            if known.retain == "snapshot" and self._snapshot is not None:
                same = all(map(torch.equal, self._snapshot, tensors))
            else:
                same = half.holds(tensors)
            if not same:
                what = "the version is published already, with other bytes or with bytes that were not kept to compare"
                raise SessionError(what, where=f"version {known.version!r}", do="publish under another name, or close it first")
            return b""

        self.ranks.exchange(answer_of(compare), lambda parts: [b""] * self.ranks.size)
        return known

    # -- the end of a publication --------------------------------------------------------------------------------------------

    def make_way(self, call: str) -> None:
        """End the open publication before its memory is used for `call`; an exchange of all ranks, where one is open.

        Raises SessionError, and leaves it open, where it is in place and engines hold leases.
        """
        if (known := self.open) is not None:
            in_place = known.retain == "in_place"
            self._end(known, 0.0 if in_place else self.config.deadline_s, call if in_place else "")

    def close(self, publication: Publication, deadline_s: float | None) -> list[str]:
        """See `Publication.close`."""
        if publication is not self.open:
            return []
        self.ranks.call(f"close version {publication.version!r}")
        longest = self.config.deadline_s
        return self._end(publication, longest if deadline_s is None else min(max(deadline_s, 0.0), longest))

    def stop(self) -> None:
        """Revoke at once, without the other ranks: this sender closes."""
        if self.open is not None:
            self._drop()
        self._snapshot = None

    def _end(self, publication: Publication, deadline_s: float, refused_for: str = "") -> list[str]:
        def release(parts: list[bytes]) -> list[bytes]:
            return [msgspec.msgpack.encode(self._release(time.monotonic() + deadline_s, refused_for))] * self.ranks.size

        try:
            raw = self.ranks.exchange(Answer(), release)
        except RefitError as error:
            if not (refused_for and isinstance(error, SessionError)):
                self._drop()
            raise
        self._drop()
        return msgspec.msgpack.decode(raw, type=list[str])

    def _release(self, deadline: float, refused_for: str) -> list[str]:
        """On rank 0: no new leases, then no leases. Returns the holders of those that are revoked."""
        entry = self._entry
        assert entry is not None
        self.registry.put(msgspec.structs.replace(entry, state="releasing"), self._deadline())
        holders = wait_for_leases(self.registry, entry.epoch, deadline)
        if holders and refused_for:
            self.registry.put(entry, self._deadline())
            raise SessionError(
                "the version is published in place and engines read it, so its memory can't be used",
                where=refused_for,
                got=f"version {entry.version!r}, leased by {', '.join(holders)}",
                do="close the publication first, before the optimizer's step",
            )
        return holders

    def _drop(self) -> None:
        """No engine may commit what it read of this memory from now on."""
        self.open = None
        if self._prepared is not None:
            self._prepared.half.end()
        entry, self._entry = self._entry, None
        if entry is not None:
            # The memory says it too, so that a registry that does not answer changes nothing.
            with contextlib.suppress(RefitError):
                self.registry.put(msgspec.structs.replace(entry, state="gone"), self._deadline())

    def _deadline(self) -> float:
        return time.monotonic() + self.config.deadline_s


def check_part(part: object, wire_name: str) -> None:
    """Raise ConfigError where `part` can't be read, or the wire moves whole plans only."""
    if patterns_of(part) and wire_name not in ONE_SIDED:
        wanted = " or ".join(ONE_SIDED)
        raise ConfigError("this wire can't move a part of the weights", where="part", got=f"wire {wire_name}", wanted=wanted)
