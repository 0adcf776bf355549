"""Faults of wire `collective` on real engines: everyone hears the same in time, a torn engine says so, and the next refit
works.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import RankFailed, run_ranks
from examples.support.tiny_model import save_model
from tests.support.collective_jobs import dies, disagrees, loses_engine, simple, stalls
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import open_llm
from vllm_refit_ext.client import LLMClient

pytestmark = [pytest.mark.engine, pytest.mark.long]

PID = "tests.support.collective_jobs.PidExtension"
GEOMETRY = {"ep": 2}
BUCKET = 50_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("checkpoints") / "model", seed=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    """A TP2 engine of the trainer's checkpoint: its own answers are the wanted ones."""
    with open_llm(folder, extension=PID, ranks=2) as llm, bridge(llm) as url:
        yield llm, url, plain(one_by_one(llm))


def plain(answers: list[Any]) -> list[dict[str, Any]]:
    """As they look after a JSON round trip."""
    return [{k: list(v) for k, v in asdict(a).items()} for a in answers]


def states(llm: Any) -> list[tuple[str, str]]:
    return [(s.state, s.version) for s in LLMClient(llm).status()]


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_trainer_rank_is_killed(engine: Any, folder: Path, when: str) -> None:
    llm, url, wanted = engine
    with pytest.raises(RankFailed, match="killed by SIGKILL"):
        run_ranks(dies, 2, str(folder), GEOMETRY, [url], BUCKET, when, timeout=120)
    # The engine's call ends by its own deadline; the next one waits for it.
    found = states(llm)
    if when == "before":
        assert found == [("ready", "good")] * 2
        assert plain(one_by_one(llm)) == wanted, "nothing was written, so the old version serves on"
    elif when == "during":
        assert found == [("torn", "good")] * 2
        with pytest.raises(Exception, match=r"torn|mix versions"):
            one_by_one(llm)
    else:
        assert found == [("ready", "late")] * 2
        assert plain(one_by_one(llm)) != wanted
    # A trainer that starts again is taken in by the engine that did not.
    assert run_ranks(simple, 2, str(folder), GEOMETRY, [url], BUCKET, f"after-{when}", timeout=120)[0] == [wanted]
    assert states(llm) == [("ready", f"after-{when}")] * 2


@pytest.mark.parametrize("who", ["trainer", "engine"])
def test_a_rank_is_stopped_and_goes_on(engine: Any, folder: Path, who: str) -> None:
    llm, url, wanted = engine
    pid = llm.collective_rpc("refit_pid")[1] if who == "engine" else 0
    results = run_ranks(stalls, 2, str(folder), GEOMETRY, [url], BUCKET, pid, timeout=180)
    kinds, texts = {r[0][0] for r in results}, {r[0][1] for r in results}
    assert len(texts) == 1, "every trainer rank raises the same error"
    assert kinds <= {"DeadlineError", "WireError"}
    assert results[0][1] == [wanted], "the next refit, by the same processes, is exact"


def test_a_rank_that_holds_another_plan(engine: Any, folder: Path) -> None:
    llm, url, _ = engine
    results = run_ranks(disagrees, 2, str(folder), GEOMETRY, [url], BUCKET, timeout=120)
    texts = {r[0][1] for r in results}
    assert len(texts) == 1
    assert "another plan" in texts.pop()
    assert all(seconds < 30 for (_, _, seconds), _ in results), "report at once, not at the deadline"
    assert results[0][1] == ["good", "good"]
    assert states(llm) == [("ready", "again")] * 2


def test_an_engine_rank_is_killed_and_the_other_engine_goes_on(engine: Any, folder: Path) -> None:
    _, url, wanted = engine
    with open_llm(folder, extension=PID) as second, bridge(second) as other:
        pid = second.collective_rpc("refit_pid")[0]
        results = run_ranks(loses_engine, 2, str(folder), GEOMETRY, [url, other], BUCKET, pid, timeout=180)
    assert len({r[0][1] for r in results}) == 1
    assert results[0][1] == [wanted]
