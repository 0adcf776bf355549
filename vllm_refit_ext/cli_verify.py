"""What running engines say that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import Problem
from vllm_refit_ext.core.messages import Status, VerifyReply

if TYPE_CHECKING:
    from rich.table import Table


class EngineState(msgspec.Struct, frozen=True):
    """One engine: its address, and each rank's status and digests."""

    url: str
    ranks: list[Status]
    digests: list[VerifyReply]


class Answer(msgspec.Struct, frozen=True):
    """All engines, and what is wrong with them."""

    engines: list[EngineState]
    problems: list[Problem]


def ask(urls: Sequence[str]) -> Answer:
    """Status and digests of every rank. Raises WireError for a server that can't be reached, VerifyError for ranks without
    digests.
    """
    engines = []
    for url in urls:
        client = HTTPClient(url)
        ranks = client.status()
        ready = all(r.state == "ready" for r in ranks)
        engines.append(EngineState(url, ranks, client.verify() if ready else []))
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
    first: dict[int, EngineState] = {}
    for e in engines:
        other = first.setdefault(len(e.ranks), e)
        for mine, theirs in zip(e.digests, other.digests, strict=False):
            names = [n for n in mine.digests if n in theirs.digests and mine.digests[n] != theirs.digests[n]]
            if names:
                what = f"{len(names)} tensor(s) differ from {other.url}, the first is {names[0]!r}"
                found.append(Problem(what, f"{e.url} rank {mine.rank}", do="run a full refit of both"))
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
