"""Takers that are killed, stopped or slow in the middle of a take, a registry that goes and comes back, and 200 versions while
engines join and leave: no mixed weights, no lease left, and nothing that grows."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.small_engine import PlainSource, SmallTaker
from vllm_refit_ext.core.errors import RefitError, SessionError
from vllm_refit_ext.receiver import take
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.wires.registry import StoreRegistry

DEADLINE_S = 20.0
"""Nothing here should wait for it."""


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8, dtype=torch.bfloat16))


@pytest.fixture
def sender(module: torch.nn.Module) -> Iterator[RefitSender]:
    made = RefitSender(PlainSource(module), None, SenderConfig(registry_port=0, deadline_s=DEADLINE_S))
    made.prepare()
    yield made
    made.close()


def step(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Other weights; a copy of them."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def soon() -> float:
    return time.monotonic() + 20.0


TAKER = """
import sys
import torch
from tests.support.small_engine import SmallTaker
from vllm_refit_ext.core.errors import RefitError

engine = SmallTaker(sys.argv[1])
said = iter(sys.stdin)

def wait():
    print("reading", flush=True)
    next(said)

for line in said:
    engine.before_commit = wait if line.strip() == "wait" else lambda: None
    try:
        engine.take()
    except RefitError as error:
        print(type(error).__name__, end=" ")
    print(engine.version, flush=True)
"""


class Taker:
    """An engine in a process of its own. `take` begins; with `wait` it stops before its commit, when all is read."""

    def __init__(self, registry: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKER, registry],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def take(self, how: str = "now") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(how + "\n")
        self.process.stdin.flush()

    go_on = take

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def taker(sender: RefitSender) -> Iterator[Taker]:
    """One that has read v1 and not committed it."""
    made = Taker(sender.registry)
    try:
        yield made
    finally:
        made.end()


def read(taker: Taker) -> None:
    taker.take("wait")
    assert taker.line() == "reading"


def test_a_taker_that_is_killed_costs_its_publisher_a_deadline(
    sender: RefitSender, module: torch.nn.Module, taker: Taker
) -> None:
    publication = sender.publish("v1")
    read(taker)
    taker.end()
    holders = StoreRegistry(sender.registry).leases(publication.epoch, soon())
    assert len(holders) == 1
    assert f"process {taker.process.pid}" in holders[0]
    assert publication.close(0.1) == holders
    assert StoreRegistry(sender.registry).entries(soon()) == []
    wanted = step(module)
    sender.publish("v2")
    other = SmallTaker(sender.registry)
    assert other.take() == "v2"
    assert all(torch.equal(other.weights[n], t) for n, t in wanted.items())


def test_a_taker_that_is_stopped_is_revoked_and_takes_the_next(
    sender: RefitSender, module: torch.nn.Module, taker: Taker
) -> None:
    publication = sender.publish("v1", "snapshot")
    read(taker)
    taker.process.send_signal(signal.SIGSTOP)
    try:
        other = SmallTaker(sender.registry)
        assert other.take() == "v1", "nobody waits for it"
        assert len(publication.close(0.1)) == 1
        step(module)
        sender.publish("v2")
        assert other.take() == "v2"
    finally:
        taker.process.send_signal(signal.SIGCONT)
    taker.go_on()
    assert taker.line() == "SessionError", "it has no version: what it read is not committed"
    taker.take()
    assert taker.line() == "v2"


def test_a_slow_taker_is_waited_for(sender: RefitSender, module: torch.nn.Module, taker: Taker) -> None:
    sender.publish("v1", "snapshot")
    read(taker)
    step(module)
    published = threading.Event()
    thread = threading.Thread(target=lambda: (sender.publish("v2", "snapshot"), published.set()))
    thread.start()
    assert not published.wait(0.3)
    taker.go_on()
    assert taker.line() == "v1"
    assert published.wait(20.0)
    thread.join()
    taker.take()
    assert taker.line() == "v2"


class Proxy:
    """A way to an address that can be cut and mended, on a port of its own."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._ends: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.mend()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        assert self._listener is not None
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends = []

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._to)
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, into: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                into.sendall(data)
            into.shutdown(socket.SHUT_WR)


