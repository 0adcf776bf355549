"""A take on one engine rank: what all ranks agree on around a refit that nobody called them to. See `receiver.take`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from vllm_refit_ext.core.errors import ConfigError, RefitError
from vllm_refit_ext.core.manifest import parse_manifest
from vllm_refit_ext.core.messages import DEADLINE_S, Published, TakeReply, UpdateReport, to_rpc
from vllm_refit_ext.receiver import agree
from vllm_refit_ext.receiver.prepared import Clock, Prepared
from vllm_refit_ext.receiver.session import Receiver, nothing
from vllm_refit_ext.receiver.take import Leased, Versions, check_read, check_request, offer_of, pack_targets, reading


class Taker:
    """What one engine rank knows of the versions that it takes. Made on the first take; lives as long as its receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._versions: Versions | None = None
        self._offer: tuple[Prepared, str] | None = None
        self._served: tuple[UpdateReport, str] | None = None

    @property
    def epoch(self) -> str:
        """Of the publication that this rank serves; empty where its weights came by a push, or are torn."""
        receiver = self._receiver
        here = self._served is not None and self._served[0] is receiver.last and receiver.torn is None
        return self._served[1] if here and self._served is not None else ""

    def take(self, version: object, registry: object, deadline_s: object, caches: Any, session: str) -> TakeReply:
        """Take a version on all ranks, or on none. Raises the same RefitError on every rank.

        version, registry, deadline_s, caches: as the RPC `refit_take` takes them. session: the same text on every rank.
        """
        view, clock, start = self._receiver.view, Clock(), time.monotonic()
        errors: list[RefitError] = []
        leased: Leased | None = None
        seconds = DEADLINE_S
        agree.begin(view, f"take {session}")
        with clock("find"), agree.collect(errors, "refit_take"):
            name, seconds = check_request(version, registry, deadline_s)
            versions = self._connected(str(registry))
            if view.rank == 0:
                leased = versions.lease(name, self.epoch, start + seconds)
        with contextlib.ExitStack() as stack:
            check: Callable[[], None] = nothing
            if leased is not None and self._versions is not None:
                check = stack.enter_context(reading(self._versions, leased))
            with clock("find"):
                answers = agree.agree(view, "version", msgspec.msgpack.encode(leased), agree.merged(errors), seconds)
            leased = msgspec.msgpack.decode(answers[0] or b"", type=Leased | None)
            if leased is None:
                return TakeReply(rank=view.rank, version=self._receiver.version, epoch=self.epoch, seconds=clock.seconds)
            report = self._read(leased, start + seconds, caches, check, clock)
        self._served = (report, leased.entry.epoch)
        return TakeReply(
            rank=view.rank,
            version=report.version,
            epoch=leased.entry.epoch,
            taken=True,
            received=report.received,
            seconds=clock.seconds | report.seconds,
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
        with torch.no_grad():
            return receiver.update(to_rpc(update), check)

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
