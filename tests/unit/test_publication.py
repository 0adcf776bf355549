"""Publish and take between processes: a real registry, real shared memory, and engines that the trainer does not know."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_engine import PlainSource, SmallEngine, SmallTaker
from vllm_refit_ext.core.errors import ConfigError, DeadlineError, RefitError, SessionError, WireError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.part import layers, mixed
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.wires.registry import StoreRegistry


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8, dtype=torch.bfloat16))


@pytest.fixture
def sender(module: torch.nn.Module) -> Iterator[RefitSender]:
    made = RefitSender(PlainSource(module), None, SenderConfig(registry_port=0, deadline_s=20.0))
    made.prepare()
    yield made
    made.close()


def step(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)


def same(held: dict[str, torch.Tensor], module: torch.nn.Module) -> bool:
    return all(torch.equal(held[n], p.detach()) for n, p in module.named_parameters())


def soon() -> float:
    return time.monotonic() + 20.0


def leases(sender: RefitSender, epoch: str) -> list[str]:
    return StoreRegistry(sender.registry).leases(epoch, soon())


def test_an_engine_takes_what_is_published_before_it_was_there(sender: RefitSender, module: torch.nn.Module) -> None:
    with sender.publish("v1") as publication:
        first, late = SmallTaker(sender.registry), SmallTaker(sender.registry)
        assert first.take() == "v1"
        assert late.take() == "v1"
        assert same(first.weights, module)
        assert same(late.weights, module)
        assert first.take() is None, "what is served is not read again"
        assert first.take("v1") == "v1", "unless it is named"
        assert leases(sender, publication.epoch) == []
    assert first.prepared == 1


def test_versions_follow_each_other_and_one_prepare_serves_all(sender: RefitSender, module: torch.nn.Module) -> None:
    engine = SmallTaker(sender.registry)
    assert engine.take() is None, "nothing is published"
    for n in range(5):
        step(module)
        publication = sender.publish(f"v{n}", "snapshot" if n % 2 else "in_place")
        if n != 3:
            assert engine.take() == f"v{n}"
            assert same(engine.weights, module)
    publication.close()
    assert (engine.prepared, engine.version) == (1, "v4")
    with pytest.raises(SessionError, match=r"version 'v4'.*not published, or gone.*the registry has none"):
        engine.take("v4")


def test_the_memory_is_stated(sender: RefitSender) -> None:
    segment = sender.retained_bytes["in_place"]
    assert segment == sender.retained_bytes["snapshot"] == os.path.getsize(f"/dev/shm/{sender.prepared.half._publisher.name}")  # type: ignore[union-attr, attr-defined]


def test_the_same_version_twice(sender: RefitSender, module: torch.nn.Module) -> None:
    publication = sender.publish("v1")
    assert sender.publish("v1") is publication, "the same bytes are the same publication"
    step(module)
    with pytest.raises(SessionError, match=r"version 'v1'.*with other bytes"):
        sender.publish("v1")
    assert SmallTaker(sender.registry).take() == "v1", "the first one stands"
    publication.close()
    with pytest.raises(SessionError, match="published before, and closed"):
        sender.publish("v1")


def test_an_open_version_is_not_overwritten_while_it_is_read(sender: RefitSender, module: torch.nn.Module) -> None:
    engine = SmallTaker(sender.registry)
    publication = sender.publish("v1", "in_place")
    with engine.leased() as lease:
        with pytest.raises(SessionError, match=r"publish 'v2'.*published in place.*leased by .*process"):
            sender.publish("v2")
        with pytest.raises(SessionError, match="refit to 'v2'"):
            sender.refit("v2")
        lease.check()
    assert engine.take() == "v1", "what was refused changed nothing"
    step(module)
    sender.publish("v2")
    assert engine.take() == "v2"
    assert publication.close() == [], "it was ended by the second"
    assert engine.take() is None


def test_a_snapshot_is_waited_for(sender: RefitSender, module: torch.nn.Module) -> None:
    engine = SmallTaker(sender.registry)
    sender.publish("v1", "snapshot")
    published = threading.Event()
    with engine.leased() as lease:
        step(module)
        thread = threading.Thread(target=lambda: (sender.publish("v2", "snapshot"), published.set()))
        thread.start()
        assert not published.wait(0.3)
        lease.check()
    assert published.wait(20.0)
    thread.join()
    assert engine.take() == "v2"
    assert same(engine.weights, module)


def test_a_lease_that_is_revoked_is_found_before_the_commit(sender: RefitSender, module: torch.nn.Module) -> None:
    engine = SmallTaker(sender.registry)
    publication = sender.publish("v1")
    assert engine.take() == "v1"
    step(module)
    publication = sender.publish("v2")
    engine.before_commit = lambda: engine.revoked.extend(publication.close(0.0))
    with pytest.raises(SessionError, match=r"version 'v2'.*the lease was revoked"):
        engine.take()
    assert len(engine.revoked) == 1
    assert engine.version == "v1"
    engine.before_commit = lambda: None
    step(module)
    publication = sender.publish("v3")
    assert engine.take() == "v3"
    assert same(engine.weights, module)
    assert leases(sender, publication.epoch) == []


def test_a_registry_that_is_gone_leaves_it_to_the_memory(sender: RefitSender, module: torch.nn.Module) -> None:
    """The reader's own mark: read while the registry is away, it commits; overwritten meanwhile, it does not."""
    engine = SmallTaker(sender.registry)
    sender.publish("v1")

    def away() -> None:
        sender._publisher._serving = None

    engine.before_commit = away
    assert engine.take() == "v1"
    assert same(engine.weights, module)
    engine.before_commit = lambda: None
    with pytest.raises(RefitError, match=f"registry at {sender.registry}"):
        engine.take()
    assert engine.version == "v1"


