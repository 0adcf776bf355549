"""The hook in a trainer: `prepare()` once, `refit(version)` after every step, on every rank.

    sender = RefitSender(source, engine)     # engine: a client on rank 0, None elsewhere
    sender.prepare()
    for step in ...:
        train(...)
        sender.refit(f"step-{step}")

`prepare` describes this rank's shards, lets rank 0 offer those of all ranks to the engines, and builds the joint plan from the
boxes that the engines' ranks answer with. Each engine rank planned for itself; its digest must equal that of its part of the
joint plan. `refit` makes the bytes that the plan names readable, has the engines pull and commit, and returns a report.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vllm_refit_ext.client import LATE_S, EngineClient
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, SessionError, as_refit_error
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Offer, pack_offer, suggest
from vllm_refit_ext.core.messages import UpdateInfo, UpdateReport
from vllm_refit_ext.core.part import names_in, part_of
from vllm_refit_ext.core.pieces import identity
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.plan_wire import pack_plan, unpack_plan
from vllm_refit_ext.sender import metrics
from vllm_refit_ext.sender.config import SenderConfig
from vllm_refit_ext.sender.engines import Engines
from vllm_refit_ext.sender.prepared import EngineRanks, Offered, Prepared, RankPart, joined, make_source
from vllm_refit_ext.sender.publication import Publication, Publisher, Retain, check_part
from vllm_refit_ext.sender.ranks import Ranks, answer_of
from vllm_refit_ext.sender.report import RefitReport as RefitReport
from vllm_refit_ext.sender.source import Source
from vllm_refit_ext.sender.verify import sent_digests, wanted_digests
from vllm_refit_ext.wires import Sender, wire


class _Verdict(msgspec.Struct):
    seconds: float
    engines: list[list[UpdateReport]]
    nbytes: int = 0


class RefitSender:
    """One trainer rank's sender. `prepare`, `refit` and `verify` are collective over the trainer's ranks; whatever fails on one
    rank is raised on all of them.
    """

    def __init__(
        self,
        source: Source | Callable[[], Source],
        engine: EngineClient | Sequence[EngineClient] | None,
        config: SenderConfig | None = None,
    ) -> None:
        """source: what this rank holds, or a function that every `prepare` calls for it. engine: a client, or one for each engine
        that is refitted together, on rank 0; None on the others.
        """
        self.config = config or SenderConfig()
        self._source = source
        engines = [engine] if isinstance(engine, EngineClient) else list(engine or [])
        self._engines = Engines(engines, self.config.deadline_s, self.config.keep)
        self.ranks = Ranks(self.config.deadline_s + 2 * LATE_S)
        self.prepared: Prepared | None = None
        self._publisher = Publisher(self.ranks, self.config)

    # -- prepare -------------------------------------------------------------------------------------------------------------

    def prepare(self, progress: Callable[[str], None] = lambda what: None) -> Plan:
        """Build the plan with the engines and open the wire. Returns the joint plan on rank 0, the moves out of this rank
        elsewhere. Either all ranks are prepared afterwards, or none is. progress: told what is done next, on each rank.

        Raises ConfigError (a shard that can't be described), PlanError or ManifestError (names, shapes, coverage, ranks that
        disagree), WireError (no room), all with every problem found.
        """
        self.ranks.call("prepare")
        self._publisher.make_way("prepare")
        made: list[Offered] = []

        def describe() -> bytes:
            self.close()
            progress("describing this rank's shards")
            made.append(Offered(make_source(self._source), self.ranks.rank))
            return made[0].describe()

        def describe_quantised() -> bytes:
            made[0].quantise(names)
            return made[0].describe()

        first = answer_of(describe)
        if self.config.prequantize:
            names = msgspec.msgpack.decode(self.ranks.exchange(first, self._ask_what_to_quantise), type=list[str])
            first = answer_of(describe_quantised)
        joint: list[tuple[Plan, list[EngineRanks], bytes]] = []
        progress("planning with the engines")
        raw = self.ranks.exchange(first, lambda raw: self._plan_together(raw, joint))
        opened: list[Prepared] = []

        def open_wire() -> bytes:
            progress(f"opening wire {self.config.wire}")
            made[0].look()  # on every rank, as a source may communicate; what a look prepares is not left to the first refit
            part = msgspec.msgpack.decode(raw, type=RankPart)
            plan, engines, offer = joint[0] if joint else (unpack_plan(part.plan, part.manifest), [], b"")
            half = wire(self.config.wire).open_sender(self.ranks.rank, part.wire, made[0].tensors)
            opened.append(Prepared(made[0], plan, half, part.total, engines, offer=offer))
            half.resident = self.config.resident
            if half.sends and any(e.replicas > 1 for e in engines):
                what = "an engine has several data parallel replicas, and this wire sends to each rank by its number"
                do = "start a server for each replica and pass a client for each, or use a wire that engines read"
                raise ConfigError(what, where=f"wire {self.config.wire}", do=do)
            return b""

        try:
            self.ranks.exchange(answer_of(open_wire), self._nothing)
        except BaseException:
            for prepared in opened:
                prepared.half.close()
            raise
        self.prepared = opened[0]
        return self.prepared.plan

    def _nothing(self, parts: list[bytes]) -> list[bytes]:
        return [b""] * self.ranks.size

    def _ask_what_to_quantise(self, raw: list[bytes]) -> list[bytes]:
        """On rank 0: the names that the engines hold as MXFP8, and those that the configuration adds."""
        manifest, sources, _ = joined(raw)
        prequantize = {"prequantize": True}
        found = [] if self._takers_only else self._engines.prepare(manifest, sources, (), prequantize, self.config.unused)
        names = set(self.config.quantise) | {name for e in found for reply in e.replies for name in reply.quantise}
        unknown = [
            Problem("it is to be quantised and not offered", f"tensor {n!r}", do=suggest(n, manifest.tensors))
            for n in sorted(names - set(manifest.tensors))
        ]
        if unknown:
            raise ConfigError.of(unknown)
        return [msgspec.msgpack.encode(sorted(names))] * self.ranks.size

    def _plan_together(self, raw: list[bytes], joint: list[tuple[Plan, list[EngineRanks], bytes]]) -> list[bytes]:
        """On rank 0: offer what all ranks hold, plan with what the engines answer, and cut the plan for the ranks."""
        self._publisher.serve()
        manifest, sources, hosts = joined(raw)
        fp8_config = {"prequantize": True} if self.config.prequantize else None
        whole, offer = None, b""
        if self.config.registry_port is not None:
            whole, offer = identity(manifest, sources), pack_offer(Offer(manifest, sources, 0, hosts))
        if whole is not None and self._takers_only:
            engines, plan, at = [], whole, Hosts(hosts, [])
        else:
            engines = self._engines.prepare(manifest, sources, hosts, fp8_config, self.config.unused)
            plan, at = self._engines.plan(manifest, sources, hosts, engines, self.config.unused)
        joint.append((plan, engines, offer))
        wires = wire(self.config.wire).send_tables(whole or plan, at, self.config.bucket_bytes)
        total = int(plan.nbytes.sum())
        return [
            msgspec.msgpack.encode(RankPart(manifest, pack_plan(plan.for_source(rank)), wires[rank], total))
            for rank in range(self.ranks.size)
        ]

    @property
    def _takers_only(self) -> bool:
        """On rank 0: whether no engine takes part in `prepare`, as all take what is published."""
        return self.config.registry_port is not None and not self._engines.clients

    def _ready(self, call: str) -> Prepared:
        if self.prepared is None:
            do = "call prepare() on every rank"
            raise SessionError(f"{call} was called before prepare", where=f"{type(self).__name__}.{call}", do=do)
        return self.prepared

    # -- refit ---------------------------------------------------------------------------------------------------------------

    def refit(self, version: str, part: Sequence[str] = ()) -> RefitReport:
        """Hand the current weights to the engines as `version`, the same on all ranks. Returns when every engine serves them.

        part: names or globs of checkpoint tensors (see `core.part`); only their bytes are sent, and everything else stays bit for
        bit in the engines, whose status says which parts are of which version. Empty for all. On wires that engines read.

        Every engine commits for itself: where one fails, the others serve the new version, and the error names each. Raises
        SessionError before `prepare`, WireError where the trainer's memory no longer fits, and what engines raised.
        """
        self.ranks.call(f"refit to {version!r}")
        self._publisher.make_way(f"refit to {version!r}")
        try:
            report = self._refit(version, part)
        except RefitError as error:
            if self.prepared is not None:
                self.prepared.half.forget()
            if self.ranks.rank == 0:
                metrics.failed(version, error)
            raise
        finally:
            if self.prepared is not None:
                self.prepared.half.rest()
        if self.ranks.rank == 0:
            metrics.succeeded(version, report.seconds, report.nbytes)
        return report

    def _refit(self, version: str, part: Sequence[str]) -> RefitReport:
        start = time.perf_counter()
        seconds: dict[str, float] = {}
        sent: dict[int, int] = {}

        def publish() -> bytes:
            prepared = self._ready("refit")
            if not isinstance(version, str) or not version:
                raise SessionError("a refit needs a version", where="refit", got=repr(version), wanted="a text that is not empty")
            check_part(part, self.config.wire)
            tensors = prepared.offered.current(seconds)
            begin = time.perf_counter()
            mine = prepared.begin(tensors, part, prepared.offered.addresses)
            seconds["publish"] = time.perf_counter() - begin
            return mine

        half = self.prepared.half if self.prepared is not None else None
        if half is not None and half.sends:
            verdict = self._refit_actively(half, publish, version, seconds, sent)
        else:
            raw = self.ranks.exchange(answer_of(publish), lambda parts: self._update_engines(version, parts, part))
            verdict = msgspec.msgpack.decode(raw, type=_Verdict)
        seconds |= {"update": verdict.seconds, "total": time.perf_counter() - start}
        total = verdict.nbytes or self._ready("refit").total
        return RefitReport(version, seconds, total, total / seconds["total"] / 1e9, verdict.engines, sent)

    def _update_engines(self, version: str, parts: list[bytes], part: Sequence[str]) -> list[bytes]:
        begin = time.perf_counter()
        if self._takers_only:
            do = "pass engine= on rank 0, or publish the version"
            raise SessionError("this sender has no engines to refit", where="refit", do=do)
        info = wire(self.config.wire).info(parts)
        calls = self._engines.update(self._messages(version, info, secrets.token_hex(8), part))
        plan = self._ready("refit").plan
        nbytes = int(part_of(plan, names_in(plan.manifest, part)).nbytes.sum()) if part else 0
        engines = self._engines.reports(calls, version)
        return [msgspec.msgpack.encode(_Verdict(time.perf_counter() - begin, engines, nbytes))] * self.ranks.size

    def _messages(self, version: str, info: Any, session: str, part: Sequence[str] = ()) -> list[UpdateInfo]:
        """The message to each engine. info: the wire's own part."""
        field: dict[str, Any] = {self.config.wire: info}
        return [
            UpdateInfo(
                wire=self.config.wire,
                version=version,
                session=session,
                digests={str(r.rank): r.digest for r in engine.replies},
                deadline_s=self.config.deadline_s,
                caches=self.config.caches,
                sample=self.config.sample,
                part=list(part),
                hash_reloaded=self.config.hash_reloaded,
                **field,
            )
            for engine in self._ready("refit").engines
        ]

    def _refit_actively(
        self,
        half: Sender,
        publish: Callable[[], bytes],
        version: str,
        seconds: dict[str, float],
        sent: dict[int, int],
    ) -> _Verdict:
        """A refit in which every trainer rank works while the engines' calls run."""

        def announce(parts: list[bytes]) -> list[bytes]:
            info = wire(self.config.wire).info(parts)
            update = self._messages(version, info, secrets.token_hex(8))[0]
            return [msgspec.msgpack.encode(update)] * self.ranks.size

        update = msgspec.msgpack.decode(self.ranks.exchange(answer_of(publish), announce), type=UpdateInfo)
        info, deadline = getattr(update, self.config.wire), time.monotonic() + self.config.deadline_s
        begin = time.perf_counter()

        def transfer() -> RefitError | None:
            """Send; what it failed with."""
            try:
                sent.update(half.transfer(update.session, info, deadline))
            except Exception as error:  # noqa: BLE001 - whatever it is, the engines and the other ranks wait for this one
                return as_refit_error(error)
            finally:
                seconds["transfer"] = time.perf_counter() - begin
            return None

        def refuse(error: RefitError, ranks: Sequence[int] = ()) -> None:
            half.refuse(update.session, error, deadline + LATE_S, ranks)

        def engine_failed(index: int, error: RefitError) -> None:
            engine = self._ready("refit").engines[index]
            refuse(error, range(engine.first, engine.first + len(engine.replies)))

        def lead() -> bytes:
            """Rank 0: drive the engines beside its own sending."""
            calls = self._engines.update(self._messages(version, info, update.session), engine_failed)
            try:
                failed = transfer()
            except BaseException as error:
                refuse(as_refit_error(error))  # the process ends; the engines need not wait for it
                raise
            if failed is not None:
                refuse(failed)
                failed = self._engines.named(failed, self._ready("refit").engines)
            return msgspec.msgpack.encode(self._engines.reports(calls, version, failed))

        def follow() -> bytes:
            failed = transfer()
            if failed is not None:
                raise failed
            return b""

        def conclude(parts: list[bytes]) -> list[bytes]:
            engines = msgspec.msgpack.decode(parts[0], type=list[list[UpdateReport]])
            return [msgspec.msgpack.encode(_Verdict(time.perf_counter() - begin, engines))] * self.ranks.size

        work = lead if self.ranks.rank == 0 else follow
        return msgspec.msgpack.decode(self.ranks.exchange(answer_of(work), conclude), type=_Verdict)

    # -- publish -------------------------------------------------------------------------------------------------------------

    def publish(self, version: str, retain: Retain = "in_place", part: Sequence[str] = ()) -> Publication:
        """Make the current weights a version that engines take by themselves. Returns on all ranks once it is READY.

        retain: see `sender.publication`; `retained_bytes` says what each way takes. part: as in `refit`. The publication that is
        open is ended first.

        Raises SessionError before `prepare`, for a version that was published before (but for the open one with the same bytes,
        whose publication is returned), and while an open one in place is leased; ConfigError without `registry_port`; WireError
        where the trainer's memory no longer fits; DeadlineError naming a rank that did not publish. After an error nothing of the
        version is left.
        """
        return self._publisher.publish(lambda: self._ready("publish"), version, retain, part)

    @property
    def registry(self) -> str:
        """Address of the registry, on rank 0 after `prepare`; what engines are given to take or to follow. Empty elsewhere."""
        return self._publisher.address

    @property
    def retained_bytes(self) -> dict[str, int]:
        """Bytes beside the weights that a publication takes on this rank, by way to retain. Raises SessionError before
        `prepare`."""
        return self._publisher.memory(self._ready("retained_bytes"))

    @property
    def extra_bytes(self) -> dict[str, int]:
        """Bytes beside the weights that refits take on this rank, from `prepare` on: `quantised` (codes and scales) and `staging`
        (of the wire) where the weights are, `copied` in shared memory. Raises SessionError before `prepare`."""
        prepared = self._ready("extra_bytes")
        half = prepared.half
        return {"quantised": prepared.offered.quantised_bytes, "staging": half.staging_bytes, "copied": half.copied}

    def release(self) -> int:
        """Between refits: give back what this rank quantised, until the next refit quantises anew. Not collective. Returns bytes.

        Raises SessionError before `prepare`, while a version in that memory is published, and where engines keep it mapped.
        """
        prepared = self._ready("release")
        if self._publisher.open is not None or prepared.half.resident:
            do = "close the publication first, and make the sender without resident=True"
            raise SessionError("engines may read that memory", where="RefitSender.release", do=do)
        return prepared.offered.release()

    # -- verify and close ----------------------------------------------------------------------------------------------------

    def verify(self) -> int:
        """Compare digests of every tensor on every engine rank with what this trainer holds now. Returns tensors compared, which
        are all that the engines hold.

        Raises VerifyError naming, for each engine rank, the first tensor that differs or was not compared.
        """
        self.ranks.call("verify")
        asks = self.prepared is not None and bool(self.prepared.engines)
        calls = self._engines.digest() if asks else None

        def compare(raw: list[bytes]) -> list[bytes]:
            wanted = wanted_digests(raw, self._ready("verify").engines)
            self._engines.compare(calls or self._engines.digest(), wanted)
            count = sum(len(digests) for engine in wanted for digests in engine.values())
            return [str(count).encode()] * self.ranks.size

        try:  # the engines take theirs at the same time
            mine = answer_of(lambda: sent_digests(self._ready("verify"), self.ranks.rank))
            return int(self.ranks.exchange(mine, compare))
        finally:
            if calls is not None:  # an engine that still works would refuse the next call
                calls.wait(self.config.deadline_s + LATE_S)

    def close(self) -> None:
        """Give back what this rank's half of the wire holds; a version that is open is revoked. Not collective. `prepare` may be
        called again."""
        self._publisher.stop()
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            prepared.half.close()
