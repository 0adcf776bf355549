"""The command line and the plan's report, without trainer or engine."""

from __future__ import annotations

import io
import json

import msgspec
import numpy as np
import pytest

from vllm_refit_ext import cli, cli_verify
from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import Status, VerifyReply
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.plan_report import Links, Tally, floor, grouped, size, spread, tables


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main(list(arguments))
    return int(done.value.code or 0)


def one_plan() -> Plan:
    """`a` [4, 32] bfloat16 in halves on two trainers, wanted whole by engine 0; `b` [8] float32 on trainer 1, wanted by both
    engines.
    """
    manifest = Manifest({"a": TensorSpec((4, 32), "bfloat16"), "b": TensorSpec((8,), "float32")})
    halves = [Buffer("a", 0, "bfloat16", (2, 32)), Buffer("a", 1, "bfloat16", (2, 32)), Buffer("b", 1, "float32", (8,))]
    rows = [Placement("a", 0, (0, 0), (2, 32), 0, (64, 2)), Placement("a", 1, (2, 0), (4, 32), 0, (64, 2))]
    sources = Placements.from_rows(halves, [*rows, Placement("b", 2, (0,), (8,), 0, (4,))])
    wanted = [Buffer("a", 0, "bfloat16", (4, 32)), Buffer("b", 0, "float32", (8,)), Buffer("b", 1, "float32", (8,))]
    rows = [
        Placement("a", 0, (0, 0), (4, 32), 0, (64, 2)),
        Placement("b", 1, (0,), (8,), 0, (4,)),
        Placement("b", 2, (0,), (8,), 0, (4,)),
    ]
    return build_plan(manifest, sources, Placements.from_rows(wanted, rows))


def report(coded: bool = False):
    tally = Tally(2, 2)
    tally.add(one_plan(), lambda name: ("copied", f"why {name}"), lambda name: coded and name == "a")
    tally.note("goes nowhere", "no engine reads it", ["c", "d"])
    return tally.report("tiny", "collective", (range(2), range(8, 10)), 8, Links(network=100.0))


def test_a_report_adds_up():
    found = report()
    assert [(e.source, e.target, e.nbytes) for e in found.edges] == [(0, 0, 128), (1, 0, 160), (1, 1, 32)]
    assert found.sent == [128, 192]
    assert found.received == [288, 32]
    assert found.nbytes == sum(e.nbytes for e in found.edges) == sum(p.nbytes for p in found.paths)
    assert found.tensors == 4
    assert {(p.path, p.tensors, p.nbytes) for p in found.paths} == {("copied", 1, 256), ("copied", 1, 64), ("goes nowhere", 2, 0)}
    assert found.seconds == pytest.approx(2.88)
    assert found.bottleneck == "GPU 8 receives"


def test_what_travels_as_mxfp8_counts_with_its_scales():
    assert report(coded=True).nbytes == 128 * 33 // 32 + 64


def test_the_floor_takes_the_slowest_link_of_each_pair():
    nbytes = np.array([[100, 200, 300]])
    links = Links(copy=1000.0, host=100.0, network=10.0)
    seconds, need, bottleneck = floor(nbytes, ([0], [0, 1, 8]), 8, links)
    assert seconds == pytest.approx(2 * 100 / 1000 + 200 / 100 + 300 / 10)
    assert (need, bottleneck) == ("", "GPU 0 sends")
    assert floor(nbytes, ([0], [0, 1, 8]), 8, Links(copy=1.0, host=1.0))[:2] == (None, "hardware.network_bytes_per_second")
    assert floor(nbytes * 0, ([0], [0, 1, 8]), 8, Links())[0] == 0.0


def test_numbers_for_people():
    assert [size(n) for n in (0, 999, 1000, 61_100_000_000)] == ["0 B", "999 B", "1 kB", "61.1 GB"]
    assert spread([5, 5]) == "5 B"
    assert spread([1000, 2000]) == "1 kB to 2 kB"
    assert grouped({"a": "layer 3 gone", "b": "layer 4 gone"}) == {"layer * gone": ["a", "b"]}


def test_tables_have_what_people_look_for():
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    for table in tables(report(), edges=True):
        console.print(table)
    text = console.export_text()
    for word in ("tiny", "collective", "goes nowhere", "no engine reads it", "GPU 8 receives", "edges"):
        assert word in text


def test_doctor_prints_findings(capsys):
    status = call("doctor", "--json")
    found = json.loads(capsys.readouterr().out)
    assert {"level", "what", "got"} <= set(found[0])
    assert status == int(any(f["level"] == "fail" for f in found))


def test_a_bad_recipe_is_one_error_without_a_traceback(tmp_path, capsys):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("name: x\ntrainer: {world_size: 0}\n")
    assert call("plan", str(recipe)) == 2
    err = capsys.readouterr().err
    assert "trainer.world_size" in err
    assert "Traceback" not in err
    assert call("plan", str(tmp_path / "missing.yaml")) == 2
    assert "missing.yaml" in capsys.readouterr().err


def test_an_unreachable_engine_is_named(capsys):
    assert call("verify", "http://127.0.0.1:9") == 2
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_engines_are_compared():
    def engine(url: str, version: str, digest: str, state: str = "ready") -> cli_verify.EngineState:
        replies = [VerifyReply(rank=0, version=version, digests={"t": digest})] if state == "ready" else []
        return cli_verify.EngineState(url, [Status(rank=0, state=state, version=version)], replies)

    assert cli_verify.problems([engine("a", "1", "x"), engine("b", "1", "x")]) == []
    (differs,) = cli_verify.problems([engine("a", "1", "x"), engine("b", "1", "y")])
    assert "'t'" in str(differs)
    torn, versions = cli_verify.problems([engine("a", "1", "x"), engine("b", "2", "x", "torn")])
    assert "torn" in str(torn)
    assert "different versions" in str(versions)
    assert cli_verify.table(cli_verify.Answer([engine("a", "1", "x")], [torn])).row_count == 2


def test_errors_of_ours_give_status_two():
    def fail() -> None:
        raise ConfigError("no", where="here")

    assert cli.run(fail) == 2
    assert cli.run(lambda: 1) == 1
    assert cli.run(lambda: None) == 0


def test_bench_speaks_the_words_of_a_recipe(monkeypatch, capsys):
    """What it prints is a recipe's `hardware` as it stands; on a machine without GPUs it says what it could not measure."""
    import torch
    import yaml

    from megatron_sender.config import Hardware
    from vllm_refit_ext import bench

    monkeypatch.setattr(bench, "HOST_BYTES", 8 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call("bench", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (speed,) = found["speeds"]
    assert speed["bytes_per_second"] == pytest.approx(2 * speed["nbytes"] / speed["seconds"])
    assert set(found["missing"]) == {"host_bytes_per_second", "network_bytes_per_second"}
    assert call("bench") == 0
    out = capsys.readouterr().out
    given = msgspec.convert(yaml.safe_load(out[out.index("hardware:\n") :])["hardware"], Hardware)
    assert given.device == "cpu"
    assert given.copy_bytes_per_second is not None


def test_a_plan_is_told_the_slowest_of_equal_links():
    from vllm_refit_ext.bench import Measured, Speed

    speeds = [Speed("host_bytes_per_second", f"GPU 0 to GPU {i}", 1, 1.0, rate) for i, rate in enumerate((3e11, 1e11, 2e11))]
    assert Measured("cuda", speeds, {}).hardware() == {"device": "cuda", "host_bytes_per_second": 1e11}
