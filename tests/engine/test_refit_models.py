"""Refits of other architectures: latent attention with a float32 router bias, tied, biased, few KV heads, padded vocabulary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support.architectures import LATENT
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import open_llm
from tests.support.refit_jobs import simple

pytestmark = pytest.mark.engine

STOCK, PLAIN = "vllm_refit_ext.RefitWorkerExtension", "tests.support.plain_cpu.PlainCpuExtension"
MLA = {"topk_method": "noaux_tc", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The engine's latent attention knows the published sizes only."""
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "deepseek-ep2": ("deepseek_v3", 2, {"ep": 2}, MLA),
    "tied-tp2-pp2": ("qwen3_tied", 4, {"tp": 2, "pp": 2}, {}),
    "bias-tp2": ("qwen2", 2, {"tp": 2}, {}),
    "one-kv-head-tp4": ("qwen3_few_kv", 4, {"tp": 4}, {}),
    "odd-vocabulary-tp2": (
        "llama",
        2,
        {"tp": 2, "should_pad_vocab": True, "make_vocab_size_divisible_by": 64},
        {"vocab_size": 323},
    ),
    "vpp2-pp2": ("qwen3_moe", 2, {"pp": 2, "vpp": 2}, {"num_hidden_layers": 4}),
    "etp2-ep2": ("qwen3_moe", 4, {"tp": 2, "ep": 2, "etp": 2}, {}),
}
SHORT = ("deepseek-ep2", "tied-tp2-pp2", "odd-vocabulary-tp2", "etp2-ep2")


@pytest.mark.parametrize(
    ("case", "extension"),
    [pytest.param(case, PLAIN, id=f"{case}-plain", marks=[] if case in SHORT else pytest.mark.long) for case in CASES]
    + [pytest.param("tied-tp2-pp2", STOCK, id="tied-tp2-pp2-stock")]
    + [pytest.param(case, STOCK, id=f"{case}-stock", marks=pytest.mark.long) for case in ("deepseek-ep2", "bias-tp2")],
)
def test_refit_equals_fresh_engine(case: str, extension: str, tmp_path: Path) -> None:
    kind, ranks, geometry, overrides = CASES[case]
    start, new = (save_model(kind, tmp_path / name, seed=seed, **overrides) for name, seed in (("start", 0), ("new", 1)))
    settings: dict[str, Any] = LATENT if kind == "deepseek_v3" else {}
    with open_llm(new, extension=extension, in_process=True, **settings) as fresh:
        wanted = [asdict(a) for a in one_by_one(fresh)]
    with open_llm(start, extension=extension, in_process=True, **settings) as llm, bridge(llm) as url:
        found, report, compared = run_ranks(simple, ranks, str(new), geometry, url, "v1", timeout=240)[0]
    assert found == [{k: list(v) for k, v in a.items()} for a in wanted]
    assert compared > 0
    assert report["version"] == "v1"
