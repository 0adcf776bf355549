"""Halves of a wire that are opened and closed leave nothing behind: descriptors, mapped files and threads stay what they were."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ring_ranks import crossed
from tests.support.wire_refit import refit
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.wires import release, wire

ENDS_S = 10.0
"""torch ends the threads of a group when it likes."""


def left() -> tuple[int, int, int]:
    """Descriptors, mapped files of ours, threads."""
    maps = Path("/proc/self/maps").read_text().count("/refit-")
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


@pytest.mark.parametrize("name", ["shm", "ring", "collective"])
def test_both_halves_leave_nothing_behind(name):
    """Twenty times, each with a new trainer to an engine rank that keeps what it kept; then with a new engine rank too."""
    plan, tensors, whole = crossed(1, 1)
    (share,) = wire(name).send_tables(plan, Hosts("a", "a"), 1 << 20)
    senders = []  # whoever holds on to a closed sender holds nothing of the wire

    def once(session: str, kept: dict[str, Any]) -> None:
        sender = wire(name).open_sender(0, share, tensors)
        senders.append(sender)
        targets = refit(name, sender, plan, tensors, kept, session)
        sender.close()
        sender.close()
        assert all(torch.equal(targets[f"t{i}.0"], t) for i, t in enumerate(whole))

    def grown() -> bool:
        return any(b > a for a, b in zip(before, left(), strict=True))

    kept: dict[str, Any] = {}
    for number in range(3):
        once(f"first {number}", kept)
    release(kept)
    before = left()
    for number in range(10):
        once(f"same {number}", kept)
    release(kept)
    for number in range(10):
        fresh: dict[str, Any] = {}
        once(f"new {number}", fresh)
        release(fresh)
    end = time.monotonic() + ENDS_S
    while grown() and time.monotonic() < end:
        time.sleep(0.1)
    assert not grown(), (before, left())
