"""Two of the scenarios, and what makes one fail. `make scenarios` runs all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scenarios
from benchmarks.fleet import Fleet
from benchmarks.scenario_record import Record

pytestmark = pytest.mark.engine


def test_two_scenarios_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    records = scenarios.run(["partial", "fan-out"], tmp_path)
    assert [(r.scenario, r.status, [a.name for a in r.assertions if not a.held], r.reason) for r in records] == [
        ("partial", "passed", [], ""),
        ("fan-out", "passed", [], ""),
    ]
    for record in records:
        written = json.loads((tmp_path / f"{record.scenario}.json").read_text())
        assert written["status"] == "passed"
        assert written["metrics"]
        assert {"name", "observed", "expected", "held"} == set(written["assertions"][0])


def test_a_scenario_fails_by_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(record: Record, fleet: Fleet) -> None:
        record.equal("as wanted", 1, 1)
        record.within("too far", 103, 100)

    def raises(record: Record, fleet: Fleet) -> None:
        record.equal("as wanted", 1, 1)
        raise ZeroDivisionError("seen")

    def good(record: Record, fleet: Fleet) -> None:
        record.within("near", 102, 100)

    monkeypatch.setattr(
        scenarios, "SCENARIOS", {"nothing": lambda record, fleet: None, "wrong": wrong, "raises": raises, "good": good}
    )
    records = scenarios.run(["nothing", "wrong", "raises", "good"], tmp_path)
    assert [r.status for r in records] == ["failed", "failed", "failed", "passed"]
    assert [a.held for a in records[1].assertions] == [True, False]
    assert "ZeroDivisionError: seen" in records[2].reason
    with pytest.raises(SystemExit) as ended:
        scenarios.main("wrong", out=tmp_path)
    assert ended.value.code == 1
    with pytest.raises(SystemExit, match="no scenario other; there are nothing"):
        scenarios.main("other", out=tmp_path)
