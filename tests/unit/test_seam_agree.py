"""Agreement of ranks through the store: one outcome everywhere, deadlines, and a clean next round after any failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, TCPStore

from vllm_refit_ext.core.errors import DeadlineError, ManifestError, Problem, RefitError, SessionError, TornError, WireError
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.receiver import agree


def make_view(rank: int, size: int, store: Any = None, executor: str = "mp") -> EngineRank:
    view = EngineRank(torch.nn.Module(), SimpleNamespace(instance_id="x"), torch.device("cpu"), rank, size, executor=executor)
    view.exchange = agree.Exchange(view, store)
    return view


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The kinds of store that vLLM's process groups rest on."""
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), -1)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_ranks(views: list[EngineRank], work: Callable[[EngineRank], Any], attempt: str = "a") -> list[Any]:
    """`work(view)` in a thread for each rank: its result, or the error that it raised."""
    results: list[Any] = [None] * len(views)

    def run(index: int) -> None:
        agree.begin(views[index], attempt)
        try:
            results[index] = work(views[index])
        except RefitError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(views))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_every_rank_gets_every_value(store: Any) -> None:
    views = [make_view(rank, 3, store) for rank in range(3)]
    values = on_ranks(views, lambda view: agree.agree(view, "commit", bytes([view.rank]), None, 20))
    assert values == [[b"\0", b"\1", b"\2"]] * 3


def test_one_rank_alone_needs_no_store() -> None:
    view = EngineRank(torch.nn.Module(), None, torch.device("cpu"), 0, 1)
    agree.begin(view, "a")
    assert agree.agree(view, "commit", b"v", None, 1) == [b"v"]
    with pytest.raises(WireError, match="broken") as raised:
        agree.agree(view, "commit", None, WireError("broken"), 1)
    assert raised.value.agreed  # type: ignore[attr-defined]


def test_all_ranks_raise_the_same_error_with_every_problem(store: Any) -> None:
    views = [make_view(rank, 4, store) for rank in range(4)]
    many = ManifestError.of([Problem("missing", "a.weight"), Problem("wrong shape", "b.weight", "[2]", "[3]")])
    mine = {1: many, 3: SessionError("busy", where="refit")}
    errors = on_ranks(views, lambda view: agree.agree(view, "begin", None, mine.get(view.rank), 20))
    assert {type(error) for error in errors} == {ManifestError}
    assert len({str(error) for error in errors}) == 1
    assert [problem.where for problem in errors[0].problems] == ["rank 1 · a.weight", "rank 1 · b.weight", "rank 3 · refit"]


def test_the_same_problem_of_several_ranks_is_said_once(store: Any) -> None:
    views = [make_view(rank, 3, store) for rank in range(3)]
    errors = on_ranks(
        views,
        lambda view: agree.agree(view, "begin", None, SessionError("not prepared", where="update") if view.rank else None, 20),
    )
    assert [str(problem) for problem in errors[0].problems] == ["rank 1, 2 · update: not prepared"]


def test_torn_is_the_gravest(store: Any) -> None:
    views = [make_view(rank, 2, store) for rank in range(2)]
    mine = {0: WireError("gone"), 1: TornError("half written")}
    errors = on_ranks(views, lambda view: agree.agree(view, "write", None, mine[view.rank], 20))
    assert all(type(error) is TornError and len(error.problems) == 2 for error in errors)


def test_a_missing_rank_is_named_and_the_next_round_works(store: Any) -> None:
    views = [make_view(rank, 3, store) for rank in range(3)]
    errors = on_ranks(views, lambda view: None if view.rank == 1 else agree.agree(view, "commit", b"", None, 0.5))
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert type(error) is DeadlineError
        assert "rank 1" in str(error)
        assert "'commit'" in str(error)
    again = on_ranks(views, lambda view: agree.agree(view, "commit", b"ok", None, 20))
    assert again == [[b"ok"] * 3] * 3


