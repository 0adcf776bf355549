"""What running engines say that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import Problem
from vllm_refit_ext.core.messages import Status, VerifyReply

if TYPE_CHECKING:
    from rich.table import Table


class EngineState(msgspec.Struct, frozen=True):
    """One engine: its address, each rank's status and digests, and by rank as text what the checkpoint says that they must be."""

    url: str
    ranks: list[Status]
    digests: list[VerifyReply]
    wanted: dict[str, dict[str, str]] = {}


class Answer(msgspec.Struct, frozen=True):
    """All engines, and what is wrong with them."""

    engines: list[EngineState]
    problems: list[Problem]


def ask(urls: Sequence[str], checkpoint: Path | None = None) -> Answer:
    """Status and digests of every rank; with `checkpoint`, a folder of safetensors files, compared with those of its tensors.

    An engine that is compared with a checkpoint plans for it: what a trainer had prepared is forgotten. Raises WireError for a
    server that can't be reached, VerifyError for ranks without digests, ConfigError and PlanError for a checkpoint that can't be
    read or does not fit the engine.
    """
    held = None
    if checkpoint is not None:
        from vllm_refit_ext.tools.checkpoint import Checkpoint

        held = Checkpoint(checkpoint)
    engines = []
    for url in urls:
        client = HTTPClient(url)
        wanted: dict[str, dict[str, str]] = {}
        if held is not None and all(r.state != "torn" for r in client.status()):
            wanted = {str(rank): names for rank, names in held.digests(client.prepare(held.offer())).items()}
        ranks = client.status()
        ready = all(r.state == "ready" for r in ranks)
        engines.append(EngineState(url, ranks, client.verify() if ready else [], wanted))
    return Answer(engines, problems(engines))


def problems(engines: Sequence[EngineState]) -> list[Problem]:
    """Ranks that are not ready, versions that differ, and engines of one size whose bytes differ."""
    found = []
    versions = {r.version for e in engines for r in e.ranks}
    for e in engines:
        for r in e.ranks:
            if r.state != "ready":
                do = "run a full refit" if r.state == "torn" else "wait, or call prepare_refit_info"
                found.append(Problem("it is not ready", f"{e.url} rank {r.rank}", r.state, "ready", do))
    if len(versions) > 1:
        got = ", ".join(sorted(repr(v) for v in versions))
        found.append(Problem("ranks serve different versions", "engines", got, "one version", "run a full refit"))
    for e in engines:
        found += _against_checkpoint(e)
    first: dict[int, EngineState] = {}
    for e in engines:
        other = first.setdefault(len(e.ranks), e)
        for mine, theirs in zip(e.digests, other.digests, strict=False):
            names = [n for n in mine.digests if n in theirs.digests and mine.digests[n] != theirs.digests[n]]
            if names:
                what = f"{len(names)} tensor(s) differ from {other.url}, the first is {names[0]!r}"
                found.append(Problem(what, f"{e.url} rank {mine.rank}", do="run a full refit of both"))
    return found


def _against_checkpoint(engine: EngineState) -> list[Problem]:
    """Tensors of a rank that are not the checkpoint's, and those whose bytes it can't read back."""
    found = []
    for reply in engine.digests:
        wanted, where = engine.wanted.get(str(reply.rank), {}), f"{engine.url} rank {reply.rank}"
        differs = [n for n, digest in wanted.items() if reply.digests.get(n, digest) != digest]
        unread = [n for n in wanted if n not in reply.digests]
        if differs:
            what = f"{len(differs)} tensor(s) are not the checkpoint's, the first is {differs[0]!r}"
            found.append(Problem(what, where, do="run a full refit, or name the checkpoint that it serves"))
        if unread:
            what = f"{len(unread)} tensor(s) can't be read back from the engine's layout, the first is {unread[0]!r}"
            do = "refit it with SenderConfig(hash_reloaded=True): then what is handed to vLLM's own reload is hashed"
            found.append(Problem(what, where, do=do))
    return found


def table(answer: Answer) -> Table:
    """`answer` for people."""
    from rich.table import Table

    result = Table(title="vllm-refit verify", title_justify="left")
    for name in ("engine", "rank", "state", "version", "tensors"):
        result.add_column(name, overflow="fold")
    for e in answer.engines:
        count = {r.rank: len(r.digests) for r in e.digests}
        for r in e.ranks:
            result.add_row(e.url, str(r.rank), r.state, r.version, str(count.get(r.rank, "")))
    for p in answer.problems:
        result.add_row("", "", "[red]problem[/red]", str(p), "")
    return result
