"""Relays: which trainer rank of an engine rank's own site passes on the bytes of a trainer rank on another site.

Memory of another host can't be mapped. Where trainer and engines share their GPUs, every engine rank has trainer ranks beside
it, and those can receive what lies elsewhere and show it to the engine rank as they show their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.plan import Edge
from vllm_refit_ext.core.sites import SITE, Sites, apart

Relays = dict[tuple[int, int], int]
"""(trainer rank that holds the bytes, engine rank that needs them) -> the trainer rank that passes them on."""


def choose_relays(edges: Sequence[Edge], sites: Sites) -> Relays:
    """A relay for every edge of the plan between two sites, none for the others.

    The largest edges are dealt out first, each to the rank of its engine rank's site that has the fewest bytes to pass on so far,
    so no rank passes on more than its site's mean and one edge.

    Raises ConfigError that names every engine rank which needs bytes of another site and has no trainer rank on its own.
    """
    ranks: dict[str, list[int]] = {}
    for rank, site in enumerate(sites.trainers):
        ranks.setdefault(site, []).append(rank)
    far = [e for e in edges if apart(sites.trainers[e.source], sites.engines[e.target])]
    problems = _stranded(far, ranks, sites)
    if problems:
        raise ConfigError.of(problems)
    load = [0] * len(sites.trainers)
    relays: Relays = {}
    for edge in sorted(far, key=lambda e: (-e.nbytes, e.target, e.source)):
        relay = min(ranks[sites.engines[edge.target]], key=lambda r: (load[r], r))
        load[relay] += edge.nbytes
        relays[edge.source, edge.target] = relay
    return relays


def _stranded(far: Sequence[Edge], ranks: dict[str, list[int]], sites: Sites) -> list[Problem]:
    """A problem for each site that has engine ranks and no trainer rank."""
    found: dict[str, set[int]] = {}
    for edge in far:
        if sites.engines[edge.target] not in ranks:
            found.setdefault(sites.engines[edge.target], set()).add(edge.target)
    held = "; ".join(f"trainer rank{'s' if len(r) > 1 else ''} {_listed(r)} on {site!r}" for site, r in sorted(ranks.items()))
    do = (
        f"use wire collective, whose engines have GPUs of their own; if these processes do share a host, its GPUs and its "
        f"/dev/shm, set {SITE} to one name for all of them"
    )
    return [
        Problem(
            "no trainer rank lives on the site of engine ranks that read the trainer's memory",
            f"engine rank{'s' if len(engines) > 1 else ''} {_listed(sorted(engines))} on {site!r}",
            held,
            "a trainer rank on the same site, which can pass bytes on",
            do,
        )
        for site, engines in sorted(found.items())
    ]


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