def test_a_missing_rank_does_not_hide_what_another_rank_found(store: Any) -> None:
    views = [make_view(rank, 3, store) for rank in range(3)]
    mine = {0: WireError("segment is stale", where="shm")}
    errors = on_ranks(views, lambda view: None if view.rank == 2 else agree.agree(view, "begin", None, mine.get(view.rank), 0.5))
    assert str(errors[0]) == str(errors[1])
    assert "segment is stale" in str(errors[0])
    assert "rank 2" in str(errors[0])


def test_a_late_rank_learns_that_the_others_gave_up(store: Any) -> None:
    views = [make_view(rank, 2, store) for rank in range(2)]

    def work(view: EngineRank) -> Any:
        if view.rank == 1:
            time.sleep(2.0)
        return agree.agree(view, "commit", b"", None, 0.5 if view.rank == 0 else 30)

    errors = on_ranks(views, work)
    assert [type(error) for error in errors] == [DeadlineError, DeadlineError]
    assert str(errors[0]) == str(errors[1])


def test_a_rank_that_left_early_does_not_shift_the_next_round(store: Any) -> None:
    views = [make_view(rank, 2, store) for rank in range(2)]

    def work(view: EngineRank) -> Any:
        agree.agree(view, "begin", b"", None, 20)
        return None if view.rank else agree.agree(view, "write", b"", None, 0.3)

    first = on_ranks(views, work)
    assert type(first[0]) is DeadlineError
    assert on_ranks(views, lambda view: agree.agree(view, "begin", b"x", None, 20)) == [[b"x", b"x"]] * 2


def test_a_phase_used_twice_in_one_call_is_two_rounds(store: Any) -> None:
    views = [make_view(rank, 2, store) for rank in range(2)]

    def work(view: EngineRank) -> Any:
        return [agree.agree(view, "bucket", bytes([index, view.rank]), None, 20) for index in range(3)]

    assert on_ranks(views, work) == [[[bytes([i, 0]), bytes([i, 1])] for i in range(3)]] * 2


def test_a_rank_that_missed_a_call_meets_the_others_in_the_next_attempt(store: Any) -> None:
    views = [make_view(rank, 2, store) for rank in range(2)]
    (alone,) = on_ranks(views[:1], lambda view: agree.agree(view, "begin", b"", None, 0.3), "first")
    assert "rank 1" in str(alone)
    assert on_ranks(views, lambda view: agree.agree(view, "begin", b"x", None, 20), "second") == [[b"x", b"x"]] * 2


def test_the_same_attempt_twice_is_two_attempts(store: Any) -> None:
    """A caller that repeats a message must not read the answers to the first one."""
    views = [make_view(rank, 2, store) for rank in range(2)]
    for value in (b"1", b"2", b"3"):
        assert on_ranks(views, lambda view, v=value: agree.agree(view, "begin", v, None, 20), "same") == [[value] * 2] * 2


def test_two_engines_of_one_process_group_do_not_meet(store: Any) -> None:
    views = [make_view(0, 2, store), make_view(1, 2, store)]
    views[1].serial = 1
    errors = on_ranks(views, lambda view: agree.agree(view, "begin", b"", None, 0.3))
    assert all(type(error) is DeadlineError for error in errors)


def test_keys_of_old_attempts_are_deleted(store: Any) -> None:
    views = [make_view(rank, 2, store) for rank in range(2)]
    before = store.num_keys()
    counts = []
    for attempt in range(6):
        on_ranks(views, lambda view: [agree.agree(view, phase, b"x", None, 20) for phase in ("begin", "commit")], str(attempt))
        counts.append(store.num_keys() - before)
    assert len(set(counts[1:])) == 1, counts


