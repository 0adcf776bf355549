"""Wire `ring` over played hosts, with an engine that spans them, and with faults. `test_relay.py` has the short form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import RankFailed, run_ranks
from examples.support.tiny_model import save_model
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import open_llm
from tests.support.relay_jobs import check_transfer, cycle, dies, simple, stalls, stranded
from vllm_refit_ext.client import LLMClient

pytestmark = [pytest.mark.engine, pytest.mark.long]

EXTENSION = "tests.support.host_extension.HostExtension"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The one that engines start with, and the one that trainers hold."""
    root = tmp_path_factory.mktemp("checkpoints")
    return save_model("qwen3_moe", root / "start", seed=0), save_model("qwen3_moe", root / "trained", seed=1)


@pytest.fixture(scope="module")
def engine(checkpoints: tuple[Path, Path]) -> Iterator[tuple[Any, str, list[Any]]]:
    """A TP2 engine, its URL, and what a fresh one of the trainer's checkpoint answers."""
    start, trained = checkpoints
    with open_llm(trained, extension=EXTENSION, ranks=2) as fresh:
        wanted = [{k: list(v) for k, v in asdict(a).items()} for a in one_by_one(fresh)]
    with open_llm(start, extension=EXTENSION, ranks=2) as llm, bridge(llm) as url:
        yield llm, url, wanted


CASES = {
    # Both engine ranks on the first host: the second host's ranks send everything.
    "pp2-engine-on-one-host": (2, {"pp": 2}, "ab", "aa", 50_000),
    # Each host has its engine rank; experts lie on all four ranks, so all exchange.
    "ep4-engine-over-two-hosts": (4, {"ep": 4}, "aabb", "ab", 100_000),
    # Every host holds a whole copy: near copies are read and nothing is sent.
    "tp2-a-copy-on-each-host": (4, {"tp": 2}, "aabb", "ab", 100_000),
    "three-hosts": (4, {"tp": 2, "ep": 2}, "abcb", "cb", 30_000),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_a_fresh_engine(engine: tuple[Any, str, list[Any]], checkpoints: tuple[Path, Path], case: str) -> None:
    llm, url, wanted = engine
    ranks, geometry, hosts, engine_hosts, bucket = CASES[case]
    assert llm.collective_rpc("refit_play", args=(engine_hosts,)) == list(engine_hosts)
    found = run_ranks(cycle, ranks, str(checkpoints[1]), geometry, [url], hosts, bucket, timeout=240)
    first = found[0]
    assert first["other"] != [wanted], "the first refit must have changed the engine"
    assert first["repeated"] == [[wanted]] * 2
    assert first["compared"] >= 69
    far = check_transfer(found, hosts, engine_hosts)
    assert bool(far) == (case != "tp2-a-copy-on-each-host")


def test_an_engine_on_a_host_without_the_trainer_is_refused_at_prepare(engine: Any, checkpoints: tuple[Path, Path]) -> None:
    llm, url, _ = engine
    llm.collective_rpc("refit_play", args=("ac",))
    report = set(run_ranks(stranded, 2, str(checkpoints[1]), {"ep": 2}, [url], "ab", timeout=120))
    assert len(report) == 1, "the same on every rank"
    kind, text = report.pop()
    assert kind == "ConfigError"
    assert "engine rank 1 on 'c'" in text
    assert "trainer rank 0 on 'a'; trainer rank 1 on 'b'" in text
    assert "VLLM_REFIT_HOSTID" in text


@pytest.mark.parametrize(("victim", "kind"), [(0, "receive"), (1, "receive"), (3, "send")])
def test_a_rank_is_killed_while_bytes_move(engine: Any, checkpoints: tuple[Path, Path], victim: int, kind: str) -> None:
    """A relay, trainer rank 0 and others; the engine is torn, and a trainer that starts again heals it."""
    llm, url, wanted = engine
    llm.collective_rpc("refit_play", args=("ab",))
    job = (str(checkpoints[1]), {"ep": 4}, [url], "aabb", 20_000)
    with pytest.raises(RankFailed, match="killed by SIGKILL"):
        run_ranks(dies, 4, *job, victim, kind, timeout=120)
    assert [(s.state, s.version) for s in LLMClient(llm).status()] == [("torn", "good")] * 2
    assert run_ranks(simple, 4, *job, f"after-{victim}", timeout=120)[0] == [wanted]
    assert [(s.state, s.version) for s in LLMClient(llm).status()] == [("ready", f"after-{victim}")] * 2


def test_a_relay_is_stopped_and_goes_on(engine: Any, checkpoints: tuple[Path, Path]) -> None:
    llm, url, wanted = engine
    llm.collective_rpc("refit_play", args=("ab",))
    results = run_ranks(stalls, 4, str(checkpoints[1]), {"ep": 4}, [url], "aabb", 20_000, 3, timeout=180)
    assert len({r[0][1] for r in results}) == 1, "every trainer rank raises the same error"
    assert {r[0][0] for r in results} <= {"DeadlineError", "WireError"}
    assert results[0][1] == [wanted], "the next refit, by the same processes, is exact"