def test_memory_that_changed_is_found_without_the_registry(sender: RefitSender, module: torch.nn.Module) -> None:
    engine = SmallTaker(sender.registry)
    sender.publish("v1")

    def overwrite() -> None:
        sender._publisher._serving = None
        sender.prepared.half.end()  # type: ignore[union-attr]

    engine.before_commit = overwrite
    with pytest.raises(WireError, match="refilled or belongs to another publication"):
        engine.take()
    assert engine.version == ""


def test_closing_the_sender_revokes(sender: RefitSender) -> None:
    engine, address = SmallTaker(sender.registry), sender.registry
    sender.publish("v1")
    with engine.leased() as lease:
        sender.close()
        with pytest.raises(SessionError, match="revoked"):
            lease.check()
    assert StoreRegistry(address).entries(soon()) == []


def test_engines_of_both_forms(module: torch.nn.Module) -> None:
    """A push to a known engine and a take by an unknown one, in turns, from one sender."""
    pushed = SmallEngine()
    with contextlib.closing(RefitSender(PlainSource(module), pushed, SenderConfig(registry_port=0, deadline_s=20.0))) as sender:
        sender.prepare()
        taker = SmallTaker(sender.registry)
        for n in range(3):
            step(module)
            sender.refit(f"push {n}")
            assert same(pushed.weights, module)
            step(module)
            sender.publish(f"take {n}")
            assert taker.take() == f"take {n}"
            assert same(taker.weights, module)
        sender.publish("last")
        sender.refit("after it")
        with pytest.raises(SessionError, match="not published, or gone"):
            taker.take("last")
    pushed.close()


