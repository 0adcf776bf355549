"""The engines of one sender, on trainer rank 0: prepared, refitted and verified together, each for itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from vllm_refit_ext.client import LATE_S, EngineClient, raise_problems
from vllm_refit_ext.core.compare import check_digests
from vllm_refit_ext.core.coverage import check_consumed
from vllm_refit_ext.core.errors import ConfigError, PlanError, Problem, RefitError
from vllm_refit_ext.core.hosts import Hosts, distances
from vllm_refit_ext.core.manifest import Manifest, Offer, pack_offer
from vllm_refit_ext.core.messages import PrepareReply, UpdateInfo, UpdateReport, VerifyReply
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import unpack_placements
from vllm_refit_ext.sender.calls import Calls, call_all, engine_name
from vllm_refit_ext.sender.prepared import EngineRanks

T = TypeVar("T")


class Engines:
    """Clients of all engines. What fails names its engine: by URL, or by number where a client has no name. keep: what they keep
    as it is."""

    def __init__(self, clients: Sequence[EngineClient], deadline_s: float, keep: Sequence[str] = ()) -> None:
        self.clients, self.deadline_s, self.keep = list(clients), deadline_s, keep

    def firsts(self) -> list[int]:
        """The plan's number of each engine's rank 0: they follow each other."""
        if len(self.clients) < 2:
            return [0] * len(self.clients)
        sizes = self._all(lambda _, engine: len({s.rank for s in engine.status(self.deadline_s)}), "they answer")
        return [sum(sizes[:i]) for i in range(len(sizes))]

    def prepare(
        self,
        manifest: Manifest,
        sources: Placements,
        hosts: tuple[str, ...],
        fp8_config: dict[str, Any] | None,
        unused: Sequence[str],
    ) -> list[EngineRanks]:
        """Offer to all engines. unused: names that need not be read. Raises PlanError with the problems of all of them."""
        firsts = self.firsts()

        def offer(index: int, engine: EngineClient) -> EngineRanks:
            offered = pack_offer(Offer(manifest, sources, firsts[index], hosts))
            replies = engine.prepare(offered, fp8_config, self.deadline_s, self.keep, unused)
            raise_problems(replies)
            return _one_replica(firsts[index], replies)

        return self._all(offer, "they are prepared")

    def plan(
        self, manifest: Manifest, sources: Placements, hosts: tuple[str, ...], ranks: Sequence[EngineRanks], unused: Sequence[str]
    ) -> tuple[Plan, Hosts]:
        """The joint plan from what the engines answered, which each engine rank must hold its part of. Raises PlanError."""
        tables = [unpack_placements(r.targets) for e in ranks for r in e.replies if r.targets is not None]
        read = {t.names[i] for t in tables for i in np.unique(t.tensor)}
        kept = {n for e in ranks for r in e.replies for n in r.kept if n in manifest.tensors}
        problems = check_consumed(manifest, read, [*unused, *kept])
        if problems:
            raise PlanError.of(problems, f"{len(problems)} offered tensor(s) go nowhere")
        at = Hosts(hosts, [r.host for e in ranks for r in e.replies])
        try:
            plan = build_plan(manifest, sources, concatenate(tables), distances(hosts, dict(enumerate(at.engines))))
        except PlanError as error:
            raise self.named(error, ranks) from None
        differ = [
            Problem(
                "it holds another plan than the trainer",
                f"{engine_name(i, client)} · engine rank {reply.rank}",
                reply.digest[:16],
                mine[:16],
            )
            for i, (client, engine) in enumerate(zip(self.clients, ranks, strict=True))
            for reply in engine.replies
            if reply.digest != (mine := plan.digest(engine.first + reply.rank))
        ]
        if differ:
            raise PlanError.of(differ, "the two sides disagree on the plan; install the same version of this project on both")
        return plan, at

    def update(
        self, messages: Sequence[UpdateInfo], failed: Callable[[int, RefitError], None] = lambda index, error: None
    ) -> Calls[list[UpdateReport]]:
        """Start the update calls of all engines. failed: called at once, with the number and the error of one that
        fails."""
        return Calls(self.clients, lambda index, engine: engine.update(messages[index]), failed)

    def reports(
        self, calls: Calls[list[UpdateReport]], version: str, transfer: RefitError | None = None
    ) -> list[list[UpdateReport]]:
        """What `update` started: the reports of all engine ranks, by engine. transfer: what this rank's own sending failed with.
        Raises as `Calls.results` does."""
        return calls.results(self.deadline_s + 2 * LATE_S, f"they serve version {version!r}", transfer)

    def digest(self) -> Calls[list[VerifyReply]]:
        """Start asking all engines for digests of what they hold."""
        return Calls(self._checked(), lambda index, engine: engine.verify(None, self.deadline_s))

    def compare(self, calls: Calls[list[VerifyReply]], wanted: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """What `digest` started, against `wanted`. Raises as `Calls.results` does, with what each engine holds otherwise."""
        done = "they hold what the trainer offers"
        replies = calls.results(self.deadline_s + LATE_S, done)
        call_all(self.clients, lambda index, _: check_digests(replies[index], wanted[index]), self.deadline_s, done)

    def named(self, error: RefitError, ranks: Sequence[EngineRanks]) -> RefitError:
        """The same error with every number that an engine rank has in the joint plan said as its engine and its own rank."""

        def own(match: re.Match[str]) -> str:
            number = int(match[1])
            index = max((i for i, e in enumerate(ranks) if e.first <= number), default=0)
            return f"{engine_name(index, self.clients[index])} · engine rank {number - ranks[index].first}"

        return type(error).of(
            [
                msgspec.structs.replace(p, **{f: re.sub(r"engine rank (\d+)", own, getattr(p, f)) for f in ("what", "where")})
                for p in error.problems
            ]
        )

    def _all(self, work: Callable[[int, EngineClient], T], done: str) -> list[T]:
        return call_all(self._checked(), work, self.deadline_s + LATE_S, done)

    def _checked(self) -> list[EngineClient]:
        if not self.clients:
            raise ConfigError("trainer rank 0 needs an engine client", where="the sender", do="pass engine= on rank 0")
        return self.clients


def _one_replica(first: int, replies: Sequence[PrepareReply]) -> EngineRanks:
    """The ranks of an engine, all of whose data parallel replicas must hold the same."""
    mine: dict[int, PrepareReply] = {}
    for reply in replies:
        if mine.setdefault(reply.rank, reply).digest != reply.digest:
            raise PlanError(
                "its data parallel replicas need different parts of the weights",
                where=f"engine rank {reply.rank}",
                got=reply.digest[:16],
                wanted=mine[reply.rank].digest[:16],
                do="start a server for each replica and pass a client for each",
            )
    return EngineRanks(first, [mine[rank] for rank in sorted(mine)], len(replies) // len(mine))
