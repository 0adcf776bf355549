"""The hook in the trainer: `prepare()` once, `refit(version)` after every step, on every rank.

    sender = MegatronSender(model_chunks, bridge, engine)     # engine: a client on rank 0, None elsewhere
    sender.prepare()
    for step in ...:
        train(...)
        sender.refit(f"step-{step}")

`prepare` describes this rank's shards, lets rank 0 offer those of all ranks to the engine, and builds the joint plan from the
boxes that the engine's ranks answer with. Each engine rank planned for itself; its digest must equal that of its share of the
joint plan. `refit` makes the bytes that the plan names readable, has the engine pull and commit, and returns a report.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_sender.source import SourceMap, source_map
from vllm_refit_ext.client import LATE_S, EngineClient, raise_problems
from vllm_refit_ext.core.errors import ConfigError, ManifestError, PlanError, Problem, RefitError, SessionError
from vllm_refit_ext.core.manifest import Manifest, Offer, TensorSpec, pack_offer, suggest
from vllm_refit_ext.core.messages import DEADLINE_S, CachePolicy, PrepareReply, UpdateInfo, UpdateReport, WireName
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.plan import Plan, build_plan, check_consumed
from vllm_refit_ext.core.plan_wire import PackedPlan, pack_plan, unpack_plan
from vllm_refit_ext.core.sites import Sites, distances, this_site
from vllm_refit_ext.core.table import PackedPlacements, pack_placements, unpack_placements
from vllm_refit_ext.sender import metrics
from vllm_refit_ext.sender.calls import Calls
from vllm_refit_ext.sender.prequantize import Prequantised
from vllm_refit_ext.sender.ranks import Ranks, answer_of
from vllm_refit_ext.wires import BUCKET_BYTES, ActiveSender, ResidentSender, Sender, wire
from vllm_refit_ext.wires.boxes import MODULUS, Content, as_bytes, sum_by_tensor
from vllm_refit_ext.wires.coded import PlacedScales, sent_content

SMALLEST_BUCKET = 1 << 10
"""Bytes. A bucket must hold an element; a thousand of its messages cost more than their bytes already."""
LINK_BYTES = 64 << 20
"""Size of the copy that measures what this machine's memory can do."""


class SenderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """wire: how bytes travel. unused: checkpoint names that no engine rank needs to read. caches: what a commit does with caches
    of older weights, see `core.messages.CachePolicy`. deadline_s: seconds within which a refit must end. resident: the trainer's
    memory is never freed between refits, so engines may keep it mapped. prequantize: quantise in the trainer what engines hold as
    MXFP8, and the checkpoint names in `quantise` beside. sample: moves that every engine rank recomputes by the reference before
    each commit. bucket_bytes: most payload of a message on the wires that stage, `ipc_staged` and `collective`.
    """

    wire: WireName = "shm"
    unused: tuple[str, ...] = ()
    caches: CachePolicy = "reset"
    deadline_s: float = DEADLINE_S
    resident: bool = False
    prequantize: bool = False
    quantise: tuple[str, ...] = ()
    sample: int = 0
    bucket_bytes: int = BUCKET_BYTES


class RefitReport(msgspec.Struct, frozen=True):
    """One refit as every trainer rank sees it.

    seconds: `quantise`, `publish` (this rank's part of the wire), `transfer` (wire `collective`: until its last byte was taken),
    `update` (from the call to the engine's commit), `total`. nbytes: what
    travelled to all engine ranks. link: share of the memory copy rate measured at prepare (read and write both counted).
    engines: the reports of all engine ranks, by engine. sent: payload bytes that this rank itself sent, by engine rank (wire
    `collective`); where engine ranks of a site hand boxes to each other, `nbytes` counts every copy and `sent` the one.
    """

    version: str
    seconds: dict[str, float]
    nbytes: int
    gbytes_per_s: float
    link: float
    engines: list[list[UpdateReport]]
    sent: dict[int, int] = {}


class _Description(msgspec.Struct):
    """What a rank tells rank 0 about itself."""

    tensors: dict[str, TensorSpec]
    aliases: dict[str, str]
    placements: PackedPlacements
    site: str


