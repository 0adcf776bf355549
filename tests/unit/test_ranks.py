"""The trainer's ranks: errors of one reach all, and a dead one is named within the deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError, WireError
from vllm_refit_ext.sender.ranks import Answer, Ranks, answer_of

CODE = """
import os, signal, sys
import torch.distributed as dist
from vllm_refit_ext.sender.ranks import Ranks, answer_of
from vllm_refit_ext.core.errors import RefitError, WireError

rank, mode = int(sys.argv[1]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=3)
ranks = Ranks(6.0)
answers = lambda values: [b"+".join(values) + b"@%d" % r for r in range(3)]
print(ranks.exchange(answer_of(lambda: b"x%d" % rank), answers).decode(), flush=True)

def work():
    if mode == "raise" and rank == 1:
        raise WireError("no room", where="here", got=1, wanted=2)
    if mode == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return b""

try:
    if mode == "apart":
        ranks.call("verify" if rank == 1 else "refit")
    elif mode == "left over":
        ranks.call("refit")
        try:
            if rank != 1:  # it failed before its exchange
                ranks.exchange(answer_of(lambda: b""), lambda values: [b""] * 3)
        except RefitError:
            pass
        ranks.call("prepare")
        print(ranks.exchange(answer_of(lambda: b"y%d" % rank), answers).decode(), flush=True)
        raise SystemExit
    if mode == "large":
        print(len(ranks.exchange(answer_of(lambda: bytes(3_000_000)), lambda values: [b"".join(values)] * 3)), flush=True)
        raise SystemExit
    ranks.exchange(answer_of(work), lambda values: [b"done"] * 3)
    print("done", flush=True)
except RefitError as error:
    print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
finally:
    if rank == 0:  # it hosts the store, so it stays until the others have read
        sys.stdin.read()
    os._exit(0)
"""


def run(mode: str) -> tuple[list[list[str]], float]:
    begin = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = probe.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(store), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    try:
        lines = [child.communicate(timeout=60)[0].splitlines() for child in (children[2], children[0])][::-1]
    finally:
        for child in children:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
    return lines, time.monotonic() - begin


def test_large_messages_are_sent_in_pieces() -> None:
    lines, _ = run("large")
    assert lines == [["x0+x1+x2@0", "9000000"], ["x0+x1+x2@2", "9000000"]]


def test_values_and_answers() -> None:
    lines, _ = run("ok")
    assert lines == [["x0+x1+x2@0", "done"], ["x0+x1+x2@2", "done"]]


def test_an_error_reaches_every_rank() -> None:
    lines, _ = run("raise")
    for _, last in lines:
        assert last.startswith("WireError trainer rank 1 · here: no room (got 1; wanted 2)")


def test_ranks_in_different_calls_are_reported():
    lines, _ = run("apart")
    for _, last in lines:
        assert last.startswith("SessionError trainer rank 1: it is in another call than rank 0 (got verify; wanted refit)")


def test_what_a_failed_call_left_is_not_taken_for_an_answer():
    lines, _ = run("left over")
    assert [last for _, last in lines] == ["y0+y1+y2@0", "y0+y1+y2@2"]


@pytest.mark.parametrize("mode", ["kill", "stop"])
def test_a_rank_that_is_gone_is_named_in_time(mode: str) -> None:
    lines, seconds = run(mode)
    for _, last in lines:
        assert last.startswith("DeadlineError trainer rank 1: it did not answer"), last
    assert seconds < 55


def test_one_rank_needs_no_group() -> None:
    ranks = Ranks(5.0)
    assert ranks.exchange(Answer(b"a"), lambda values: [values[0] + b"b"]) == b"ab"

    def fail() -> bytes:
        raise WireError("no", where="there")

    with pytest.raises(WireError, match="there: no"):
        ranks.exchange(answer_of(fail), lambda values: values)

    def fail_later(values: list[bytes]) -> list[bytes]:
        raise DeadlineError("late")

    with pytest.raises(DeadlineError, match="late"):
        ranks.exchange(Answer(b""), fail_later)
    with pytest.raises(RefitError, match="ValueError: odd"):
        ranks.exchange(answer_of(lambda: (_ for _ in ()).throw(ValueError("odd"))), lambda values: values)
    assert Answer(problems=[Problem("p")]).kind == "RefitError"
