"""Wire `collective` in one process: messages that don't fit, what is kept, what is left behind, the environment."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import msgspec
import pytest
import torch

from tests.support.ring_ranks import crossed
from tests.support.wire_refit import refit
from vllm_refit_ext.core.errors import ConfigError, DeadlineError, Problem, WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.wires import collective, collective_group, rendezvous

HOSTS = Hosts("a", "a")


def update_of(report: Any, session: str = "s", deadline_s: float = 1.0) -> UpdateInfo:
    return UpdateInfo(wire="collective", version="v", session=session, deadline_s=deadline_s, collective=report)


def test_a_message_that_the_trainer_did_not_make_is_refused_and_changes_nothing():
    plan, tensors, whole = crossed(1, 1)
    sender = collective.open_sender(0, collective.send_tables(plan, HOSTS, 256)[0], tensors)
    kept: dict[str, Any] = {}
    try:
        refit("collective", sender, plan, tensors, kept, "one")
        held, group = kept["collective"], kept["collective"].link.group
        report = held.info
        for change in (
            {"host": ""},
            {"bucket_bytes": 128},
            {"bucket_bytes": 1},
            {"trainers": 2},
            {"engines": 2},
            {"engines": 0},
            {"port": 1},
            {"host": "127.0.0.2"},
        ):
            with pytest.raises((WireError, ConfigError, DeadlineError)):
                collective.open_reader(update_of(msgspec.structs.replace(report, **change)), plan, kept)
            assert kept["collective"] is held
            assert held.link.group is group
        for t in tensors:
            t.mul_(2)
        targets = refit("collective", sender, plan, tensors, kept, "two")
        assert torch.equal(targets["t1.0"], whole[1] * 2)
        assert held.link.group is group, "the group is used again"
    finally:
        sender.close()
        kept["collective"].close()


def test_a_step_in_place_is_what_the_next_refit_sends():
    """Also after a refit that was refused because a parameter's strides had changed."""
    plan, tensors, whole = crossed(1, 1)
    sender = collective.open_sender(0, collective.send_tables(plan, HOSTS, 256)[0], tensors)
    kept: dict[str, Any] = {}
    try:
        refit("collective", sender, plan, tensors, kept, "one")
        strided = torch.as_strided(tensors[0], tensors[0].shape, (1, tensors[0].shape[0]))
        with pytest.raises(WireError, match="no longer contiguous"):
            sender.begin([strided, *tensors[1:]])
        for t in tensors:
            t.add_(1)
        targets = refit("collective", sender, plan, tensors, kept, "two")
        assert all(torch.equal(targets[f"t{i}.0"], t + 1) for i, t in enumerate(whole))
    finally:
        sender.close()
        kept["collective"].close()


def test_the_environment_is_as_it_was_also_when_nccl_does_not_come_up(monkeypatch):
    """A stand-in of NCCL whose first operation never ends: the deadline passes, and nothing is left changed."""
    seen = []

    class Stuck:
        def __init__(self, *_: Any) -> None:
            seen.append((os.environ.get(collective_group._HANDLING), threading.current_thread()))

        def allreduce(self, _: Any) -> Any:
            time.sleep(2.0)
            raise RuntimeError("too late")

        class Options:
            pass

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Stuck, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for before in (None, "3"):
        monkeypatch.delenv(collective_group._HANDLING, raising=False)
        if before is not None:
            monkeypatch.setenv(collective_group._HANDLING, before)
        connect = collective_group._nccl(None, 0, 1, collective_group.NEVER, torch.device("cpu"))
        assert os.environ.get(collective_group._HANDLING) == before
        with pytest.raises(DeadlineError):
            collective_group.run_until(time.monotonic() + 0.2, "the group did not come up", "here", connect)
        assert os.environ.get(collective_group._HANDLING) == before
    assert seen == [("0", threading.current_thread())] * 2


@pytest.mark.parametrize("kind", ["Problem", "gave_up", "msgspec", "no such class"])
def test_a_peer_names_a_class_of_errors_or_none(kind):
    """A verdict comes out of the store: whatever stands in it, its problems are raised."""
    error = rendezvous._error(rendezvous.Verdict(problems=[Problem("it failed")], kind=kind))
    assert type(error) is WireError
    assert error.problems == [Problem("it failed")]
