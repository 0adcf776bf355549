"""What engine ranks hold against what a trainer offers, by digests: less than everything is no comparison."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from vllm_refit_ext.core.errors import Problem, SessionError, VerifyError
from vllm_refit_ext.core.messages import VerifyReply

SHOWN = 20
"""Names in one error."""


def check_digests(replies: Iterable[VerifyReply], digests: Mapping[str, Mapping[str, str]]) -> None:
    """Compare. digests: by rank as text, by tensor, hexadecimal.

    Raises SessionError where a rank has no digest because nobody asked for it, else VerifyError where a tensor differs, naming
    the first on each rank, and where either side names other ranks or other tensors than the other.
    """
    problems, ranks = [], set()
    for reply in replies:
        ranks.add(str(reply.rank))
        check_hashed(digests.get(str(reply.rank), {}), reply.unhashed)
        problems += _differences(reply, digests)
    problems += [
        Problem(
            "digests were given for a rank that the engine does not have", f"engine rank {k!r}", wanted=f"{sorted(set(ranks))}"
        )
        for k in digests
        if k not in ranks
    ]
    if problems:
        raise VerifyError.of(problems, "the engine does not hold what the trainer offers")


def check_hashed(wanted: Collection[str], unhashed: Collection[str]) -> None:
    """Raise SessionError where a digest is wanted that the last refit was not asked to take."""
    missing = set(unhashed)
    if lacking := [name for name in wanted if name in missing]:
        raise SessionError(
            "tensors went through vLLM's own reload, and no refit was asked to hash them",
            where="refit_verify",
            got=", ".join(lacking[:SHOWN]) + (f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""),
            do="set SenderConfig(hash_reloaded=True), refit, then verify",
        )


def _differences(reply: VerifyReply, digests: Mapping[str, Mapping[str, str]]) -> list[Problem]:
    """What one rank's digests lack or hold otherwise."""
    where, wanted = f"engine rank {reply.rank}", digests.get(str(reply.rank))
    if wanted is None:
        got, do = ", ".join(map(repr, digests)) or "none", "pass those of every rank"
        return [Problem("no digests were given for it", where, f"ranks {got}", f"{str(reply.rank)!r}", do)]
    problems = []
    differs = [name for name, digest in reply.digests.items() if name in wanted and wanted[name] != digest]
    if differs:
        problems.append(Problem(f"{len(differs)} tensor(s) differ, the first is {differs[0]!r}", where, do="run a full refit"))
    for what, names in (
        ("its digest was not given", [name for name in reply.digests if name not in wanted]),
        ("the rank holds no such tensor to compare", [name for name in wanted if name not in reply.digests]),
    ):
        if names:
            problems.append(Problem(f"{len(names)} tensor(s) were not compared: {what}", where, f"{names[0]!r}"))
    return problems