class _Share(msgspec.Struct):
    """What rank 0 tells a rank about the plan."""

    manifest: Manifest
    plan: PackedPlan
    wire: bytes
    total: int


class _Verdict(msgspec.Struct):
    seconds: float
    engines: list[list[UpdateReport]]


class MegatronSender:
    """One trainer rank's sender. All methods are collective over the trainer's ranks; errors are raised on all of them."""

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        bridge: Any,
        engine: EngineClient | Sequence[EngineClient] | None,
        config: SenderConfig | None = None,
    ) -> None:
        """model_chunks: Megatron's model chunks of this rank. bridge: the `AutoBridge` that made them. engine: a client, or one
        for each engine that is refitted together, on rank 0; None on the others.
        """
        self.config = config or SenderConfig()
        _check(self.config)
        self._chunks, self._bridge = model_chunks, bridge
        self._engines = [engine] if isinstance(engine, EngineClient) else list(engine or [])
        self.ranks = Ranks(self.config.deadline_s + 2 * LATE_S)
        self.source: SourceMap | None = None
        self._prequantised: Prequantised | None = None
        self.plan: Plan | None = None
        self.replies: list[list[PrepareReply]] = []
        self._first_rank: list[int] = []
        self._sender: Sender | None = None
        self._total = 0
        self._link = 0.0

    # -- prepare -------------------------------------------------------------------------------------------------------------

    def prepare(self) -> Plan:
        """Build the plan with the engine and open the wire. Returns the joint plan on rank 0, this rank's share elsewhere.

        Raises ConfigError (a shard that can't be described), PlanError or ManifestError (names, shapes, coverage, ranks that
        disagree), WireError (no room), all with every problem found.
        """
        self.close()
        names: frozenset[str] = frozenset()
        if self.config.prequantize:
            asked = self.ranks.exchange(answer_of(self._describe), self._ask_what_to_quantise)
            names = frozenset(msgspec.msgpack.decode(asked, type=list[str]))
        raw = self.ranks.exchange(answer_of(lambda: self._describe(names)), self._plan_together)
        share = msgspec.msgpack.decode(raw, type=_Share)
        if self.ranks.rank != 0:
            self.plan = unpack_plan(share.plan, share.manifest)
        self._total = share.total
        self.ranks.exchange(answer_of(lambda: self._open(share)), lambda _: [b""] * self.ranks.size)
        assert self.plan is not None
        return self.plan

    def _describe(self, names: Collection[str] = ()) -> bytes:
        self.source = source_map(self._chunks, self._bridge, rank=self.ranks.rank)
        loose = [
            b.name for b, t in zip(self.source.placements.buffers, self.source.tensors, strict=True) if not t.is_contiguous()
        ]
        if loose:
            raise ConfigError("tensors of the trainer are not contiguous", where="the source map", got=loose[:5])
        tensors = {name: TensorSpec(shape, dtype) for name, (shape, dtype) in self.source.manifest.items()}
        if names:
            self._prequantised = Prequantised(tensors, self.source.placements, self.source.tensors, names)
            tensors = self._prequantised.specs
        return msgspec.msgpack.encode(_Description(tensors, self.source.aliases, pack_placements(self._placements), this_site()))

    @property
    def _placements(self) -> Placements:
        """What this rank offers: its shards, or codes and scales of those that it quantises."""
        assert self.source is not None
        return self.source.placements if self._prequantised is None else self._prequantised.placements

    @property
    def _tensors(self) -> list[torch.Tensor]:
        """The memory of the buffers of `_placements`, in their order."""
        assert self.source is not None
        return self.source.tensors if self._prequantised is None else self._prequantised.tensors

    def _ask_what_to_quantise(self, raw: list[bytes]) -> list[bytes]:
        """On rank 0: the names that the engines hold as MXFP8, and those that the configuration adds."""
        manifest, sources = self._offered(raw)
        names, first = set(self.config.quantise), 0
        for engine in self._engines:
            replies = engine.prepare(pack_offer(Offer(manifest, sources, first)), {"prequantize": True})
            raise_problems(replies)
            names |= {name for reply in replies for name in reply.quantise}
            first += len(replies)
        unknown = [
            Problem("it is to be quantised and not offered", f"tensor {n!r}", do=suggest(n, manifest.tensors))
            for n in sorted(names - set(manifest.tensors))
        ]
        if unknown:
            raise ConfigError.of(unknown)
        return [msgspec.msgpack.encode(sorted(names))] * self.ranks.size

    def _offered(self, raw: list[bytes]) -> tuple[Manifest, Placements]:
        if not self._engines:
            raise ConfigError("trainer rank 0 needs an engine client", where="MegatronSender", do="pass engine= on rank 0")
        described = [msgspec.msgpack.decode(r, type=_Description) for r in raw]
        manifest = _merge(described)
        sources = concatenate([unpack_placements(d.placements) for d in described])
        return manifest, Placements.from_rows(sources.buffers, [], list(manifest.tensors)) if not len(sources) else sources

    def _plan_together(self, raw: list[bytes]) -> list[bytes]:
        """On rank 0: offer what all ranks hold, plan with what the engines answer, and cut the plan for the ranks."""
        manifest, sources = self._offered(raw)
        at = tuple(msgspec.msgpack.decode(r, type=_Description).site for r in raw)
        fp8_config = {"prequantize": True} if self.config.prequantize else None
        targets, read = [], set(self.config.unused)
        self.replies, self._first_rank, first = [], [], 0
        for engine in self._engines:
            replies = engine.prepare(pack_offer(Offer(manifest, sources, first, at)), fp8_config)
            raise_problems(replies)
            tables = [unpack_placements(r.targets) for r in replies if r.targets is not None]
            targets += tables
            read |= {t.names[i] for t in tables for i in np.unique(t.tensor)}
            self.replies.append(replies)
            self._first_rank.append(first)
            first += len(replies)
        problems = check_consumed(manifest, read)
        if problems:
            raise PlanError.of(problems, f"{len(problems)} offered tensor(s) go nowhere")
        sites = Sites(at, [r.site for replies in self.replies for r in sorted(replies, key=lambda r: r.rank)])
        self.plan = build_plan(manifest, sources, concatenate(targets), distances(at, dict(enumerate(sites.engines))))
        self._check_digests()
        return self._shares(self.plan, sites)

    def _check_digests(self) -> None:
        assert self.plan is not None
        problems = []
        for replies, first in zip(self.replies, self._first_rank, strict=True):
            for reply in replies:
                mine = self.plan.digest(first + reply.rank)
                if reply.digest != mine:
                    where = f"engine rank {first + reply.rank}"
                    problems.append(Problem("it holds another plan than the trainer", where, reply.digest[:16], mine[:16]))
        if problems:
            raise PlanError.of(problems, "the two sides disagree on the plan; install the same version of this project on both")

    def _shares(self, plan: Plan, sites: Sites) -> list[bytes]:
        wires = wire(self.config.wire).shares(plan, sites, self.config.bucket_bytes)
        total = int(plan.nbytes.sum())
        return [
            msgspec.msgpack.encode(_Share(plan.manifest, pack_plan(plan.for_source(rank)), wires[rank], total))
            for rank in range(self.ranks.size)
        ]

    def _open(self, share: _Share) -> bytes:
        assert self.source is not None
        self._sender = wire(self.config.wire).open_sender(self.ranks.rank, share.wire, self._tensors)
        if isinstance(self._sender, ResidentSender):
            self._sender.resident = self.config.resident
        self._link = copy_rate(self.source.tensors[0].device if self.config.wire.startswith("ipc") else "cpu")
        return b""

    # -- refit ---------------------------------------------------------------------------------------------------------------

    def refit(self, version: str) -> RefitReport:
        """Hand the current weights to the engine as `version`. Returns when every engine rank serves them.

        Raises SessionError before `prepare`, WireError where the trainer's memory moved, and what the engine raised.
        """
        try:
            report = self._refit(version)
        except RefitError as error:
            metrics.failed(type(error).__name__)
            raise
        if self.ranks.rank == 0:
            metrics.succeeded(report.seconds, report.nbytes)
        return report

    def _refit(self, version: str) -> RefitReport:
        if self.plan is None or self.source is None:
            raise SessionError("refit was called before prepare", where="MegatronSender.refit", do="call prepare() on every rank")
        start = time.perf_counter()
        seconds: dict[str, float] = {}
        sent: dict[int, int] = {}

        def publish() -> bytes:
            self._live_source()
            begin = time.perf_counter()
            if self._prequantised is not None:
                assert self.source is not None
                self._prequantised.fill(self.source.tensors)
                seconds["quantise"], begin = time.perf_counter() - begin, time.perf_counter()
            assert self._sender is not None
            part = self._sender.begin(self._tensors)
            seconds["publish"] = time.perf_counter() - begin
            return part

        if isinstance(self._sender, ActiveSender):
            verdict = self._refit_actively(self._sender, publish, version, seconds, sent)
        else:
            try:
                raw = self.ranks.exchange(answer_of(publish), lambda parts: self._update_engines(version, parts))
            except RefitError:
                if isinstance(self._sender, ResidentSender):
                    self._sender.forget()
                raise
            verdict = msgspec.msgpack.decode(raw, type=_Verdict)
        seconds |= {"update": verdict.seconds, "total": time.perf_counter() - start}
        rate = self._total / seconds["total"] / 1e9
        return RefitReport(version, seconds, self._total, rate, 2 * rate / self._link, verdict.engines, sent)

    def _live_source(self) -> SourceMap:
        assert self.source is not None
        self.source.settle()
        self.source.refresh()
        return self.source

    def _update_engines(self, version: str, parts: list[bytes]) -> list[bytes]:
        begin = time.perf_counter()
        field: dict[str, Any] = {self.config.wire: wire(self.config.wire).info(parts)}
        engines = [engine.update(info) for engine, info in zip(self._engines, self._messages(version, field), strict=True)]
        verdict = msgspec.msgpack.encode(_Verdict(time.perf_counter() - begin, engines))
        return [verdict] * self.ranks.size

    def _messages(self, version: str, field: dict[str, Any], session: str = "") -> list[UpdateInfo]:
        """What each engine is told."""
        session = session or secrets.token_hex(8)
        return [
            UpdateInfo(
                wire=self.config.wire,
                version=version,
                session=session,
                digests={str(r.rank): r.digest for r in replies},
                deadline_s=self.config.deadline_s,
                caches=self.config.caches,
                sample=self.config.sample,
                **field,
            )
            for replies in self.replies
        ]

    def _refit_actively(
        self,
        sender: ActiveSender,
        publish: Callable[[], bytes],
        version: str,
        seconds: dict[str, float],
        sent: dict[int, int],
    ) -> _Verdict:
        """A refit in which every trainer rank works while the engines' calls run."""
        name = self.config.wire

        def announce(parts: list[bytes]) -> list[bytes]:
            field: dict[str, Any] = {name: wire(name).info(parts)}
            update = self._messages(version, field)[0]
            return [msgspec.msgpack.encode(update)] * self.ranks.size

        update = msgspec.msgpack.decode(self.ranks.exchange(answer_of(publish), announce), type=UpdateInfo)
        info, deadline = getattr(update, name), time.monotonic() + self.config.deadline_s
        begin = time.perf_counter()
        calls = None
        if self.ranks.rank == 0:
            messages = self._messages(version, {name: info}, update.session)
            calls = Calls(self._engines, messages, lambda error: sender.refuse(update.session, error, deadline + LATE_S))

        def work() -> bytes:
            failed: RefitError | None = None
            try:
                sent.update(sender.transfer(update.session, info, deadline))
            except RefitError as error:
                failed = error
            seconds["transfer"] = time.perf_counter() - begin
            if calls is not None:
                return msgspec.msgpack.encode(calls.reports(failed, self.config.deadline_s + 2 * LATE_S))
            if failed is not None:
                raise failed
            return b""

        def conclude(parts: list[bytes]) -> list[bytes]:
            engines = msgspec.msgpack.decode(parts[0], type=list[list[UpdateReport]])
            return [msgspec.msgpack.encode(_Verdict(time.perf_counter() - begin, engines))] * self.ranks.size

        return msgspec.msgpack.decode(self.ranks.exchange(answer_of(work), conclude), type=_Verdict)

    # -- verify and close ----------------------------------------------------------------------------------------------------

    def verify(self) -> int:
        """Compare digests of every tensor on every engine rank with what this trainer holds now. Returns tensors compared.

        Raises VerifyError naming, for each engine rank, the first tensor that differs.
        """
        if self.plan is None or self.source is None:
            raise SessionError("verify was called before prepare", where="MegatronSender.verify", do="call prepare() and refit()")
        return int(self.ranks.exchange(answer_of(self._digests), self._verify_engines))

    def _digests(self) -> bytes:
        self._live_source()
        assert self.plan is not None
        share = self.plan.for_source(self.ranks.rank)
        place = {(b.rank, b.name): i for i, b in enumerate(self._placements.buffers)}
        memory = _Memory(
            {i: as_bytes(self._tensors[place[b.rank, b.name]]) for i, b in enumerate(share.sources) if (b.rank, b.name) in place}
        )

        scales = PlacedScales(share, self._placements, self._tensors)

        def content(move: int) -> Content:
            return sent_content(share, move, memory, scales)

        by_rank = {
            int(r): sum_by_tensor(share, np.flatnonzero(share.target_rank == r).tolist(), content)
            for r in np.unique(share.target_rank)
        }
        return msgspec.msgpack.encode(by_rank)

    def _verify_engines(self, raw: list[bytes]) -> list[bytes]:
        total: dict[int, dict[str, int]] = {}
        for part in (msgspec.msgpack.decode(r, type=dict[int, dict[str, int]]) for r in raw):
            for rank, digests in part.items():
                mine = total.setdefault(rank, {})
                for name, value in digests.items():
                    mine[name] = (mine.get(name, 0) + value) % MODULUS
        count = 0
        for engine, replies, first in zip(self._engines, self.replies, self._first_rank, strict=True):
            want = {str(r.rank): {n: f"{v:016x}" for n, v in total.get(first + r.rank, {}).items()} for r in replies}
            engine.verify(want)
            count += sum(len(w) for w in want.values())
        return [str(count).encode()] * self.ranks.size

    def close(self) -> None:
        """Give back what this rank's half of the wire holds. `prepare` may be called again."""
        if self._sender is not None:
            self._sender.close()
        self._sender, self.plan, self.source, self._prequantised = None, None, None, None


