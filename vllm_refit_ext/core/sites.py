"""Sites: which ranks can map each other's memory, and which bytes must cross a network.

A site is one host as its processes see it: the host name (containers of one machine have names of their own, and no common
shared memory) and the kernel's boot id. Two ranks of one site may use CUDA IPC and shared memory with each other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

SITE = "VLLM_REFIT_SITE"
"""Environment variable that names this process's site, where host names do not tell."""


class Sites(msgspec.Struct, frozen=True):
    """The site of every trainer rank and of every engine rank, in the plan's numbers."""

    trainers: Sequence[str]
    engines: Sequence[str]

    @classmethod
    def single(cls, trainers: int, engines: int) -> Sites:
        """All ranks on one host."""
        return cls(("",) * trainers, ("",) * engines)


def apart(one: str, other: str) -> bool:
    """Whether ranks of these sites can't map each other's memory. An empty name is a site that nobody told: it is near all."""
    return bool(one and other and one != other)


def distances(trainers: Sequence[str], engines: Mapping[int, str]) -> NDArray[np.int8]:
    """int8 [trainer ranks, engine ranks]: 1 between sites, else 0, as `build_plan` takes it. engines: site by engine rank."""
    found = np.zeros((len(trainers), 1 + max(engines, default=-1)), np.int8)
    for rank, site in engines.items():
        found[:, rank] = [apart(other, site) for other in trainers]
    return found


def not_shared(other: str) -> str:
    """What to do where memory of a trainer rank on site `other` can't be opened from this process."""
    here = this_site()
    if not apart(other, here):
        return f"check that the trainer has not ended, and that both see the same shared memory and GPUs (site {here!r})"
    return (
        f"the trainer rank is on site {other!r} and this process on {here!r}: use wire ring, which relays between hosts, "
        f"or wire collective; for containers of one host, share /dev/shm and name that host in {SITE} for both"
    )


def this_site() -> str:
    """The name of this process's site."""
    if named := os.environ.get(SITE):
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{platform.node()}/{boot[:8]}"
