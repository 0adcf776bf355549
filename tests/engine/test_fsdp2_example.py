"""The example for FSDP2 judges itself, and is served what it trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from examples.colocated_sync_rl import MAX_KL, Settings
from examples.fsdp2_sync_rl import main

pytestmark = pytest.mark.engine


def test_a_few_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(dataclasses.replace(Settings(), steps=4, samples=8, out=tmp_path))
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["steps"]) == 4
    assert max(step["kl"] for step in record["steps"]) < MAX_KL
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "tensor digests of the engine equal the trainer's" in capfd.readouterr().out
