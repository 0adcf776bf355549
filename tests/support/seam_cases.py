"""Checkpoints for the tests of the seam: pairs of tiny models that differ in every weight."""

from __future__ import annotations

from pathlib import Path

from examples.support.tiny_model import save_model


def pair(kind: str, folder: Path, **overrides: object) -> tuple[Path, Path]:
    """Two checkpoints of one configuration with weights from different seeds."""
    if kind == "deepseek_v3":
        overrides = {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        } | overrides
    return tuple(save_model(kind, folder / f"{kind}-{seed}", seed, **overrides) for seed in (0, 1))  # type: ignore[return-value]