def test_a_registry_that_goes_and_comes_back(
    sender: RefitSender, module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away in the middle of a take: what was read is committed, the lease that can't be given back ends with its version, and
    the next take works once the registry is there."""
    monkeypatch.setattr(take, "CHECK_S", 0.5)
    way = Proxy(sender.registry)
    engine = SmallTaker(way.address)
    publication = sender.publish("v1")
    engine.before_commit = way.cut
    assert engine.take() == "v1"
    engine.before_commit = lambda: None
    with pytest.raises(RefitError, match=f"registry at {way.address}"):
        engine.take(deadline_s=2.0)
    assert engine.version == "v1"
    way.mend()
    assert engine.take() is None, "it serves the newest"
    assert len(publication.close(0.1)) <= 1
    assert StoreRegistry(sender.registry).entries(soon()) == []
    wanted = step(module)
    sender.publish("v2")
    assert engine.take() == "v2"
    assert all(torch.equal(engine.weights[n], t) for n, t in wanted.items())
    way.cut()


def footprint() -> tuple[int, int, int]:
    """Of this process: files that are open, files in shared memory that it made, and KiB that are resident."""
    shared = len(list(Path("/dev/shm").glob(f"refit-*-{os.getpid()}-*")))
    status = Path("/proc/self/status").read_text()
    return len(os.listdir("/proc/self/fd")), shared, int(status.partition("VmRSS:")[2].split()[0])


def test_200_versions_while_engines_join_and_leave(sender: RefitSender, module: torch.nn.Module) -> None:
    """Takers in threads; some die in the middle of a take, with their lease, and others join in their place."""
    rng, seed = random.Random(7), 7
    wanted: dict[str, dict[str, torch.Tensor]] = {}
    stop, wrong, taken, left = threading.Event(), list[str](), list[str](), [0]

    class Left(Exception):  # noqa: N818 - what it is
        pass

    def leave() -> None:
        raise Left

    def run(number: int) -> None:
        mine = random.Random(seed * 100 + number)
        engine, takes = SmallTaker(sender.registry), 0
        while not stop.is_set():
            engine.before_commit = lambda: time.sleep(mine.random() * 0.004)
            if takes % 10 == 9:
                engine.before_commit, engine.versions.give_back = leave, lambda entry: None  # type: ignore[method-assign]
            try:
                version = engine.take(deadline_s=DEADLINE_S)
            except RefitError:
                version = None  # revoked: it keeps what it had
            except Left:
                left[0] += 1
                engine, takes = SmallTaker(sender.registry), takes + 1
                continue
            if version is not None:
                taken.append(version)
                takes += 1
            if engine.version and not all(torch.equal(engine.weights[n], t) for n, t in wanted[engine.version].items()):
                wrong.append(engine.version)
            time.sleep(mine.random() * 0.004)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    early: tuple[int, int, int] = (0, 0, 0)
    for n in range(200):
        wanted[f"v{n}"] = step(module)
        while True:
            if sender._publisher.open is not None:
                sender._publisher.open.close(rng.choice([0.0, 0.01, 0.05]))  # what is read in place, by one that is dead perhaps
            try:
                publication = sender.publish(f"v{n}", rng.choice(["in_place", "snapshot"]))  # type: ignore[arg-type]
                break
            except SessionError:
                time.sleep(0.002)
        if n == 0:
            for thread in threads:
                thread.start()
        if n == 50:
            early = footprint()
        time.sleep(rng.random() * 0.004)
        if rng.random() < 0.3:
            publication.close(rng.choice([0.0, 0.01, 0.2]))
    late = footprint()
    stop.set()
    for thread in threads:
        thread.join()
    publication.close(0.0)
    assert wrong == []
    assert len(set(taken)) > 30
    assert left[0] > 0
    registry = StoreRegistry(sender.registry)
    assert registry.entries(soon()) == []
    names = registry.connection.call(lambda store: store.call(lambda raw: raw.num_keys(), soon()), soon())
    assert names <= 4, "torch's own key and the list of entries; nothing of 200 versions"
    assert late[1] == early[1] == 1
    # Takers that left without a word take their descriptors along when they are collected.
    assert late[0] <= early[0] + 20, (early, late)
    assert late[2] <= early[2] + (32 << 10), (early, late)
