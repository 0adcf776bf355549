"""Sites: which ranks can map each other's memory, and which bytes must cross a network.

A site is one host as its processes see it: the host name (containers of one machine have names of their own, and no common
shared memory) and the kernel's boot id. Two ranks of one site may use CUDA IPC and shared memory with each other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

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


def this_site() -> str:
    """The name of this process's site."""
    if named := os.environ.get(SITE):
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{platform.node()}/{boot[:8]}"