def test_what_can_not_be_published(module: torch.nn.Module) -> None:
    for wire in ("ring", "collective"):
        with pytest.raises(ConfigError, match=f"wire {wire} needs both sides, so engines can't take by it"):
            SenderConfig(wire=wire, registry_port=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no such port"):
        SenderConfig(registry_port=1 << 16)
    with pytest.raises(SessionError, match="publish was called before prepare"):
        RefitSender(PlainSource(module), None, SenderConfig(registry_port=0)).publish("v")
    engine = SmallEngine()
    with contextlib.closing(RefitSender(PlainSource(module), engine, SenderConfig())) as sender:
        sender.prepare()
        with pytest.raises(ConfigError, match="not made to publish"):
            sender.publish("v")
    engine.close()


@pytest.mark.parametrize("version", ["", "latest", 7, None])
def test_a_version_needs_a_name(sender: RefitSender, version: Any) -> None:
    with pytest.raises(SessionError, match="a publication needs a version"):
        sender.publish(version)
    assert StoreRegistry(sender.registry).entries(soon()) == []


def test_no_refit_without_engines(sender: RefitSender) -> None:
    with pytest.raises(SessionError, match="no engines to refit"):
        sender.refit("v")


def test_a_tensor_that_no_rank_reads_is_refused(module: torch.nn.Module, sender: RefitSender) -> None:
    sender.publish("v1")
    engine = SmallTaker(sender.registry, without="0.bias")
    with pytest.raises(RefitError, match=r"tensor '0\.bias': offered, but no engine rank reads it"):
        engine.take()
    assert engine.version == ""


def test_a_part_is_published_and_the_rest_stays(sender: RefitSender, module: torch.nn.Module) -> None:
    engine = SmallTaker(sender.registry)
    sender.publish("v1")
    engine.take()
    before = {n: t.clone() for n, t in engine.weights.items()}
    step(module)
    sender.publish("v2", part=["1.*"])
    assert engine.take() == "v2"
    for name, parameter in module.named_parameters():
        assert torch.equal(engine.weights[name], parameter.detach() if name.startswith("1.") else before[name]), name
    sender.publish("v3")
    engine.take()
    assert same(engine.weights, module)


def test_a_part_is_refitted_by_its_bytes(module: torch.nn.Module) -> None:
    engine = SmallEngine()
    with contextlib.closing(RefitSender(PlainSource(module), engine, SenderConfig(deadline_s=20.0))) as sender:
        sender.prepare()
        sender.refit("v1")
        before = {n: t.clone() for n, t in engine.weights.items()}
        step(module)
        report = sender.refit("v2", part=["0.weight"])
        assert report.nbytes == module[0].weight.nbytes  # type: ignore[union-attr, operator, index]
        for name, parameter in module.named_parameters():
            assert torch.equal(engine.weights[name], parameter.detach() if name == "0.weight" else before[name]), name
        with pytest.raises(RefitError, match=r"part '0\.weights': it matches no offered tensor.*0\.weight"):
            sender.refit("v3", part=["0.weights"])
        with pytest.raises(ConfigError, match="the part can't be read"):
            sender.refit("v3", part="0.weight")
        assert sender.refit("v3").nbytes == sum(p.nbytes for p in module.parameters())
        assert same(engine.weights, module)
    engine.close()


def test_parts_of_several_versions_are_named() -> None:
    manifest = Manifest({f"model.layers.{i}.w": TensorSpec((2,), "float32") for i in range(3)})
    parts = mixed(manifest, {}, layers(0), "v1", "v2")
    assert parts == {"*": "v1", "*.layers.0.*": "v2"}
    parts = mixed(manifest, parts, layers(0, 1), "v2", "v3")
    assert parts == {"*": "v1", "*.layers.0.*": "v3", "*.layers.1.*": "v3"}
    parts = mixed(manifest, parts, ["model.layers.1.w"], "v3", "v4")
    assert parts["model.layers.1.w"] == "v4"
    assert "*.layers.1.*" not in parts
    assert "*" not in mixed(manifest, parts, layers(2), "v4", "v5"), "nothing of the last full version is left"
    assert mixed(manifest, parts, ["*"], "v4", "v5") == {}
    assert mixed(manifest, parts, [], "v4", "v5") == {}


TRAINER = """
import os, sys, time
import torch, torch.distributed as dist
from tests.support.small_engine import PlainSource
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender import RefitSender, SenderConfig

rank, size, rendezvous, port, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{rendezvous}", rank=rank, world_size=size)


class Rows:
    aliases = {}
    specs = {"w": TensorSpec((4 * size, 4), "float32")}
    tensors = [torch.full((4, 4), float(rank + 1))]
    placements = Placements.from_rows(
        [Buffer("mine", 0, "float32", (4, 4))], [Placement("w", 0, (4 * rank, 0), (4 * rank + 4, 4), 0, (16, 4))]
    )

    def refresh(self):
        if not armed or rank != 1:
            return
        if fault == "late":
            time.sleep(600)
        if fault == "dead":
            os.kill(os.getpid(), 9)
        if fault == "odd":
            raise ZeroDivisionError("odd")


source, armed = Rows(), False
sender = RefitSender(lambda: source, None, SenderConfig(registry_port=port, deadline_s=5.0))
import vllm_refit_ext.sender.sender as module
module.LATE_S = 0.5
sender.ranks.deadline_s = 3.0
sender.prepare()
sender.publish("v1")
print(sender.registry, flush=True)
armed = True
for line in sys.stdin:
    source.tensors[0].add_(10)
    try:
        sender.publish(line.strip())
        print("published", flush=True)
    except RefitError as error:
        print(f"{type(error).__name__} {error}".replace("\\n", " "), flush=True)
os._exit(0)
"""


class Trainer:
    """Trainer ranks in processes of their own."""

    def __init__(self, size: int = 1, port: int = 0, fault: str = "none") -> None:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            meet = probe.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if k != "MASTER_ADDR"} | {"OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(rank), str(size), str(meet), str(port), fault],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(size)
        ]
        lines = [self.line(rank) for rank in range(size)]
        self.registry = lines[0]

    def line(self, rank: int = 0) -> str:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def publish(self, version: str) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(version + "\n")
                process.stdin.flush()

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def test_two_ranks_make_one_version() -> None:
    trainer = Trainer(size=2)
    try:
        engine = SmallTaker(trainer.registry)
        assert engine.take() == "v1"
        assert engine.weights["w"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4
        trainer.publish("v2")
        assert [trainer.line(0), trainer.line(1)] == ["published", "published"]
        assert engine.take() == "v2"
        assert engine.weights["w"][:, 0].tolist() == [11.0] * 4 + [12.0] * 4
    finally:
        trainer.kill()


@pytest.mark.parametrize(("fault", "error"), [("late", "DeadlineError"), ("dead", "DeadlineError"), ("odd", "ZeroDivisionError")])
def test_a_rank_that_does_not_publish(fault: str, error: str) -> None:
    """The version never becomes READY, the error names the rank, and engines keep what they serve."""
    trainer = Trainer(size=2, fault=fault)
    try:
        engine = SmallTaker(trainer.registry)
        assert engine.take() == "v1"
        trainer.publish("v2")
        said = trainer.line(0)
        assert error in said
        assert "trainer rank 1" in said
        assert engine.take() is None
        assert engine.weights["w"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4
        assert StoreRegistry(trainer.registry).entries(soon()) == []
    finally:
        trainer.kill()


def test_a_trainer_that_is_killed_and_comes_back() -> None:
    """Its engine serves on, says why it can't take, and takes from the next trainer without another prepare."""
    first = Trainer()
    engine = SmallTaker(first.registry)
    try:
        assert engine.take() == "v1"
        first.kill()
        with pytest.raises((WireError, DeadlineError), match="registry at"):
            engine.take()
        assert engine.version == "v1"
        second = Trainer(port=int(first.registry.rpartition(":")[2]))
        try:
            assert second.registry == first.registry
            assert engine.take() == "v1", "the same name, and another publication"
            second.publish("v2")
            assert second.line() == "published"
            assert engine.take() == "v2"
            assert engine.weights["w"][:, 0].tolist() == [11.0] * 4
            assert engine.prepared == 1
        finally:
            second.kill()
    finally:
        first.kill()


def test_a_stopped_trainer_costs_a_deadline() -> None:
    trainer = Trainer()
    try:
        engine = SmallTaker(trainer.registry)
        assert engine.take() == "v1"
        trainer.ranks[0].send_signal(signal.SIGSTOP)
        threads = list(Path(f"/proc/{trainer.ranks[0].pid}/task").glob("*/stat"))
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in threads):
            time.sleep(0.001)
        with pytest.raises(DeadlineError, match="registry at"):
            engine.take(deadline_s=1.0)
        trainer.ranks[0].send_signal(signal.SIGCONT)
        assert engine.take() is None
    finally:
        trainer.ranks[0].send_signal(signal.SIGCONT)
        trainer.kill()


def test_joins_leaves_publishes_and_revokes_in_any_order(sender: RefitSender, module: torch.nn.Module) -> None:
    """A seeded schedule: every engine holds one version, whole, and nothing is left in the registry."""
    rng = random.Random(7)
    wanted: dict[str, dict[str, torch.Tensor]] = {}
    stop, wrong, taken = threading.Event(), list[str](), list[str]()

    def run(seed: int) -> None:
        mine = random.Random(seed)
        engine = SmallTaker(sender.registry)
        while not stop.is_set():
            if mine.random() < 0.1:
                engine = SmallTaker(sender.registry)  # it left, and another one joins
            engine.before_commit = lambda: time.sleep(mine.random() * 0.02)
            try:
                version = engine.take()
            except (SessionError, WireError):
                continue  # revoked: it keeps what it had
            if version is not None:
                taken.append(version)
                held = wanted[version]
                if not all(torch.equal(engine.weights[n], held[n]) for n in held):
                    wrong.append(version)
            time.sleep(mine.random() * 0.01)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for n in range(40):
        step(module)
        wanted[f"v{n}"] = {name: p.detach().clone() for name, p in module.named_parameters()}
        while True:
            try:
                publication = sender.publish(f"v{n}", rng.choice(["in_place", "snapshot"]))  # type: ignore[arg-type]
                break
            except SessionError:
                time.sleep(0.005)  # the one before is in place, and it is read
        time.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:
            publication.close(rng.choice([0.0, 0.01, 5.0]))
    publication.close(0.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(set(taken)) > 5
    registry = StoreRegistry(sender.registry)
    assert registry.entries(soon()) == []
    names = registry.connection.call(lambda store: store.call(lambda raw: raw.num_keys(), soon()), soon())
    assert names <= 4, "torch's own key and the list of entries; nothing of 40 versions"
