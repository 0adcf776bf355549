"""Wire `collective` over NCCL between two or three GPUs: exact, with the plan's bytes; a dead peer is an error, not the end of
the process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.collective_ranks import Rank, tables
from vllm_refit_ext.core.plan import build_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def _rank(folder: str, rank: int, bucket: int) -> Rank:
    torch.cuda.set_device(rank)
    return Rank(folder, rank, bucket, trainers=1, engines=1, device=f"cuda:{rank}")


def _several(folder: str, rank: int, bucket: int) -> Any:
    me = _rank(folder, rank, bucket)
    return [me.refit(f"s{i}", i, 120.0) for i in range(3)]


def _late(folder: str, rank: int, bucket: int) -> Any:
    """The engine's rank sleeps through the deadline after all have met, then takes part in the next refit."""
    me = _rank(folder, rank, bucket)
    me.refit("a", 0, 120.0)
    out = me.failure("b", deadline_s=6.0, during=lambda: time.sleep(12.0 * rank))
    me.refit("c", 2, 120.0)
    return out


def _dies(folder: str, rank: int, bucket: int) -> Any:
    me = _rank(folder, rank, bucket)
    me.refit("a", 0, 120.0)
    if rank == 1:
        me.refit("b", 1, 10.0, during=lambda: os.kill(os.getpid(), signal.SIGKILL))
    return me.failure("b", deadline_s=10.0)


def _call(function: Any, folder: str, rank: int, bucket: int, out: Any) -> None:
    out.put((rank, function(folder, rank, bucket)))


def run(function: Any, folder: Path, bucket: int = 64, expected: int = 2, ranks: int = 2) -> dict[int, Any]:
    """Results of all processes, in at most two minutes."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_call, args=(function, str(folder), r, bucket, out), daemon=True) for r in range(ranks)]
    for p in processes:
        p.start()
    try:
        return dict(out.get(timeout=120) for _ in range(expected))
    finally:
        for p in processes:
            p.kill()
            p.join()


@pytest.mark.parametrize("bucket", [64, 1 << 20])
def test_refits_are_exact(tmp_path: Path, bucket: int) -> None:
    results = run(_several, tmp_path, bucket)
    manifest, sources, targets = tables(1, 1)
    nbytes = sum(e.nbytes for e in build_plan(manifest, sources, targets[0]).edges())
    assert results == {0: [{0: nbytes}] * 3, 1: [{0: nbytes}] * 3}


def test_a_late_rank_fails_both_by_the_deadline_and_the_next_refit_works(tmp_path: Path) -> None:
    results = run(_late, tmp_path)
    assert results[0][0] == "DeadlineError"
    assert results[0][2] < 10
    assert results[1][0] in ("DeadlineError", "WireError")


def test_a_killed_rank_is_an_error_by_the_deadline(tmp_path: Path) -> None:
    kind, text, seconds = run(_dies, tmp_path, expected=1)[0]
    assert kind in ("DeadlineError", "WireError"), text
    assert seconds < 14
