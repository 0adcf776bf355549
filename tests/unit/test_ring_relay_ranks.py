"""Wire `ring` over played hosts with real rings, a real store and real gloo groups, in processes, with faults."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from examples.support.launch import run_ranks
from tests.support.collective_ranks import tables
from tests.support.relay_ranks import Rank, at_message
from vllm_refit_ext.core.errors import RefitError, SessionError
from vllm_refit_ext.core.plan import build_plan

TRAINERS, ENGINES = ("a", "a", "b", "b"), ("a", "b")
RANKS = len(TRAINERS) + len(ENGINES)
PRELOAD = ("vllm_refit_ext.wires.ring", "vllm_refit_ext.receiver.writers")
Failure = tuple[str, str, float]


def run(function, folder, *arguments, timeout: float = 90.0) -> list:
    return run_ranks(function, RANKS, str(folder), *arguments, timeout=timeout, preload=PRELOAD, init_process_group=False)


def rank(folder: str, bucket: int = 32) -> Rank:
    return Rank(folder, int(os.environ["RANK"]), TRAINERS, ENGINES, bucket)


def several(folder: str, bucket: int) -> list[dict[int, int]]:
    me = rank(folder, bucket)
    out = []
    for i in range(3):
        out.append(me.refit(f"s{i}", i))
        me.barrier(f"s{i}")
    if me.is_trainer:
        group = me.sender._communicator._link.group
        assert group.name == "s0", "the group is made once and used again"
        assert group.names == [f"trainer rank {r}" for r in range(4)], "engine ranks are not in it"
    me.barrier("end")
    me.close()
    return out


@pytest.mark.parametrize("bucket", [pytest.param(8, marks=pytest.mark.long), 100])
def test_refits_are_exact_and_carry_the_plans_bytes(tmp_path, bucket):
    results = run(several, tmp_path, bucket)
    manifest, sources, targets = tables(len(TRAINERS), len(ENGINES))
    want = {(e.source, i): e.nbytes for i, t in enumerate(targets) for e in build_plan(manifest, sources, t).edges()}
    for r in range(len(TRAINERS)):
        assert results[r] == [{t: n for (s, t), n in want.items() if s == r}] * 3
    for e in range(len(ENGINES)):
        assert results[len(TRAINERS) + e] == [{s: n for (s, t), n in want.items() if t == e}] * 3


def refused(folder: str) -> list[Failure]:
    """Engine rank 1 never begins; rank 0 learns of it in the middle of the transfer."""
    me = rank(folder)
    me.refit("a", 0)
    me.barrier("a")
    out = []
    if me.rank == RANKS - 1:
        me.read("b.0", 20)
        Path(folder, "no").touch()
    elif me.rank == 0:

        def tell(name: str, end: float) -> None:
            import threading

            def late() -> None:
                me.read("no", 20)
                time.sleep(0.5)
                me.sender.refuse(name, SessionError("not prepared", where="engine rank 1"), end)

            threading.Thread(target=late).start()

        out.append(me.failure("b", watch=tell))
    else:
        out.append(me.failure("b"))
    me.barrier("b")
    me.refit("c", 3)
    me.barrier("end")
    me.close()
    return out


def test_an_engine_that_refuses_in_the_middle_stops_trainer_ranks_of_all_hosts_at_once(tmp_path):
    report = [r[0] for r in run(refused, tmp_path)[:-1]]
    for kind, text, seconds in report:
        assert kind == "WireError", text
        assert seconds < 12, "long before the deadline"
    assert "not prepared" in " ".join(text for _, text, _ in report[2:4]), "trainer ranks of the other host know the cause"


def refused_early(folder: str) -> list[Failure]:
    """An engine refuses before trainer rank 3 has come: nothing was sent."""
    me = rank(folder)
    me.refit("a", 0)
    me.barrier("a")
    out = []
    if me.is_trainer:

        def tell(name: str, end: float) -> None:
            if me.rank == 0:
                me.sender.refuse(name, SessionError("not prepared", where="engine rank 1"), end)
                Path(folder, "report").touch()
            else:
                me.read("report", 20)

        out.append(me.failure("b", watch=tell))
    me.barrier("b")
    me.refit("c", 3)
    me.barrier("end")
    me.close()
    return out


@pytest.mark.long
def test_an_engine_that_refuses_at_once_is_reported_in_its_own_words(tmp_path):
    report = [r[0] for r in run(refused_early, tmp_path)[: len(TRAINERS)]]
    assert {(kind, text) for kind, text, _ in report} == {("SessionError", "engine rank 1: not prepared")}


def engine_fails(folder: str) -> list[Failure]:
    """Engine rank 1 fails between two steps."""
    me = rank(folder)
    me.refit("a", 0)
    me.barrier("a")

    def fail(number: int) -> None:
        if me.rank == RANKS - 1 and number == 3:
            raise SessionError("the writer fails here")

    out = [me.failure("b", step=fail)] if me.is_trainer or me.rank == RANKS - 1 else []
    if me.rank == RANKS - 2:
        try:
            me.refit("b", 99)
        except Exception as error:  # noqa: BLE001 - it may have read everything before
            out = [(type(error).__name__, str(error), 0.0)]
    me.barrier("b")
    me.refit("c", 3)
    me.barrier("end")
    me.close()
    return out


@pytest.mark.long
def test_an_engine_that_fails_in_the_middle_stops_all_and_the_next_refit_works(tmp_path):
    results = run(engine_fails, tmp_path)
    for kind, text, seconds in (r[0] for r in results[: len(TRAINERS)]):
        assert kind in ("WireError", "DeadlineError"), text
        assert seconds < 12, text


def killed(folder: str, victim: int, kind: str) -> Failure | None:
    if int(os.environ["RANK"]) == victim and os.fork() != 0:
        os.wait()  # the launcher ends everyone when a rank dies: the child, which alone holds sockets, is the rank that dies
        return None
    me = rank(folder, 8)
    me.refit("a", 0)
    me.barrier("a")
    if me.rank == victim:
        at_message(kind, 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
        me.refit("b", 99)
        os._exit(3)
    begin = time.monotonic()
    try:
        me.refit("b", 99, deadline_s=8.0)
    except RefitError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None  # this rank was through before; in a trainer it hears of it in the exchange that follows


@pytest.mark.long
@pytest.mark.parametrize(("victim", "kind"), [(3, "receive"), (2, "send"), (0, "receive"), (0, "send")])
def test_a_rank_that_is_killed_while_bytes_move_fails_the_others_by_the_deadline(tmp_path, victim, kind):
    results = [r for r in run(killed, tmp_path, victim, kind) if r is not None]
    assert len(results) >= 2
    for name, text, seconds in results:
        assert name in ("DeadlineError", "WireError"), text
        assert seconds < 8 + 12, text
    assert any(f"trainer rank {victim}" in text for _, text, _ in results), results


def stopped(folder: str, victim: int, kind: str) -> Failure:
    """Rank `victim` is stopped, not dead, in the middle of the transfer; it goes on when the others have failed."""
    me = rank(folder, 8)
    me.refit("a", 0)
    me.barrier("a")
    if me.rank == victim:
        pid = os.getpid()
        waker = os.fork()
        if waker == 0:
            time.sleep(11)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        at_message(kind, 5, lambda: os.kill(pid, signal.SIGSTOP))
        out = me.failure("b", deadline_s=5.0)
        os.waitpid(waker, 0)
    else:
        out = me.failure("b", deadline_s=5.0)
    me.barrier("b")
    me.refit("c", 2, deadline_s=40.0)
    me.barrier("end")
    me.close()
    return out


@pytest.mark.long
@pytest.mark.parametrize(("victim", "kind"), [(3, "receive"), (1, "send")])
def test_a_rank_that_is_stopped_fails_everyone_and_the_next_refit_works(tmp_path, victim, kind):
    results = run(stopped, tmp_path, victim, kind)
    for r, (name, text, seconds) in enumerate(results):
        assert name in ("DeadlineError", "WireError"), text
        assert seconds < 5 + 6 or r == victim, text
