"""Wire `collective` on gloo between real trainers and real engines: exact answers, and on every edge the plan's bytes to the
byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import COMMON, EXPERTS, save_model
from tests.support.collective_jobs import cycle
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import one_at_a_time, open_llm

pytestmark = pytest.mark.engine

STOCK, PLAIN = "vllm_refit_ext.RefitWorkerExtension", "tests.support.plain_cpu.PlainCpuExtension"
ENGINES: dict[str, dict[str, Any]] = {
    "stock-tp1": {"extension": STOCK, "in_process": True},
    "plain-tp1": {"extension": PLAIN, "in_process": True},
    # In a process of its own: vLLM reads its thread binding once a process, and another engine's may differ.
    "stock-tp1-apart": {"extension": STOCK},
    "plain-tp2": {"extension": PLAIN, "ranks": 2},
    "plain-tp2-ep2": {"extension": PLAIN, "ranks": 2, "enable_expert_parallel": True},
}
CASES = [
    ("stock-tp1", 2, {"tp": 2, "pp": 1}, 10_000),
    ("plain-tp1", 4, {"tp": 2, "ep": 2}, 50_000),
    ("plain-tp2", 8, {"ep": 8}, 100_000),
    ("plain-tp2", 4, {"tp": 2}, 100_000),
    ("plain-tp2-ep2", 2, {"pp": 2}, 30_000),
    ("plain-tp2-ep2", 4, {"tp": 2, "ep": 2, "etp": 2}, 100_000),
]
"""Engine, trainer ranks, trainer geometry, bytes of a round. Ranks beyond the geometry are data parallel: replicas."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one that engines start with and trainers hold. `cycle` gives the engines other weights in between."""
    return save_model("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "trained", seed=1)


class Running:
    """An engine behind a URL, and what a fresh one answers."""

    def __init__(self, llm: Any, url: str, wanted: list[dict[str, Any]]) -> None:
        self.llm, self.url, self.wanted = llm, url, wanted


@contextlib.contextmanager
def running(name: str, checkpoint: Path) -> Iterator[Running]:
    with open_llm(checkpoint, **ENGINES[name]) as llm:
        wanted = [{k: list(v) for k, v in asdict(a).items()} for a in one_by_one(llm)]
        with bridge(llm) as url:
            yield Running(llm, url, wanted)


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[Callable[[str], Running]]:
    with one_at_a_time(lambda name: running(name, checkpoint)) as get:
        yield get


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Running]) -> Running:
    return engines(request.param)


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "ranks", "geometry", "bucket"),
    [pytest.param(*case, id=f"{case[0]}-from-{'-'.join(f'{k}{v}' for k, v in case[2].items())}") for case in CASES],
    indirect=["engine"],
)
def test_equal_to_a_fresh_engine(
    engine: Running,
    checkpoint: Path,
    request: pytest.FixtureRequest,
    ranks: int,
    geometry: dict[str, Any],
    bucket: int,
) -> None:
    found = run_ranks(cycle, ranks, str(checkpoint), geometry, [engine.url], bucket, timeout=300)[0]
    assert found["other"] != [engine.wanted], "the first refit must have changed the engine"
    assert found["repeated"] == [[engine.wanted]] * 2
    assert found["compared"] >= 69
    assert found["rounds"] > 2, "small buckets make many rounds"
    check_bytes(found, [ENGINES[request.node.callspec.params["engine"]]])


def test_two_engines_of_different_size_in_one_refit(checkpoint: Path) -> None:
    """One takes vLLM's own reload, the other is written in place, in two ranks."""
    with running("stock-tp1-apart", checkpoint) as small, running("plain-tp2", checkpoint) as large:
        found = run_ranks(cycle, 2, str(checkpoint), {"ep": 2}, [small.url, large.url], 100_000, timeout=300)[0]
        assert all(a != b for a, b in zip(found["other"], [small.wanted, large.wanted], strict=True)), "both were changed"
        assert found["repeated"] == [[small.wanted, large.wanted]] * 2
        check_bytes(found, [ENGINES["stock-tp1-apart"], ENGINES["plain-tp2"]])


def check_bytes(found: dict[str, Any], engines: list[dict[str, Any]]) -> None:
    """Counted bytes of every edge are the plan's, and each engine rank got its own cut of the model and not a byte more."""
    planned = {(e["source"], e["target"]): e["nbytes"] for e in found["edges"]}
    received, first = {}, 0
    for reports, settings in zip(found["report"]["engines"], engines, strict=True):
        for report in reports:
            mine = {(int(s), first + report["rank"]): n for s, n in report["received"].items()}
            received |= mine
            assert sum(mine.values()) == share_bytes(settings.get("ranks", 1), settings.get("enable_expert_parallel", False)), (
                report
            )
        first += len(reports)
    assert received == planned


def share_bytes(tp: int, ep: bool) -> int:
    """What one rank of an engine holds, by hand from the model's sizes, in bytes of float32."""
    c, e = COMMON, EXPERTS
    hidden, head = c["hidden_size"], c["head_dim"]
    cut = 2 * c["vocab_size"] * hidden  # embedding and output
    attention = (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * head * hidden
    experts = e["num_experts"] * 3 * e["moe_intermediate_size"] * hidden  # cut by expert or inside each: the same share
    whole = hidden + c["num_hidden_layers"] * (2 * hidden + 2 * head + e["num_experts"] * hidden)  # norms and routers
    return 4 * (whole + (cut + c["num_hidden_layers"] * (attention + experts)) // tp)
