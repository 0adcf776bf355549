"""Hosts: which ranks can map each other's memory, and which bytes must cross a network.

A host is known by the name that its processes see (containers of one machine have names of their own, and no common shared
memory) and by the kernel's boot id. Two ranks of one host may use CUDA IPC and shared memory with each other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from vllm_refit_ext.core.plan import Edge

HOST_ID = "VLLM_REFIT_HOSTID"
"""Environment variable that names this process's host, where host names do not tell."""


class Hosts(msgspec.Struct, frozen=True):
    """The host of every trainer rank and of every engine rank, in the plan's numbers."""

    trainers: Sequence[str]
    engines: Sequence[str]

    @classmethod
    def single(cls, trainers: int, engines: int) -> Hosts:
        """All ranks on one host."""
        return cls(("",) * trainers, ("",) * engines)


def apart(one: str, other: str) -> bool:
    """Whether ranks of these hosts can't map each other's memory. An empty name is a host without a name: it is near all."""
    return bool(one and other and one != other)


def distances(trainers: Sequence[str], engines: Mapping[int, str]) -> NDArray[np.int8]:
    """int8 [trainer ranks, engine ranks]: 1 between hosts, else 0, as `build_plan` takes it. engines: host by engine rank."""
    found = np.zeros((len(trainers), 1 + max(engines, default=-1)), np.int8)
    for rank, host in engines.items():
        found[:, rank] = [apart(other, host) for other in trainers]
    return found


def not_shared(other: str) -> str:
    """What to do where memory of a trainer rank on host `other` can't be opened from this process."""
    here = this_host()
    if not apart(other, here):
        return f"check that the trainer has not ended, and that both see the same shared memory and GPUs (host {here!r})"
    return (
        f"the trainer rank is on host {other!r} and this process on {here!r}: use wire nixl or "
        f"collective; for containers of one host, share /dev/shm and name that host in {HOST_ID} for both"
    )


def check_near(wire: str, edges: Sequence[Edge], hosts: Hosts) -> None:
    """Raises ConfigError that names every host whose engine ranks need bytes of another one, which `wire` can't bring. Engine
    ranks whose host is not known yet, as those that will take a version, find it out for themselves."""
    far: dict[str, set[int]] = {}
    for edge in edges:
        if edge.target < len(hosts.engines) and apart(hosts.trainers[edge.source], hosts.engines[edge.target]):
            far.setdefault(hosts.engines[edge.target], set()).add(edge.target)
    do = (
        "use wire nixl, or wire collective for engines with GPUs of their own; if these processes do share a host, its GPUs and "
        f"its /dev/shm, set {HOST_ID} to one name for all of them"
    )
    problems = [
        Problem(
            f"engine ranks need bytes of another host, and wire {wire} reads memory of its own host alone",
            where=f"engine rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks))} on {host!r}",
            got=f"trainer ranks on {', '.join(map(repr, sorted(set(hosts.trainers))))}",
            wanted="all that an engine rank needs on its host",
            do=do,
        )
        for host, ranks in sorted(far.items())
    ]
    if problems:
        raise ConfigError.of(problems)


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """Ranks for people, with how many are left out."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more


def this_host() -> str:
    """The name of this process's host."""
    return os.environ.get(HOST_ID) or f"{platform.node()}/{machine()}"


def machine() -> str:
    """The running kernel, whatever the host is called: what is not on it can't be mapped from here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "unknown"
