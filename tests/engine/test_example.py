"""The main job: it judges itself, and finds an engine whose weights are stale."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.colocated_sync_rl import MAX_KL, Settings, Step, main, verdict

pytestmark = pytest.mark.engine


def steps(rewards: list[float], kl: float = 1e-13) -> list[Step]:
    return [Step(i, r, kl, 0.1, 1, f"step-{i}", 0.1, 0.1) for i, r in enumerate(rewards)]


def test_verdict() -> None:
    rising = [0.1, 0.2, 0.4, 0.8]
    assert verdict(steps(rising)) == []
    assert "did not rise" in verdict(steps([0.1, 0.1, 0.1, 0.1]))[0]
    assert "did not rise" in verdict(steps(rising[::-1]))[0]
    assert "does not hold the trainer's weights" in verdict(steps(rising, kl=2 * MAX_KL))[0]
    assert "does not hold the trainer's weights" in verdict(steps(rising, kl=float("nan")))[0]


def test_a_stale_engine_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The drill stops handing weights over; the run must fail for the right reason, with its plot and record written."""
    settings = dataclasses.replace(Settings(), steps=9, out=tmp_path, drill="stale")
    assert main(settings) == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert any("does not hold the trainer's weights" in problem for problem in record["problems"])
    fresh = [step["kl"] for step in record["steps"][:3]]
    assert max(fresh) < MAX_KL, "while weights were handed over, the engine held them"
    assert [step["version"] for step in record["steps"]] == ["step-0", "step-1", "step-2", *["step-3"] * 6]
    assert "FAILED" in capfd.readouterr().out


@pytest.mark.long
def test_a_trainer_that_quantises_itself(tmp_path: Path) -> None:
    """MXFP8 is sent into an engine that holds it; too few steps for the reward to rise, and the KL is that of the format."""
    extension = "tests.support.mxfp8_cpu.Mxfp8CpuExtension"
    settings = dataclasses.replace(Settings(), steps=2, out=tmp_path, mxfp8=True, prequantize=True, extension=extension)
    main(settings)
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["problems"]) == 1
    assert "did not rise" in record["problems"][0]
    assert [step["version"] for step in record["steps"]] == ["step-0", "step-1"]
    assert record["steps"][1]["bytes"] < 0.7 * 2 * sum(
        t.numel() for t in load_file(tmp_path / "model" / "model.safetensors").values()
    )
