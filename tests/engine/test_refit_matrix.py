"""Every trainer geometry against every engine: after a refit the engine answers exactly like a fresh one of the same checkpoint.

Engines: vLLM on a CPU as it comes (its own reload is the writer), and with the plain layouts of GPUs (moves are written in
place), which alone can run expert parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import one_at_a_time, open_llm
from tests.support.refit_jobs import cycle, train_and_export

pytestmark = pytest.mark.engine

STOCK, PLAIN = "vllm_refit_ext.RefitWorkerExtension", "tests.support.plain_cpu.PlainCpuExtension"
ENGINES: dict[str, dict[str, Any]] = {
    "stock-tp1": {"extension": STOCK},
    "stock-tp2": {"extension": STOCK, "ranks": 2},
    "plain-tp1": {"extension": PLAIN},
    "plain-tp2": {"extension": PLAIN, "ranks": 2},
    "plain-tp2-ep2": {"extension": PLAIN, "ranks": 2, "enable_expert_parallel": True},
    "plain-pp2": {"extension": PLAIN, "stages": 2},
    "plain-tp2-pp2": {"extension": PLAIN, "ranks": 2, "stages": 2},
}
TRAINERS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "pp2": (2, {"pp": 2}),
    "tp2-ep2": (4, {"tp": 2, "ep": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
}


@dataclass
class Running:
    name: str
    llm: Any
    url: str
    wanted: list[Any]
    settings: dict[str, Any]
    checkpoint: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The one that engines start with, and the one that trainers hold."""
    root = tmp_path_factory.mktemp("checkpoints")
    return save_model("qwen3_moe", root / "start", seed=0), save_model("qwen3_moe", root / "trained", seed=1)


SHORT = {"stock-tp1": ("ep4", "tp2-pp2"), "plain-tp2-ep2": ("tp2-ep2", "pp2")}
"""Of these engines these trainers, which between them show every part. The others wait for `make test-all`."""


def cases(short: Mapping[str, Sequence[str]], trainers: Iterable[str]) -> list[Any]:
    """Every engine with every trainer; those that `short` does not name are long."""
    return [
        pytest.param(engine, trainer, marks=[] if trainer in short.get(engine, ()) else [pytest.mark.long])
        for engine in ENGINES
        for trainer in trainers
    ]


@pytest.fixture(scope="module")
def engines(checkpoints: tuple[Path, Path]) -> Iterator[Callable[[str], Running]]:
    @contextlib.contextmanager
    def start(name: str) -> Iterator[Running]:
        settings = ENGINES[name]
        first, trained = checkpoints
        with open_llm(trained, **settings) as fresh:
            wanted = [asdict(a) for a in one_by_one(fresh)]
        with open_llm(first, **settings) as llm, bridge(llm) as url:
            yield Running(name, llm, url, wanted, settings, trained)

    with one_at_a_time(start) as get:
        yield get


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Running]) -> Running:
    return engines(request.param)


@pytest.mark.parametrize(("engine", "trainer"), cases({"stock-tp1": ("ep2",)}, ["ep2"]), indirect=["engine"])
def test_trained_weights_equal_the_exported_checkpoint(engine: Running, trainer: str, tmp_path: Path) -> None:
    """Megatron trains, the engine is refitted, and a fresh engine loads what the bridge exports."""
    out = tmp_path / "exported"
    ranks, geometry = TRAINERS[trainer]
    found = run_ranks(train_and_export, ranks, str(engine.checkpoint), geometry, engine.url, str(out), timeout=240)[0]
    assert found != as_json(engine.wanted), "the step must have changed the weights"
    with open_llm(out, **engine.settings) as fresh:
        assert found == as_json([asdict(a) for a in one_by_one(fresh)])


@pytest.mark.parametrize(("engine", "trainer"), cases(SHORT, TRAINERS), indirect=["engine"])
def test_refit_equals_fresh_engine(engine: Running, trainer: str) -> None:
    ranks, geometry = TRAINERS[trainer]
    found = run_ranks(cycle, ranks, str(engine.checkpoint), geometry, engine.url, timeout=240)[0]
    wanted = as_json(engine.wanted)
    assert found["other"] != wanted, "the first refit must have changed the engine"
    assert found["repeated"] == [wanted] * 3
    assert found["compared"] >= 69
    assert all(names == ["model.norm.weight"] for names in found["changed"]), "one changed tensor changes exactly that one"
    check_bytes(found["edges"], found["report"])
    world = engine.settings.get("ranks", 1) * engine.settings.get("stages", 1)
    writers = {report["writer"] for reports in found["report"]["engines"] for report in reports}
    assert writers == ({"in place"} if engine.name.startswith("plain") else {"in place and reload"})
    assert [(s["state"], s["version"]) for s in found["status"]] == [("ready", "checkpoint")] * world


def check_bytes(edges: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Bytes that engine ranks received from each trainer rank are those of the plan."""
    planned = {(e["source"], e["target"]): e["nbytes"] for e in edges}
    received = {(int(s), r["rank"]): n for ranks in report["engines"] for r in ranks for s, n in r["received"].items()}
    assert received == planned
    assert report["nbytes"] == sum(planned.values())


def as_json(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As they look after a JSON round trip, which keeps every bit of a float."""
    return [{k: list(v) for k, v in a.items()} for a in answers]
