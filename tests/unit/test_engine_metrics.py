"""What an engine rank's process shows by HTTP: its refits, and the phase that it is in while it is in it."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from vllm_refit_ext.core.errors import ConfigError, WireError
from vllm_refit_ext.core.messages import PrepareReply, UpdateReport
from vllm_refit_ext.receiver import metrics


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv(metrics.PORT, str(port - 3))
    metrics.serve.cache_clear()
    metrics.serve(3)
    metrics.serve(3)
    return f"http://127.0.0.1:{port}/metrics"


def scraped(url: str, name: str, **labels: str) -> float | None:
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def test_a_refit_is_seen_while_it_runs_and_afterwards(url: str, caplog: pytest.LogCaptureFixture) -> None:
    begun, at = "refit_engine_phase_began_timestamp_seconds", {"rank": "3", "phase": "write"}
    with caplog.at_level(logging.INFO, logger="vllm_refit_ext"), metrics.counted(3) as clock:
        assert scraped(url, begun, **at) is None
        with clock("write"):
            since = scraped(url, begun, **at)
            assert since is not None
            assert abs(since - time.time()) < 60
        assert scraped(url, begun, **at) is None
        report = UpdateReport(rank=3, version="v", writer="w", seconds={"write": 0.2}, received={"0": 30}, forwarded={"r": 12})
        assert clock.done(report) is report
    assert scraped(url, "refit_engine_total", rank="3", result="ok") == 1
    assert scraped(url, "refit_engine_bytes_total", rank="3", source="trainer") == 30
    assert scraped(url, "refit_engine_bytes_total", rank="3", source="replica") == 12
    assert scraped(url, "refit_engine_seconds_count", rank="3", phase="write") == 1
    line = json.loads(caplog.messages[-1].removeprefix("refit "))
    assert line == {"rank": 3, "result": "ok", "version": "v", "nbytes": 42, "seconds": {"write": 0.2}}


def test_a_failure_is_counted_by_its_class_and_raised(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WireError), metrics.counted(3) as clock, clock("read"):
        raise WireError("it is gone", where="there")
    assert scraped(url, "refit_engine_total", rank="3", result="WireError") == 1
    assert scraped(url, "refit_engine_phase_began_timestamp_seconds", rank="3", phase="read") is None
    line = json.loads(caplog.messages[-1].removeprefix("refit "))
    assert (line["result"], line["error"]) == ("WireError", "there: it is gone")


def test_reasons_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    reply = PrepareReply(rank=3, reload={"a": "it is computed"}, dropped={"b": "tied"}, casts={"c": "to bfloat16"})
    with caplog.at_level(logging.DEBUG, logger="vllm_refit_ext"):
        metrics.explained(reply)
    first, *said = (json.loads(m.removeprefix("refit ")) for m in caplog.messages)
    assert (first["reload"], first["dropped"], first["cast"]) == (1, 1, 1)
    ways = [("a", "reload", "it is computed"), ("b", "dropped", "tied"), ("c", "cast", "to bfloat16")]
    assert [(s["tensor"], s["way"], s["why"]) for s in said] == ways
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vllm_refit_ext"):
        metrics.explained(reply)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("port", ["x", "-7", "99999"])
def test_a_port_that_can_not_be_had_is_named(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv(metrics.PORT, port)
    metrics.serve.cache_clear()
    with pytest.raises(ConfigError, match=f"VLLM_REFIT_METRICS_PORT, rank 0.*{port}"):
        metrics.serve(0)
    metrics.serve.cache_clear()


def test_the_board_asks_for_what_there_is() -> None:
    from vllm_refit_ext.sender import metrics as trainer

    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {word for panel in board["panels"] for t in panel["targets"] for word in re.findall(r"refit_\w+", t["expr"])}
    both = [*vars(metrics).values(), *vars(trainer).values()]
    families = [f for metric in both if isinstance(metric, MetricWrapperBase) for f in metric.describe()]
    known = {f.name + end for f in families for end in ("", "_total", "_bucket")}
    assert asked <= known
    assert {f.name for f in families} <= {word.removesuffix("_bucket").removesuffix("_total") for word in asked} | {"refit_bytes"}
