"""FP32 shards of mixed-precision FSDP2 into an MXFP8 engine of BF16: cast and quantised on the move, or by the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.engine.test_dtensor_engine import kept
from tests.engine.test_mxfp8 import SETTINGS, live, same
from tests.support.dtensor_engine_jobs import PRELOAD, cycle
from tests.support.engine_bridge import bridge
from tests.support.engines import open_llm

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, list[Path], Any]]:
    """An engine and its URL; the checkpoint in BF16 and one in FP32, and the tensors of fresh engines of both."""
    base = tmp_path_factory.mktemp("mixed")
    start = save_model("qwen3_moe", base / "start", dtype="bfloat16")
    trained = [save_model("qwen3_moe", base / dtype, seed=1, dtype=dtype) for dtype in ("bfloat16", "float32")]
    tensors = []
    for folder in trained:
        with open_llm(folder, **SETTINGS) as fresh:
            tensors.append(live(fresh))
    with open_llm(start, **SETTINGS) as llm, bridge(llm) as url:
        yield llm, url, trained, tensors


@pytest.mark.parametrize("prequantize", [False, True], ids=["by-the-receiver", "by-the-trainer"])
def test_equal_to_a_fresh_engine(running: tuple[Any, str, list[Path], Any], prequantize: bool) -> None:
    llm, url, trained, tensors = running
    before = kept(llm)
    config = {"wire": "shm", "prequantize": prequantize}
    found = run_ranks(cycle, 4, str(trained[0]), "fsdp", url, config, preload=PRELOAD, timeout=240)[0]
    assert found["compared"]
    assert same(live(llm), tensors[0]) == []
    assert kept(llm) == before


def test_what_is_not_quantised_is_rounded_as_a_loader_would(running: tuple[Any, str, list[Path], Any]) -> None:
    """What is quantised from FP32 is rounded once; a fresh engine rounds to BF16 first, and some of its codes differ."""
    llm, url, trained, tensors = running
    run_ranks(cycle, 4, str(trained[1]), "fsdp", url, {"wire": "shm"}, preload=PRELOAD, timeout=240)
    coded = {n for n, t in tensors[1].items() if t.dtype != torch.bfloat16}
    assert set(same(live(llm), tensors[1])) <= coded
    assert any("norm" in n or "embed" in n for n in set(tensors[1]) - coded)
