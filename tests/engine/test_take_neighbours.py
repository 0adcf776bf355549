"""Real engines copy a version from each other: with the trainer gone, together on one host, and over hosts that are played."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from examples.support.tiny_model import save_model
from tests.support.engine_bridge import one_by_one
from tests.support.engines import open_llm
from tests.support.versions_engine import PLAIN, VersionsEngine
from tests.support.versions_trainer import VersionsTrainer
from vllm_refit_ext.wires.registry import StoreRegistry

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REFIT_HOST", "127.0.0.1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return [save_model("qwen3_moe", root / f"seed{seed}", seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engines(folders: list[Path]) -> Iterator[list[VersionsEngine]]:
    """Three engines on one host."""
    started = [VersionsEngine(folders[0]) for _ in range(3)]
    try:
        yield [engine.ready() for engine in started]
    finally:
        for engine in started:
            engine.close()


@pytest.fixture(scope="module")
def wanted(folders: list[Path], engines: Any) -> list[Any]:
    """Answers of a fresh engine of each checkpoint, as JSON has them."""
    found = []
    for folder in folders:
        with open_llm(folder, extension=PLAIN, in_process=True) as fresh:
            found.append(json.loads(json.dumps([dataclasses.astuple(a) for a in one_by_one(fresh)])))
    assert found[0] != found[1]
    return found


@pytest.fixture
def trainer(folders: list[Path]) -> Iterator[VersionsTrainer]:
    made = VersionsTrainer(folders[0])
    yield made
    made.close()


def size_of(folder: Path) -> int:
    return sum(t.nbytes for t in load_file(folder / "model.safetensors").values())


def test_a_late_engine_joins_from_a_neighbour(
    engines: list[VersionsEngine], trainer: VersionsTrainer, folders: list[Path], wanted: list[Any]
) -> None:
    """The trainer has closed the version and changed its weights: the version lives in an engine."""
    first, late, _ = engines
    publication = trainer.publish("v1", folders[1])
    first.take("latest", trainer.registry)
    reply = first.answer()
    assert (reply["version"], reply["replica"][:11]) == ("v1", "by wire shm")
    assert reply["answers"] == wanted[1]
    publication.close()
    late.take("latest", trainer.registry)
    reply = late.answer()
    assert (reply["version"], reply["epoch"], reply["received"]) == ("v1", publication.epoch, {})
    assert len(reply["forwarded"]) == 1
    assert {"find", "register", "read", "write", "commit"} <= reply["seconds"].keys()
    assert reply["answers"] == wanted[1]


def test_engines_of_a_host_share_the_work(
    engines: list[VersionsEngine], trainer: VersionsTrainer, folders: list[Path], wanted: list[Any]
) -> None:
    """Each byte leaves the trainer once, and all have all."""
    for version, which in (("s1", 0), ("s2", 1)):
        trainer.publish(version, folders[which])
        for engine in engines:
            engine.take(version, trainer.registry)
        replies = [engine.answer() for engine in engines]
        assert [r["version"] for r in replies] == [version] * 3
        assert [r["answers"] == wanted[which] for r in replies] == [True] * 3
        received = [sum(r["received"].values()) for r in replies]
        whole = [a + sum(r["forwarded"].values()) for a, r in zip(received, replies, strict=True)]
        assert sum(received) == size_of(folders[which])
        assert set(whole) == {size_of(folders[which])}
    registry = StoreRegistry(trainer.registry)
    serving = [e for e in registry.entries(time.monotonic() + 20.0) if e.replica is not None]
    assert [(e.version, e.complete) for e in serving] == [("s2", True)] * 3
    assert [registry.leases(e.epoch, time.monotonic() + 20.0) for e in serving] == [[]] * 3
