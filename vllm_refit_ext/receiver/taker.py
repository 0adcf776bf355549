"""A take on one engine rank: what all ranks agree on around a refit that nobody called them to. See `receiver.take`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch

from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError, WireError
from vllm_refit_ext.core.manifest import parse_manifest
from vllm_refit_ext.core.messages import DEADLINE_S, Published, TakeReply, UpdateInfo, UpdateReport, WireName, to_rpc
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.receiver import agree
from vllm_refit_ext.receiver.final import Final
from vllm_refit_ext.receiver.metrics import Clock
from vllm_refit_ext.receiver.prepared import Prepared
from vllm_refit_ext.receiver.replicas import PiecesReader, Source, holders
from vllm_refit_ext.receiver.session import Receiver, nothing
from vllm_refit_ext.receiver.take import Leased, Versions, check_read, check_request, offer_of, pack_targets, reading
from vllm_refit_ext.wires import Reader, wire
from vllm_refit_ext.wires.leases import Leases
from vllm_refit_ext.wires.registry import StoreRegistry


class Taker:
    """What one engine rank knows of the versions that it takes. Made on the first take; lives as long as its receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._versions: Versions | None = None
        self._offer: tuple[Prepared, str] | None = None
        self._served: tuple[UpdateReport, str] | None = None
        self._final: tuple[Prepared, Final | SessionError] | None = None
        self._serve: WireName | Literal[""] = ""
        self.replica = ""
        """How this rank hands on what it serves, or why it does not."""

    @property
    def epoch(self) -> str:
        """Of the publication that this rank serves; empty where its weights came by a push, or are torn."""
        receiver = self._receiver
        here = self._served is not None and self._served[0] is receiver.last and receiver.torn is None
        return self._served[1] if here and self._served is not None else ""

    def take(
        self, version: object, registry: object, deadline_s: object, caches: Any, session: str, serve: object = ""
    ) -> TakeReply:
        """Take a version on all ranks, or on none. Raises the same RefitError on every rank.

        version, registry, deadline_s, caches, serve: as the RPC `refit_take` takes them. session: the same text on every rank.
        """
        view, clock, start = self._receiver.view, Clock(self._receiver.view.rank), time.monotonic()
        errors: list[RefitError] = []
        leased: Leased | None = None
        seconds = DEADLINE_S
        agree.begin(view, f"take {session}")
        with clock("find"), agree.collect(errors, "refit_take"):
            name, seconds = check_request(version, registry, deadline_s, serve)
            self._serve = serve  # type: ignore[assignment]
            versions = self._connected(str(registry))
            if view.rank == 0:
                leased = versions.lease(name, self.epoch, start + seconds, self._layout())
        with contextlib.ExitStack() as stack:
            check: Callable[[], None] = nothing
            if leased is not None and self._versions is not None:
                check = stack.enter_context(reading(self._versions, leased))
            with clock("find"):
                answers = agree.agree(view, "version", msgspec.msgpack.encode(leased), agree.merged(errors), seconds)
            leased = msgspec.msgpack.decode(answers[0] or b"", type=Leased | None)
            if leased is None:
                return TakeReply(
                    rank=view.rank,
                    version=self._receiver.version,
                    epoch=self.epoch,
                    replica=self.replica,
                    seconds=clock.seconds,
                )
            report = self._read(leased, start + seconds, caches, check, clock)
        report = msgspec.structs.replace(report, seconds=clock.seconds | report.seconds)
        self._receiver.last, self._served = report, (report, leased.entry.of)
        return TakeReply(
            rank=view.rank,
            version=report.version,
            epoch=leased.entry.of,
            taken=True,
            received=report.received,
            replica=self.replica,
            seconds=report.seconds,
        )

    def _connected(self, address: str) -> Versions:
        """By the registry that was named, or the last one."""
        if address and (self._versions is None or self._versions.address != address):
            self._versions = Versions(address)
        if self._versions is None:
            do = "pass the address that the sender's `registry` says"
            raise ConfigError("no registry was named yet", where="refit_take, registry", do=do)
        return self._versions

    def _read(self, leased: Leased, deadline: float, caches: Any, check: Callable[[], None], clock: Clock) -> UpdateReport:
        receiver = self._receiver
        update, published = leased.update(max(0.1, deadline - time.monotonic()), caches)
        if self._offer is None or self._offer[0] is not receiver.prepared or self._offer[1] != leased.entry.offer:
            with clock("prepare"):
                self._prepare(leased, published, deadline)
        update = msgspec.structs.replace(update, deadline_s=max(0.1, deadline - time.monotonic()))
        pieces: list[PiecesReader] = []
        leases = Leases(self._connected("").address, self._connected("").holder)

        def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> Reader:
            reader = self._open(leased, update, plan, kept, leases)
            pieces.extend([reader] if isinstance(reader, PiecesReader) else [])
            return reader

        def checked() -> None:
            if not pieces:  # what is read piece by piece is confirmed piece by piece
                check()

        try:
            with torch.no_grad():
                return receiver.update(to_rpc(update), checked, open_reader)
        except BaseException:
            if receiver.source is not None:
                receiver.source.end()
            raise
        finally:
            leases.give_back()

    def _layout(self) -> str:
        """Of this rank's bytes, where that is known."""
        known = self._final is not None and self._final[0] is self._receiver.prepared
        return self._final[1].layout if known and self._final is not None and isinstance(self._final[1], Final) else ""

    def _open(self, leased: Leased, update: UpdateInfo, plan: Plan, kept: dict[str, Any], leases: Leases) -> Reader:
        """What is read of a version: the trainer's memory, or pieces of it and of ranks that have it."""
        receiver, entry, deadline = self._receiver, leased.entry, time.monotonic() + update.deadline_s
        prepared = receiver.prepared
        assert prepared is not None
        self.replica = ""
        trainer, why = self._trainer(leased, update, plan, kept)
        if update.part:
            self.replica = "a part of the weights is not handed on"
        elif self._final is None or self._final[0] is not prepared:
            try:
                self._final = prepared, Final(prepared)
            except SessionError as error:
                self._final = prepared, error
        final = self._final[1] if self._final is not None and not update.part else None
        if isinstance(final, SessionError):
            self.replica = f"not handed on: {final}"
        if not isinstance(final, Final):
            if trainer is None:
                raise why or final or SessionError("the trainer has closed the version", where=leased.where, got=self.replica)
            return trainer
        known = StoreRegistry(entry.documents).entries(deadline) if not self._serve or trainer is None else []
        others = holders(known, entry.of, final.layout)
        if trainer is None and not others:
            raise why or SessionError(
                "no rank of this layout has it",
                where=leased.where,
                got=f"layout {final.layout[:16]}",
                do="take a version that the trainer publishes; engines hand on to engines of equal settings",
            )
        if not self._serve and not others and trainer is not None:
            return trainer
        documents = {}
        if self._serve and receiver.view.rank == 0:
            documents = {"offer": offer_of(entry, deadline), "message": leased.message}
        return PiecesReader(entry, plan, final, trainer, self._source(final), documents, leases)

    def _trainer(
        self, leased: Leased, update: UpdateInfo, plan: Plan, kept: dict[str, Any]
    ) -> tuple[Reader | None, RefitError | None]:
        """What reads the trainer's memory, or why it can't be read from here."""
        if leased.entry.replica is not None:
            return None, None
        try:
            return wire(update.wire).open_reader(update, plan, kept), None
        except WireError as error:
            return None, error

    def _source(self, final: Final) -> Source | None:
        """Of this rank, if it hands on."""
        receiver, versions = self._receiver, self._connected("")
        known = receiver.source
        if known is not None and (known.final, known.wire, known.address) != (final, self._serve, versions.address):
            receiver.source = None
            known.close()
        if self._serve and receiver.source is None:
            try:
                rank = f"{versions.holder}, rank {receiver.view.rank}"
                receiver.source = Source(versions.address, self._serve, final, rank)
            except RefitError as error:
                self.replica = f"not handed on: {error}"
        if receiver.source is not None:
            self.replica = f"by wire {self._serve}, {receiver.source.nbytes} bytes beside the weights"
        return receiver.source

    def _prepare(self, leased: Leased, published: Published, deadline: float) -> None:
        """Prepare from the publisher's offer, on all ranks or on none."""
        receiver, view, errors = self._receiver, self._receiver.view, list[RefitError]()
        offer, mine = b"", b""
        with agree.collect(errors, "the offer"):
            offer = offer_of(leased.entry, deadline)
        agree.begin(view, f"offer {leased.session}")
        agree.agree(view, "offer", None, agree.merged(errors), max(0.1, deadline - time.monotonic()))
        manifest = parse_manifest(offer)
        coded = any(spec.format == "mxfp8" for spec in manifest.tensors.values())
        receiver.prepare(offer, {"prequantize": True} if coded else None, published.keep)
        if receiver.refused is not None:
            raise receiver.refused
        prepared = receiver.prepared
        assert prepared is not None
        with agree.collect(errors, "the offer"):
            mine = pack_targets(prepared.targets.placements, list(prepared.targets.kept))
        agree.begin(view, f"targets {leased.session}")
        packed = agree.agree(view, "targets", mine, agree.merged(errors), max(0.1, deadline - time.monotonic()))
        try:
            check_read(manifest, packed, published.unused)
        except RefitError as error:
            receiver.prepared, receiver.refused = None, error
            raise
        self._offer = (prepared, leased.entry.offer)