def test_the_last_rank_is_named_when_all_came_too_late(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers are there, but only after the deadline: the one that was slow is named and not the one that waited."""
    views = [make_view(rank, 2, store) for rank in range(2)]
    wait = agree._wait
    monkeypatch.setattr(agree, "_wait", lambda store, keys, deadline: wait(store, keys, deadline + 3))

    def work(view: EngineRank) -> Any:
        if view.rank == 1:
            time.sleep(0.6)
        return agree.agree(view, "commit", b"", None, 0.0 if view.rank else 0.3)

    errors = on_ranks(views, work)
    assert str(errors[0]) == str(errors[1])
    assert [problem.where for problem in errors[0].problems] == ["rank 1"]


def test_whatever_is_raised_on_one_rank_is_agreed_upon(store: Any) -> None:
    class Odd(BaseException):
        pass

    views = [make_view(rank, 2, store) for rank in range(2)]

    def work(view: EngineRank) -> Any:
        errors: list[RefitError] = []
        with agree.collect(errors, "the wire"):
            if view.rank:
                raise Odd("of no known kind")
        return agree.agree(view, "begin", None, agree.merged(errors), 20)

    errors = on_ranks(views, work)
    assert str(errors[0]) == str(errors[1])
    assert "rank 1 · the wire: Odd: of no known kind" in str(errors[0])
    for last in (KeyboardInterrupt, SystemExit):
        with pytest.raises(last), agree.collect([], "nowhere"):
            raise last


def test_replicas_do_not_meet(store: Any) -> None:
    views = [make_view(0, 2, store), make_view(1, 2, store)]
    views[1].replica = 1
    errors = on_ranks(views, lambda view: agree.agree(view, "commit", b"", None, 0.3))
    assert all(type(error) is DeadlineError for error in errors)


def test_an_agreed_error_meets_a_rank_that_failed_elsewhere(store: Any) -> None:
    """One rank never enters a phase, the other times out there; both meet in the next phase with both problems."""
    views = [make_view(rank, 2, store) for rank in range(2)]

    def work(view: EngineRank) -> Any:
        error: RefitError | None = WireError("crashed before it", where="wire")
        if view.rank:
            with pytest.raises(DeadlineError) as raised:
                agree.agree(view, "begin", None, None, 0.3)
            error = raised.value
        return agree.agree(view, "outcome", None, error, 20)

    errors = on_ranks(views, work)
    assert str(errors[0]) == str(errors[1])
    assert [problem.where for problem in errors[0].problems] == ["rank 0 · wire", "rank 0"]


def test_only_the_last_rank_speaks_for_all() -> None:
    error = SessionError("no")
    error.agreed = True  # type: ignore[attr-defined]
    agree.surface(make_view(0, 2), error)
    with pytest.raises(SessionError):
        agree.surface(make_view(1, 2), error)
    with pytest.raises(SessionError):
        agree.surface(make_view(0, 2, executor="external_launcher"), error)
    with pytest.raises(SessionError):
        agree.surface(make_view(0, 2), SessionError("nobody else knows of this one"))


def _rank_in_process(rank: int, ports: Any, go: Any, results: Any) -> None:
    store = TCPStore("127.0.0.1", ports.get(timeout=120) if rank else 0, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        ports.put(store.port)
    view = make_view(rank, 2, store)
    results.put("ready")
    for round_name in ("first", "second"):
        go[round_name][rank].wait(60)
        agree.begin(view, round_name)
        try:
            agree.agree(view, "commit", b"", None, 2.0 if round_name == "first" else 20.0)
            results.put("good")
        except RefitError as error:
            results.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_a_deadline_and_not_a_hang(stopped: int) -> None:
    """SIGSTOP one rank, also the one that hosts the store; after SIGCONT both know that the round failed, and the next one
    works.
    """
    context = get_context("spawn")
    ports = context.Queue()
    go = {name: [context.Event(), context.Event()] for name in ("first", "second")}
    # a queue each: a stopped process may hold the lock of its own
    results = [context.Queue(), context.Queue()]
    ranks = [context.Process(target=_rank_in_process, args=(rank, ports, go, results[rank]), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        other = 1 - stopped
        assert [queue.get(timeout=120) for queue in results] == ["ready", "ready"]
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        go["first"][other].set()
        assert results[other].get(timeout=40).startswith("DeadlineError")
        os.kill(ranks[stopped].pid, signal.SIGCONT)
        # what the other rank left for the store must be there before the late one asks
        time.sleep(1.0)
        go["first"][stopped].set()
        assert results[stopped].get(timeout=40).startswith("DeadlineError")
        for event in go["second"]:
            event.set()
        assert [queue.get(timeout=60) for queue in results] == ["good", "good"]
    finally:
        for process in ranks:
            process.kill()
            process.join(20)
