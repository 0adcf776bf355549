"""A real engine refitted from four ranks of FSDP2, tensor and expert parallelism: all of it equals a fresh engine's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.engine.test_mxfp8 import addresses, live, same, weights
from tests.support.dtensor_engine_jobs import LAYOUTS, PRELOAD, cycle
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import open_llm

pytestmark = pytest.mark.engine

SETTINGS: dict[str, Any] = {"extension": "vllm_refit_ext.RefitWorkerExtension", "in_process": True}
LONG = ("hsdp", "compiled")
HANDLE = "handler_tensor"
"""It holds the address of what oneDNN packed, which the answers go through."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path, Any, Any]]:
    """An engine of other weights and its URL; the checkpoint, and a fresh engine's answers and tensors."""
    base = tmp_path_factory.mktemp("dtensor")
    start, trained = (save_model("qwen3_moe", base / str(seed), seed=seed) for seed in (0, 1))
    with open_llm(trained, **SETTINGS) as fresh:
        wanted = [{k: list(v) for k, v in asdict(a).items()} for a in one_by_one(fresh)]
        tensors = live(fresh)
    with open_llm(start, **SETTINGS) as llm, bridge(llm) as url:
        yield llm, url, trained, wanted, tensors


def kept(llm: Any) -> dict[str, int]:
    """Addresses of all but the scales of an unused FP8 cache and handles of oneDNN, which vLLM makes anew."""
    return {name: address for name, address in addresses(llm).items() if not name.endswith(("_scale_cpu", HANDLE))}


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in LAYOUTS])
def test_equal_to_a_fresh_engine(running: tuple[Any, str, Path, Any, Any], layout: str) -> None:
    llm, url, trained, wanted, tensors = running
    before = kept(llm)
    found = run_ranks(cycle, 4, str(trained), layout, url, {"wire": "shm"}, preload=PRELOAD, timeout=240)[0]
    assert found["other"] != wanted, "the first refit must have changed the engine"
    assert found["trained"] == wanted
    differing = same(live(llm), tensors)
    assert [name for name in differing if not name.endswith(HANDLE)] == []
    assert kept(llm) == before
    given = weights(trained)
    assert found["compared"] == len(given)
    assert found["nbytes"] == sum(e["nbytes"] for e in found["edges"]) == sum(t.nbytes for t in given.values())
    assert {e["source"] for e in found["edges"]} == {0, 1, 2, 3}, "each rank gives its own shards"
