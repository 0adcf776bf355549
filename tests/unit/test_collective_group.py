"""Rendezvous and transfers over real stores and real gloo groups, in processes of this machine, with faults."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from examples.support.launch import run_ranks
from tests.support.collective_ranks import Rank, tables
from vllm_refit_ext.core.errors import ConfigError, DeadlineError, SessionError, WireError
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import collective

TRAINERS, ENGINES = 2, 2
PRELOAD = ("vllm_refit_ext.wires.collective", "vllm_refit_ext.receiver.writers")


def run(function, folder, *arguments, ranks: int = TRAINERS + ENGINES, timeout: float = 90.0) -> list:
    return run_ranks(function, ranks, str(folder), *arguments, timeout=timeout, preload=PRELOAD)


def _me() -> int:
    return int(os.environ["RANK"])


def several(folder: str, bucket: int) -> list[dict[int, int]]:
    me = Rank(folder, _me(), bucket)
    out = [me.refit(f"s{i}", i) for i in range(3)]
    group = me.sender._link.group if me.is_trainer else me.kept["collective"].link.group
    assert group is not None
    assert group.name == "s0", "the group is made once and used again"
    if me.is_trainer:
        me.sender.close()
    return out


@pytest.mark.parametrize("bucket", [8, 100, 1 << 20])
def test_refits_are_exact_and_carry_the_plans_bytes(tmp_path, bucket):
    manifest, sources, targets = tables()
    results = run(several, tmp_path, bucket)
    want = {(e.source, target): e.nbytes for target, t in enumerate(targets) for e in build_plan(manifest, sources, t).edges()}
    for rank in range(TRAINERS):
        for sent in results[rank]:
            assert sent == {t: n for (s, t), n in want.items() if s == rank}
    for target in range(ENGINES):
        for got in results[TRAINERS + target]:
            assert got == {s: n for (s, t), n in want.items() if t == target}


def refused(folder: str) -> list[tuple[str, str, float]]:
    me = Rank(folder, _me())
    me.refit("a", 0)
    out = []
    if me.rank == 3:  # this engine refuses: its ranks never come, and its call returns with an error
        me.read("b.0", 20)
        Path(folder, "no").touch()
    elif me.rank == 0:

        def tell() -> None:
            me.read("no", 20)
            me.sender.refuse("b", SessionError("not prepared", where="engine 1"), time.monotonic() + 10)

        out.append(me.failure("b", before=tell))
    else:
        out.append(me.failure("b"))
    me.refit("c", 3)
    return out


def test_a_refusal_stops_everyone_at_once_with_its_own_words(tmp_path):
    results = run(refused, tmp_path)
    report = [r[0] for i, r in enumerate(results) if i != 3]
    assert {kind for kind, _, _ in report} == {"SessionError"}
    assert {text for _, text, _ in report} == {"engine 1: not prepared"}
    assert all(seconds < 15 for _, _, seconds in report)


def loses_one(folder: str, how: str) -> list[tuple[str, str, float]]:
    """Engine rank 1, an engine of its own, fails between two rounds; engine rank 0 takes the new version."""
    if _me() == 3 and how == "killed" and os.fork() != 0:
        os.wait()  # the launcher ends everyone when a rank dies: the child is the rank that dies
        return []
    me = Rank(folder, _me(), 8)
    me.refit("a", 0)
    if me.is_trainer:
        return [me.failure("b"), *([] if how == "killed" else [me.refit("c", 3)])]
    if me.rank == 3:
        write, count = InPlaceWriter.write, [0]

        def failing(self, reader):
            count[0] += 1
            if count[0] == 4:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                InPlaceWriter.write = write
                raise SessionError("the writer fails here")
            write(self, reader)

        InPlaceWriter.write = failing
        me.failure("b")
    else:
        me.refit("b", 99)
    if how != "killed":
        me.refit("c", 3)
    return []


@pytest.mark.parametrize("how", ["fails", "killed"])
def test_an_engine_that_is_lost_leaves_the_other_one_its_bytes(tmp_path, how):
    results = run(loses_one, tmp_path, how)
    for failed, *_ in results[:TRAINERS]:
        assert failed[0] == "WireError"
        assert "engine rank 1" in failed[1]
        assert "engine rank 0" not in failed[1].replace("engine rank 0 and", "")
        assert failed[2] < 15, "long before the deadline"


LATE = {0: "trainer rank 0", 1: "trainer rank 1", 3: "engine rank 1"}


def absent(folder: str) -> list[tuple[str, str, float]]:
    me = Rank(folder, _me())
    me.refit("a", 0)
    out = []
    for late in LATE:
        pause = (lambda: time.sleep(4)) if me.rank == late else (lambda: None)
        out.append(me.failure(f"without {late}", deadline_s=3.0, before=pause))
    me.refit("c", 3)
    return out


def test_a_rank_that_comes_too_late_is_named_on_every_rank(tmp_path):
    results = run(absent, tmp_path)
    for i, name in enumerate(LATE.values()):
        reported = [r[i] for r in results]
        assert len({(kind, text) for kind, text, _ in reported}) == 1, reported
        assert reported[0][0] == "DeadlineError"
        assert name in reported[0][1]


def restarted(folder: str) -> int:
    me = Rank(folder, _me())
    me.refit("a", 0)
    if me.rank == 2:  # a new process knows nothing: no group, no store, nothing staged
        me.kept["collective"].close()
        me.kept = {}
    me.refit("b", 1)
    if me.is_trainer:  # so does a new trainer, whose store has another port
        me.sender.close()
        me.open()
    me.refit("c", 2)
    return 1


def test_a_restarted_side_is_taken_in_again(tmp_path):
    assert run(restarted, tmp_path) == [1] * 4


def killed(folder: str, victim: int, when: str) -> tuple[str, str, float] | None:
    me = Rank(folder, _me(), 8)
    me.refit("a", 0)
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    if me.rank == victim:
        pid = os.fork()  # the launcher ends everyone when a rank dies: the child is the rank that dies
        if pid == 0:
            me.refit("b", 1, **{when: die})
        os.waitpid(pid, 0)
        # Its sockets live as long as any process holds them.
        if me.is_trainer:
            me.sender._link.close()
        else:
            me.kept["collective"].close()
        return None
    if me.rank == 2 and when == "during":
        me.refit("b", 99)  # an engine of its own, which has nothing from the one that died
        return None
    return me.failure("b", deadline_s=4.0)


@pytest.mark.parametrize(
    ("victim", "when"),
    [pytest.param(1, "before", marks=pytest.mark.long), (3, "before"), (3, "during")],
)
def test_a_killed_rank_fails_the_others_by_the_deadline(tmp_path, victim, when):
    results = [r for r in run(killed, tmp_path, victim, when) if r is not None]
    assert len(results) == (2 if when == "during" else 3)
    for kind, text, seconds in results:
        assert kind in ("DeadlineError", "WireError"), text
        assert seconds < 4 + 4, text


def stopped(folder: str) -> tuple[str, str, float]:
    """Rank 3 is stopped, not dead, after all have met; it goes on when the others have failed."""
    me = Rank(folder, _me(), 8)
    me.refit("a", 0)
    if me.rank == 3:
        child = os.getpid()
        waker = os.fork()
        if waker == 0:
            time.sleep(5)
            os.kill(child, signal.SIGCONT)
            os._exit(0)
        out = me.failure("b", deadline_s=3.0, during=lambda: os.kill(child, signal.SIGSTOP))
        os.waitpid(waker, 0)
    else:
        out = me.failure("b", deadline_s=3.0)
    me.refit("c", 2, deadline_s=30.0)
    return out


def test_a_stopped_rank_fails_everyone_and_the_next_refit_works(tmp_path):
    results = run(stopped, tmp_path)
    assert {kind for kind, _, _ in results} <= {"DeadlineError", "WireError"}
    assert all(seconds < 7 for _, _, seconds in results[:3])


def test_messages_are_checked_before_anything_is_opened():
    manifest, sources, targets = tables()
    plan = build_plan(manifest, sources, targets[1])
    report = collective.CollectiveInfo(host="127.0.0.1", port=9, backend="gloo", trainers=2, engines=2, bucket_bytes=64)
    with pytest.raises(ConfigError, match="needs the field collective"):
        collective.open_reader(UpdateInfo(wire="collective", version="v", session="s"), plan, {})
    for bad, text in (
        ({"engines": 1}, "does not fit"),
        ({"trainers": 1}, "more trainer ranks"),
        ({"bucket_bytes": 1}, "at least 8"),
    ):
        info = msgspec.structs.replace(report, **bad)
        with pytest.raises(ConfigError, match=text):
            collective.open_reader(UpdateInfo(wire="collective", version="v", session="s", collective=info), plan, {})


def test_a_store_that_is_not_there_is_named():
    manifest, sources, targets = tables()
    plan = build_plan(manifest, sources, targets[1])
    report = collective.CollectiveInfo(host="127.0.0.1", port=9, backend="gloo", trainers=2, engines=2, bucket_bytes=64)
    with pytest.raises((WireError, DeadlineError), match=r"127\.0\.0\.1:9"):
        collective.open_reader(UpdateInfo(wire="collective", version="v", session="s", collective=report, deadline_s=1), plan, {})


def test_the_store_is_served_on_the_address_and_port_that_were_taken(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    host, port, store = collective.open_store()
    assert host == "127.0.0.1"
    assert port == store.port
    listening = Path("/proc/net/tcp").read_text().split("\n")[1:]
    here = [
        line.split()[1]
        for line in listening
        if line and line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == port
    ]
    assert here == [f"0100007F:{port:04X}"], "on loopback alone"
    monkeypatch.setenv("VLLM_REFIT_HOST", "192.0.2.1")
    with pytest.raises(WireError, match="VLLM_REFIT_HOST"):
        collective.open_store()
