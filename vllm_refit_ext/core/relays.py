"""Relays: which trainer rank of an engine rank's own host passes on the bytes of a trainer rank on another host.

Memory of another host can't be mapped. Where trainer and engines share their GPUs, every engine rank has trainer ranks beside
it, and those can receive what lies elsewhere and show it to the engine rank as they show their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.hosts import HOST_ID, Hosts, apart
from vllm_refit_ext.core.plan import Edge

Relays = dict[tuple[int, int], int]
"""(trainer rank that holds the bytes, engine rank that needs them) -> the trainer rank that passes them on."""


def choose_relays(edges: Sequence[Edge], hosts: Hosts) -> Relays:
    """A relay for every edge of the plan between two hosts, none for the others.

    The largest edges are dealt out first, each to the rank of its engine rank's host that has the fewest bytes to pass on so far,
    so no rank passes on more than its host's mean and one edge.

    Raises ConfigError that names every engine rank which needs bytes of another host and has no trainer rank on its own.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts.trainers):
        ranks.setdefault(host, []).append(rank)
    far = [e for e in edges if apart(hosts.trainers[e.source], hosts.engines[e.target])]
    problems = _stranded(far, ranks, hosts)
    if problems:
        raise ConfigError.of(problems)
    load = [0] * len(hosts.trainers)
    relays: Relays = {}
    for edge in sorted(far, key=lambda e: (-e.nbytes, e.target, e.source)):
        relay = min(ranks[hosts.engines[edge.target]], key=lambda r: (load[r], r))
        load[relay] += edge.nbytes
        relays[edge.source, edge.target] = relay
    return relays


def _stranded(far: Sequence[Edge], ranks: dict[str, list[int]], hosts: Hosts) -> list[Problem]:
    """A problem for each host that has engine ranks and no trainer rank."""
    found: dict[str, set[int]] = {}
    for edge in far:
        if hosts.engines[edge.target] not in ranks:
            found.setdefault(hosts.engines[edge.target], set()).add(edge.target)
    have = "; ".join(f"trainer rank{'s' if len(r) > 1 else ''} {_listed(r)} on {host!r}" for host, r in sorted(ranks.items()))
    do = (
        f"use wire collective, whose engines have GPUs of their own; if these processes do share a host, its GPUs and its "
        f"/dev/shm, set {HOST_ID} to one name for all of them"
    )
    return [
        Problem(
            "no trainer rank lives on the host of engine ranks that read the trainer's memory",
            f"engine rank{'s' if len(engines) > 1 else ''} {_listed(sorted(engines))} on {host!r}",
            have,
            "a trainer rank on the same host, which can pass bytes on",
            do,
        )
        for host, engines in sorted(found.items())
    ]


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
