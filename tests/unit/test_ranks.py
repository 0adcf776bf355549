"""The trainer's ranks: errors of one reach all, and a dead one is named within the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from examples.support.launch import run_ranks
from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError, WireError
from vllm_refit_ext.sender.ranks import Answer, Ranks, answer_of

SIZE = 3


def talk(mode: str) -> list[str]:
    """What one rank says. `mode`: what happens to rank 1."""
    import torch.distributed as dist

    rank, ranks, said = dist.get_rank(), Ranks(6.0), list[str]()

    def answers(values: list[bytes]) -> list[bytes]:
        return [b"+".join(values) + b"@%d" % r for r in range(SIZE)]

    def work() -> bytes:
        if rank == 1 and mode == "raise":
            raise WireError("no room", where="here", got=1, wanted=2)
        if rank == 1 and mode in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if mode == "kill" else signal.SIGSTOP)
        return b""

    said.append(ranks.exchange(answer_of(lambda: b"x%d" % rank), answers).decode())
    try:
        if mode == "apart":
            ranks.call("verify" if rank == 1 else "refit")
        if mode == "left over":
            ranks.call("refit")
            with contextlib.suppress(RefitError):
                if rank != 1:  # it failed before its exchange
                    ranks.exchange(answer_of(lambda: b""), lambda values: [b""] * SIZE)
            ranks.call("prepare")
            said.append(ranks.exchange(answer_of(lambda: b"y%d" % rank), answers).decode())
        elif mode == "large":
            whole = ranks.exchange(answer_of(lambda: bytes(3_000_000)), lambda values: [b"".join(values)] * SIZE)
            said.append(str(len(whole)))
        else:
            ranks.exchange(answer_of(work), lambda values: [b"done"] * SIZE)
            said.append("done")
    except RefitError as error:
        said.append(f"{type(error).__name__} {error}")
    return said


def run(mode: str) -> list[list[str]]:
    """What ranks 0 and 2 say."""
    said = run_ranks(talk, SIZE, mode, timeout=90.0, preload=("vllm_refit_ext.sender.ranks",))
    return [said[0], said[2]]


def test_large_messages_are_sent_in_pieces() -> None:
    assert run("large") == [["x0+x1+x2@0", "9000000"], ["x0+x1+x2@2", "9000000"]]


def test_values_and_answers() -> None:
    assert run("ok") == [["x0+x1+x2@0", "done"], ["x0+x1+x2@2", "done"]]


def test_an_error_reaches_every_rank() -> None:
    for _, last in run("raise"):
        assert last.startswith("WireError trainer rank 1 · here: no room (got 1; wanted 2)")


def test_ranks_in_different_calls_are_reported() -> None:
    for _, last in run("apart"):
        assert last.startswith("SessionError trainer rank 1: it is in another call than rank 0 (got verify; wanted refit)")


def test_what_a_failed_call_left_is_not_taken_for_an_answer() -> None:
    assert [last for _, last in run("left over")] == ["y0+y1+y2@0", "y0+y1+y2@2"]


CODE = """
import os, sys
import torch.distributed as dist
from tests.unit.test_ranks import talk

dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=3)
print(*talk(sys.argv[3]), sep="\\n", flush=True)
if sys.argv[1] == "0":  # it hosts the store, so it stays until the others have read
    sys.stdin.read()
os._exit(0)
"""


@pytest.mark.parametrize("mode", ["kill", "stop"])
def test_a_rank_that_is_gone_is_named_in_time(mode: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store = probe.getsockname()[1]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CODE]
    children = [subprocess.Popen([*command, str(rank), str(store), mode], **ends) for rank in range(SIZE)]  # type: ignore[call-overload]
    try:
        lines = [child.communicate(timeout=60)[0].splitlines() for child in (children[2], children[0])]
    finally:
        for child in children:
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
    for _, last in lines:
        assert last.startswith("DeadlineError trainer rank 1: it did not answer"), last


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
