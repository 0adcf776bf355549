"""Engines inside forked ranks: they can be started again, and leave no shared memory behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support import engine_probe

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_an_engine_over_two_ranks_starts_twice_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = str(save_model("qwen3", tmp_path, seed=2))
    results = [
        run_ranks(
            engine_probe.generate,
            2,
            folder,
            preload=("examples.support.launch:import_engine",),
            init_process_group=False,
            timeout=240,
        )
        for _ in range(2)
    ]
    tokens = {tuple(tokens) for ranks in results for tokens, _ in ranks}
    assert len(tokens) == 1
    assert all(own for ranks in results for _, own in ranks)
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(f"ranks-{os.getuid()}-")]
