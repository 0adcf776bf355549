"""Wire `ring` over played hosts: real Megatron ranks on two hosts, a real engine on one of them, and a relay between.

The engine answers exactly like a fresh one, and between hosts goes what the plan takes from there, once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import open_llm
from tests.support.relay_jobs import check_transfer, cycle, stranded
from vllm_refit_ext.core.hosts import HOST_ID

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {"extension": "tests.support.host_extension.HostExtension", "in_process": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, list[Any], str]]:
    """An engine of this process, its URL, what a fresh one of the trainer's checkpoint answers, and that checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")
    start, trained = save_model("qwen3_moe", root / "start", seed=0), save_model("qwen3_moe", root / "trained", seed=1)
    with open_llm(trained, **SETTINGS) as fresh:
        wanted = [{k: list(v) for k, v in asdict(a).items()} for a in one_by_one(fresh)]
    try:
        with open_llm(start, **SETTINGS) as llm, bridge(llm) as url:
            yield llm, url, wanted, str(trained)
    finally:
        os.environ.pop(HOST_ID, None)


@pytest.mark.parametrize(("geometry", "hosts", "bucket"), [({"ep": 2}, "ab", 30_000), ({"pp": 2}, "ab", 50_000)])
def test_equal_to_a_fresh_engine(engine: Any, geometry: dict[str, Any], hosts: str, bucket: int) -> None:
    llm, url, wanted, trained = engine
    assert llm.collective_rpc("refit_play", args=("b",)) == ["b"]
    found = run_ranks(cycle, 2, trained, geometry, [url], hosts, bucket, timeout=240)
    first = found[0]
    assert first["other"] != [wanted], "the first refit must have changed the engine"
    assert first["repeated"] == [[wanted]] * 2
    assert first["compared"] >= 69
    assert set(check_transfer(found, hosts, "b")) == {(0, 0)}


def test_an_engine_on_a_host_without_the_trainer_is_refused_at_prepare(engine: Any) -> None:
    llm, url, _, trained = engine
    llm.collective_rpc("refit_play", args=("c",))
    report = set(run_ranks(stranded, 2, trained, {"ep": 2}, [url], "ab", timeout=120))
    assert len(report) == 1, "the same on every rank"
    assert "engine rank 0 on 'c'" in report.pop()[1]
