"""The elastic example: an engine is added, one is stopped, one is killed, and the reward rises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from examples.elastic_async_rl import Settings, main

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_the_run_judges_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(dataclasses.replace(Settings(), out=tmp_path)) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["problems"] == []
    steps = record["steps"]
    assert max(s["age"] for s in steps) <= 2
    assert "second" not in steps[-1]["alive"]
    assert "first" not in steps[-1]["alive"], "it was stopped until the end"
    takes = json.loads((tmp_path / "takes.json").read_text())
    assert set(takes) == {"first", "second", "third"}
    assert all({"write", "commit"} <= take["seconds"].keys() for mine in takes.values() for take in mine)
    assert takes["first"][-1]["version"] == f"step-{len(steps)}"
    assert "first is stopped" in capfd.readouterr().out