class _Memory:
    """The trainer's own tensors as a reader."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors = tensors

    def memory(self, buffer: int) -> torch.Tensor:
        return self._tensors[buffer]


def _check(config: SenderConfig) -> None:
    problems = []
    if config.deadline_s <= 0:
        problems.append(Problem("the deadline must be positive", "SenderConfig.deadline_s", str(config.deadline_s)))
    if config.bucket_bytes < SMALLEST_BUCKET:
        wanted = f"at least {SMALLEST_BUCKET}"
        problems.append(Problem("a bucket is too small", "SenderConfig.bucket_bytes", str(config.bucket_bytes), wanted))
    if problems:
        raise ConfigError.of(problems)


def copy_rate(device: torch.device | str = "cpu") -> float:
    """GB/s, read plus written, of a copy in the memory of `device`, 64 MiB on a CPU and 1 GiB on a GPU: the ceiling of a refit
    there."""
    device = torch.device(device)
    size = LINK_BYTES * (16 if device.type == "cuda" else 1)
    a, b = torch.ones(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(4):
        wait_for(device)
        begin = time.perf_counter()
        b.copy_(a)
        wait_for(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size / best / 1e9


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _merge(described: list[_Description]) -> Manifest:
    """One manifest of all ranks. Raises ManifestError where ranks disagree. What nobody offers, the engine's replies name."""
    tensors: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    problems = []
    for rank, d in enumerate(described):
        aliases |= d.aliases
        for name, spec in d.tensors.items():
            known = tensors.setdefault(name, spec)
            if known != spec:
                what = "trainer ranks disagree on it"
                got, wanted = f"{spec.dtype} {list(spec.shape)} on rank {rank}", f"{known.dtype} {list(known.shape)}"
                problems.append(Problem(what, f"tensor {name!r}", got, wanted))
    if problems:
        raise ManifestError.of(problems, f"the trainer's ranks do not add up to a checkpoint: {len(problems)} problem(s)")
    return Manifest(tensors, {a: n for a, n in aliases.items() if a not in tensors and n in tensors})
