"""Relays of wire `ring` over NCCL: two trainer ranks on GPUs of two played hosts, and an engine rank on the second GPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.collective_ranks import tables
from tests.support.relay_ranks import Rank, at_message
from vllm_refit_ext.core.plan import build_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

RANKS = 3


def _rank(folder: str, rank: int, bucket: int) -> Rank:
    gpu = min(rank, 1)
    torch.cuda.set_device(gpu)
    return Rank(folder, rank, "ab", "b", bucket, device=f"cuda:{gpu}")


def _several(folder: str, rank: int, bucket: int) -> Any:
    me = _rank(folder, rank, bucket)
    out = []
    for i in range(3):
        out.append(me.refit(f"s{i}", i, 120.0))
        me.barrier(f"s{i}")
    me.close()
    return out


def _late(folder: str, rank: int, bucket: int) -> Any:
    """The relay sleeps through the deadline in the middle of the transfer, then takes part in the next refit."""
    me = _rank(folder, rank, bucket)
    me.refit("a", 0, 120.0)
    me.barrier("a")
    if rank == 1:
        at_message("receive", 3, lambda: time.sleep(12.0))
    out = me.failure("b", deadline_s=6.0)
    me.barrier("b")
    me.refit("c", 2, 120.0)
    me.barrier("c")
    me.close()
    return out


def _dies(folder: str, rank: int, bucket: int) -> Any:
    me = _rank(folder, rank, bucket)
    me.refit("a", 0, 120.0)
    me.barrier("a")
    if rank == 1:
        at_message("receive", 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return me.failure("b", deadline_s=10.0)


def _call(function: Any, folder: str, rank: int, bucket: int, out: Any) -> None:
    out.put((rank, function(folder, rank, bucket)))


def run(function: Any, folder: Path, bucket: int = 64, expected: int = RANKS) -> dict[int, Any]:
    """Results of all processes, in at most three minutes."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_call, args=(function, str(folder), r, bucket, out), daemon=True) for r in range(RANKS)]
    for p in processes:
        p.start()
    try:
        return dict(out.get(timeout=180) for _ in range(expected))
    finally:
        for p in processes:
            p.kill()
            p.join()


@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_refits_are_exact(tmp_path: Path, bucket: int) -> None:
    results = run(_several, tmp_path, bucket)
    manifest, sources, targets = tables(2, 1)
    edges = {e.source: e.nbytes for e in build_plan(manifest, sources, targets[0]).edges()}
    assert results == {0: [{0: edges[0]}] * 3, 1: [{0: edges[1]}] * 3, 2: [edges] * 3}


def test_a_late_relay_fails_all_by_the_deadline_and_the_next_refit_works(tmp_path: Path) -> None:
    results = run(_late, tmp_path)
    for rank, (kind, text, seconds) in results.items():
        assert kind in ("DeadlineError", "WireError"), text
        assert seconds < 10 or rank == 1


def test_a_killed_relay_is_an_error_by_the_deadline(tmp_path: Path) -> None:
    for kind, text, seconds in run(_dies, tmp_path, expected=2).values():
        assert kind in ("DeadlineError", "WireError"), text
        assert seconds < 20
