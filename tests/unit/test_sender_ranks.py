"""Senders of several trainer ranks: all prepared or none, and calls that stay in step after any failure of one rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

CODE = """
import os, sys
import torch, torch.distributed as dist
from tests.support.small_engine import SmallEngine
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender import RefitSender, SenderConfig, prepared as module

rank, wire, fault = int(sys.argv[1]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)


class Rows:
    aliases = {}
    specs = {"w": TensorSpec((8, 4), "float32")}
    tensors = [torch.full((4, 4), float(rank + 1))]
    placements = Placements.from_rows(
        [Buffer("mine", 0, "float32", (4, 4))], [Placement("w", 0, (4 * rank, 0), (4 * rank + 4, 4), 0, (16, 4))]
    )

    def refresh(self):
        if fault == "refresh" and Rows.broken and rank == 1:
            raise ZeroDivisionError("odd")


def said(call):
    try:
        call()
        return "ok"
    except RefitError as error:
        return f"{type(error).__name__} {error}".replace("\\n", " ")


engine = SmallEngine("http://a")
source = Rows()
sender = RefitSender(lambda: source, engine if rank == 0 else None, SenderConfig(wire=wire, deadline_s=30.0))
if fault == "digest":
    answer = engine._prepare_refit_info
    engine._prepare_refit_info = lambda *args: answer(*args) | {"digest": "0" * 64}
if fault == "open" and rank == 1:
    opened = module.Prepared
    import vllm_refit_ext.sender.sender as inner
    inner.Prepared = lambda *args, **named: 1 / 0
if fault == "describe" and rank == 1:
    source = None
Rows.broken = False
print(said(sender.prepare))
print(sender.prepared is not None)
Rows.broken = True
print(said(lambda: sender.refit("v")))
Rows.broken = False
if fault == "digest":
    engine._prepare_refit_info = answer
if fault == "open" and rank == 1:
    inner.Prepared = opened
if fault == "describe" and rank == 1:
    source = Rows()
print(said(sender.prepare))
print(said(lambda: sender.refit("v")))
print(said(lambda: sender.refit(f"only {rank}")))
print(said(lambda: sender.refit("w")))
print(said(sender.verify))
if rank == 0:
    print(engine.weights["w"][:, 0].tolist())
sys.stdout.flush()
dist.barrier()
sender.close()
os._exit(0)
"""

FAULTS = {
    "digest": "PlanError engine http://a · engine rank 0: it holds another plan than the trainer",
    "open": "RefitError trainer rank 1: ZeroDivisionError",
    "describe": "RefitError trainer rank 1: AttributeError",
}


def run(wire: str, fault: str) -> list[list[str]]:
    """What both ranks print."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [
        subprocess.Popen([sys.executable, "-c", CODE, str(rank), str(port), wire, fault], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [child.communicate(timeout=100)[0].splitlines() for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
            child.wait()


@pytest.mark.parametrize(("wire", "fault"), [("shm", "digest"), ("shm", "describe"), ("collective", "open"), ("shm", "refresh")])
def test_all_ranks_are_prepared_or_none(wire, fault):
    first, second = run(wire, fault)
    assert first[-1] == "[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]"
    for lines in (first, second):
        if fault == "refresh":
            assert lines[:2] == ["ok", "True"]
            assert lines[2].startswith("RefitError trainer rank 1: ZeroDivisionError: odd")
        else:
            assert lines[0].startswith(FAULTS[fault]), lines[0]
            assert lines[1] == "False"
            assert "refit was called before prepare" in lines[2]
        assert lines[3:5] == ["ok", "ok"]
        assert lines[5].startswith("SessionError trainer rank 1: it is in another call than rank 0 (got refit to 'only 1'")
        assert lines[6:8] == ["ok", "ok"]
