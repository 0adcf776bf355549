"""Following a real registry: what is taken when, what is tried again, and what is listed as skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.engine.follow import Follower
from vllm_refit_ext.wires.registry import Entry, StoreRegistry, serve


class Core:
    """What a follower needs of vLLM's engine: requests, and workers that answer."""

    def __init__(self, replicas: int = 1) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=replicas))
        self.scheduler = SimpleNamespace(requests={})
        self.answer: dict[str, Any] = {}
        self.calls = 0

    def collective_rpc(self, method: str, timeout: float, arguments: Any) -> list[dict[str, Any]]:
        assert (method, arguments[0]) == ("refit_take", "latest")
        self.calls += 1
        return [self.answer]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRegistry]:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    address, store = serve()
    yield StoreRegistry(address)
    del store


def publish(registry: StoreRegistry, version: str) -> None:
    registry.put(Entry(version, f"epoch of {version}", "ready", "shm"), time.monotonic() + 20.0)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def follower_of(core: Core, registry: StoreRegistry, **arguments: Any) -> Follower:
    return Follower(core, registry.connection.address, 0.02, **arguments)


def test_what_is_new_is_taken_once(registry: StoreRegistry) -> None:
    core = Core()
    follower = follower_of(core, registry)
    follower.take()
    assert core.calls == 0, "nothing is published"
    for n in (1, 2):
        publish(registry, f"v{n}")
        until(lambda: follower.due)
        core.answer = {"problems": [], "epoch": f"epoch of v{n}"}
        follower.take()
        time.sleep(0.1)
        follower.take()
        assert core.calls == n
    assert follower.skipped == []
    follower.stop()


def test_a_version_that_fails_waits_and_the_next_does_not(registry: StoreRegistry) -> None:
    core = Core()
    core.answer = {"problems": ["no room"], "epoch": ""}
    follower = follower_of(core, registry)
    publish(registry, "v1")
    until(lambda: follower.due)
    follower.take()
    assert "no room" in follower.said()
    until(lambda: follower.due)
    follower.take()
    assert core.calls == 1, "it is not tried at every step"
    publish(registry, "v2")
    core.answer = {"problems": [], "epoch": "epoch of v2"}
    until(lambda: "epoch of v2" in follower._seen)
    follower.take()
    assert core.calls == 2
    assert follower.skipped == ["v1"]
    assert "no room" not in follower.said()
    follower.stop()


def test_requests_that_run_are_waited_for(registry: StoreRegistry) -> None:
    core = Core()
    core.scheduler.requests["r"] = SimpleNamespace(status=SimpleNamespace(name="RUNNING"))
    core.answer = {"problems": [], "epoch": "epoch of v1"}
    waiting, keeping = follower_of(core, registry), follower_of(core, registry, caches="keep")
    publish(registry, "v1")
    until(lambda: waiting.due and keeping.due)
    waiting.take()
    assert core.calls == 0
    assert "requests are running" in waiting.said()
    keeping.take()
    assert core.calls == 1
    core.scheduler.requests.clear()
    waiting.take()
    assert core.calls == 2
    assert "requests are running" not in waiting.said()
    for follower in (waiting, keeping):
        follower.stop()


def test_a_take_that_raises_leaves_the_loop_running(registry: StoreRegistry) -> None:
    core = Core()
    core.collective_rpc = lambda *_: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    follower = follower_of(core, registry)
    publish(registry, "v1")
    until(lambda: follower.due)
    follower.take()
    assert "ZeroDivisionError" in follower.said()
    follower.stop()


def test_replicas_do_not_part(registry: StoreRegistry) -> None:
    with pytest.raises(ConfigError, match="data parallel replicas would change their weights at different steps"):
        follower_of(Core(replicas=2), registry)
