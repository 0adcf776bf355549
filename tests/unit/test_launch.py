"""The launcher of ranks: results in order, tracebacks shown, nobody left behind, deadlines kept."""

import os

import pytest

from examples.support.launch import RankFailed, run_ranks
from tests.support import ranks_probe

LIGHT = ("torch.distributed",)


def test_results_come_in_rank_order_and_ranks_can_talk():
    assert run_ranks(ranks_probe.add_up, 3, 5, preload=LIGHT, timeout=60) == [(0, 30), (1, 30), (2, 30)]


def test_a_failing_ranks_traceback_is_shown_and_the_others_end_at_once():
    with pytest.raises(RankFailed, match="rank 1 has had enough") as caught:
        run_ranks(ranks_probe.fail_on, 2, 1, preload=LIGHT, timeout=300)
    assert "fail_on" in str(caught.value)
    assert "rank 0 of 2: ended" in str(caught.value)


def test_a_killed_rank_is_named():
    with pytest.raises(RankFailed, match="rank 0 of 2: killed by SIGKILL"):
        run_ranks(ranks_probe.die_on, 2, 0, preload=LIGHT, timeout=300)


def test_the_deadline_ends_every_rank_and_says_so():
    with pytest.raises(RankFailed, match="rank 1 of 2: not done after 2 s"):
        run_ranks(ranks_probe.sleep_forever, 2, preload=LIGHT, timeout=2)


def test_a_later_call_works_after_failures_and_without_a_group():
    started, port = run_ranks(ranks_probe.without_group, 1, preload=LIGHT, init_process_group=False, timeout=60)[0]
    assert not started
    assert int(port) > 0
    assert "RANK" not in os.environ


def test_a_function_without_a_name_is_refused():
    with pytest.raises((ValueError, RankFailed)):
        run_ranks(lambda: 1, 1, preload=LIGHT, timeout=60)
