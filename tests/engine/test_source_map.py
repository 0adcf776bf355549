"""Source maps of real Megatron models in real processes: what all ranks hold, put together, is the bridge's own export.

Cases that share a number of ranks run in one launch, since importing Megatron costs more than all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support import source_check

pytestmark = pytest.mark.engine

LATE_GATHER = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
PADDED = {"should_pad_vocab": True, "make_vocab_size_divisible_by": 128}

CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "moe": {"kind": "qwen3_moe"},
        "moe-bf16-trained": {"kind": "qwen3_moe", "dtype": "bfloat16", "ddp": True, "step": "train"},
        "dense": {"kind": "qwen3"},
        "tied": {"kind": "qwen3_tied"},
        "llama": {"kind": "llama"},
        "bias": {"kind": "qwen2"},
        "latent": {"kind": "deepseek_v3"},
        "latent-trained": {"kind": "deepseek_v3", "ddp": True, "step": "train"},
        "prediction": {"kind": "deepseek_v3", "model": {"num_nextn_predict_layers": 1}},
    },
    2: {
        "moe-tp2": {"kind": "qwen3_moe", "tp": 2},
        "moe-ep2": {"kind": "qwen3_moe", "ep": 2},
        "moe-ep2-trained": {"kind": "qwen3_moe", "ep": 2, "ddp": True, "step": "train"},
        "moe-pp2": {"kind": "qwen3_moe", "pp": 2},
        "moe-etp2": {"kind": "qwen3_moe", "tp": 2, "etp": 2},
        "moe-dp2-trained": {"kind": "qwen3_moe", "ddp": {"use_distributed_optimizer": True}, "step": "train"},
        "dense-dp2-late-gather-trained": {"kind": "qwen3", "ddp": LATE_GATHER, "step": "train"},
        "dense-tp2-trained": {"kind": "qwen3", "tp": 2, "ddp": True, "step": "train"},
        "few-kv-tp2": {"kind": "qwen3_few_kv", "tp": 2},
        "tied-tp2": {"kind": "qwen3_tied", "tp": 2},
        "tied-pp2": {"kind": "qwen3_tied", "pp": 2},
        "bias-tp2": {"kind": "qwen2", "tp": 2},
        "padded-tp2": {"kind": "qwen3", "model": {"vocab_size": 323}, "tp": 2, **PADDED},
        "tied-padded-tp2": {"kind": "qwen3_tied", "model": {"vocab_size": 323}, "tp": 2, **PADDED},
        "latent-tp2": {"kind": "deepseek_v3", "tp": 2},
        "latent-ep2-bf16": {"kind": "deepseek_v3", "ep": 2, "dtype": "bfloat16"},
        "prediction-pp2": {"kind": "deepseek_v3", "model": {"num_nextn_predict_layers": 1}, "pp": 2},
        "vpp2-pp2": {"kind": "qwen3_moe", "model": {"num_hidden_layers": 4}, "pp": 2, "vpp": 2},
        "uneven-pp2": {"kind": "qwen3", "model": {"num_hidden_layers": 3}, "pp": 2, "first_last_layers": (1, None)},
    },
    4: {
        "moe-ep4": {"kind": "qwen3_moe", "ep": 4},
        "moe-tp2-ep2": {"kind": "qwen3_moe", "tp": 2, "ep": 2},
        "moe-tp2-pp2-trained": {"kind": "qwen3_moe", "tp": 2, "pp": 2, "ddp": True, "step": "train"},
        "moe-ep2-etp2-tp2": {"kind": "qwen3_moe", "tp": 2, "ep": 2, "etp": 2},
        "moe-tp4-few-kv": {"kind": "qwen3_moe", "tp": 4, "etp": 2},
        "padded-tp4-empty-tail": {"kind": "qwen3", "model": {"vocab_size": 300, "num_attention_heads": 8}, "tp": 4, **PADDED},
        "tied-tp2-pp2": {"kind": "qwen3_tied", "tp": 2, "pp": 2},
        "latent-ep2-pp2": {"kind": "deepseek_v3", "ep": 2, "pp": 2},
        "layout-pp2-vpp2-ep2": {
            "kind": "qwen3_moe",
            "model": {"num_hidden_layers": 3},
            "pp": 2,
            "vpp": 2,
            "ep": 2,
            "layout": [["embedding"], ["decoder", "decoder"], ["decoder"], ["loss"]],
        },
    },
}
NAMES = [
    pytest.param(ranks, name, id=f"{ranks}-{name}", marks=pytest.mark.long if ranks == 1 else [])
    for ranks, cases in CASES.items()
    for name in cases
]
"""What one rank alone holds is a part of what more of them do."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(kind, model settings) -> folder of the checkpoint, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str, settings: dict[str, Any], dtype: str) -> str:
        key = f"{kind}-{dtype}-" + "-".join(f"{k}{v}" for k, v in settings.items())
        if key not in made:
            made[key] = save_model(kind, tmp_path_factory.mktemp(key), seed=3, dtype=dtype, **settings)
        return str(made[key])

    return folder


@pytest.fixture(scope="module")
def outcome(models: Any) -> Any:
    """(ranks, case) -> what each rank found wrong. All cases of a number of ranks run at the first question."""
    found: dict[int, list[list[list[str]]]] = {}

    def of(ranks: int, name: str) -> list[list[str]]:
        if ranks not in found:
            cases = []
            for case in CASES[ranks].values():
                settings = {k: v for k, v in case.items() if k not in ("kind", "model")}
                cases.append({"folder": models(case["kind"], case.get("model", {}), case.get("dtype", "float32")), **settings})
            found[ranks] = run_ranks(source_check.run_cases, ranks, cases, timeout=240)
        return [rank[list(CASES[ranks]).index(name)] for rank in found[ranks]]

    return of


@pytest.mark.parametrize(("ranks", "name"), NAMES)
def test_all_ranks_together_hold_the_export(ranks: int, name: str, outcome: Any) -> None:
    assert outcome(ranks, name) == [[]] * ranks
