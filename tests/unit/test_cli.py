"""The command line and the plan's report, without trainer or engine."""

from __future__ import annotations

import io
import json
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_sender.config_load import load_recipe
from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import Status, VerifyReply
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.tools import cli, plan_command, plan_quantised, verify_command
from vllm_refit_ext.tools.plan_report import Tally, grouped, spread, tables
from vllm_refit_ext.tools.plan_traffic import Traffic, direct, published, size

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"


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
    return tally.report(
        "tiny", "a/model", "collective", *[direct(tally.bytes, (range(2), range(8, 10)), 8)] * 2, (None, None, 100.0)
    )


def test_a_report_adds_up():
    found = report()
    assert [(e.source, e.target, e.nbytes) for e in found.edges] == [(0, 0, 128), (1, 0, 160), (1, 1, 32)]
    assert found.sent == [128, 192]
    assert found.received == [288, 32]
    assert found.nbytes == sum(e.nbytes for e in found.edges) == sum(p.nbytes for p in found.paths)
    assert found.tensors == 4
    assert {(p.path, p.tensors, p.nbytes) for p in found.paths} == {("copied", 1, 256), ("copied", 1, 64), ("goes nowhere", 2, 0)}
    assert found.seconds == found.floor.seconds == pytest.approx(2.88)
    assert found.floor.gpu == "GPU 8 receives"
    assert found.crossing_hosts == 1.0
    assert found.unread == ["c", "d"]


def test_what_is_sent_as_mxfp8_counts_with_its_scales():
    assert report(coded=True).nbytes == 128 * 33 // 32 + 64


def reckon(nbytes: list[list[int]], place: tuple[list[int], list[int]], *speeds: float | None):
    return direct(np.array(nbytes), place, 8).floor(speeds)


def test_the_floor_is_the_sum_of_what_the_busiest_gpu_sends_over_each_link():
    found = reckon([[100, 200, 300]], ([0], [0, 1, 8]), 1000.0, 100.0, 10.0)
    parts = [(p.link, p.nbytes, p.factor, p.speed, p.seconds) for p in found.parts]
    assert parts == [
        ("within a GPU", 100, 2, 1000.0, 0.2),
        ("between GPUs of a host", 200, 1, 100.0, 2.0),
        ("between hosts", 300, 1, 10.0, 30.0),
    ]
    assert found.seconds == pytest.approx(sum(p.seconds for p in found.parts))
    assert (found.need, found.gpu) == ("", "GPU 0 sends")


def test_a_speed_that_the_floor_needs_and_lacks_is_named():
    found = reckon([[100, 200, 300]], ([0], [0, 1, 8]), 1.0, 1.0, None)
    assert (found.seconds, found.need) == (None, "hardware.network_bytes_per_second")
    assert "hardware.network_bytes_per_second" in str(found)
    assert reckon([[0, 0]], ([0], [0, 1]), None, None, None).seconds == 0.0


def test_bytes_that_are_passed_on_count_at_every_gpu_they_cross():
    """Trainer GPU 0 gives GPU 8 its bytes, which hands them on to GPUs 9 and 10 of its host."""
    traffic = Traffic(np.array([0, 8, 8]), np.array([8, 9, 10]), np.array([100, 100, 100]), 8)
    assert [int(traffic.nbytes[traffic.kinds == kind].sum()) for kind in range(3)] == [0, 200, 100]
    found = traffic.floor((None, 100.0, 50.0))
    assert (found.seconds, found.gpu) == (2.0, "GPU 0 sends")
    slow = traffic.floor((None, 50.0, 100.0))
    assert (slow.seconds, slow.gpu) == (4.0, "GPU 8 sends")


def test_the_share_between_hosts():
    tally = Tally(1, 2)
    tally.bytes[:] = [[300, 100]]
    traffic = direct(tally.bytes, ([0], [1, 8]), 8)
    found = tally.report("r", "m", "collective", traffic, traffic, (None, 1e3, 1e2))
    assert found.crossing_hosts == 0.25
    assert [(c.link, c.nbytes) for c in found.crossings] == [("between GPUs of a host", 300), ("between hosts", 100)]
    assert str(found.floor) == (
        "1.3 s at least: GPU 0 sends 300 B between GPUs of a host / 1 kB/s = 0.3 s + 100 B between hosts / 100 B/s = 1 s"
    )


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
    for word in (
        "tiny",
        "collective",
        "goes nowhere",
        "no engine reads it",
        "GPU 8 receives 288 B between hosts / 100 B/s = 2.88 s",
        "edges",
    ):
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
    def engine(url: str, version: str, digest: str, state: str = "ready") -> verify_command.EngineState:
        replies = [VerifyReply(rank=0, version=version, digests={"t": digest})] if state == "ready" else []
        return verify_command.EngineState(url, [Status(rank=0, state=state, version=version)], replies)

    assert verify_command.problems([engine("a", "1", "x"), engine("b", "1", "x")]) == []
    (differs,) = verify_command.problems([engine("a", "1", "x"), engine("b", "1", "y")])
    assert "'t'" in str(differs)
    torn, versions = verify_command.problems([engine("a", "1", "x"), engine("b", "2", "x", "torn")])
    assert "torn" in str(torn)
    assert "different versions" in str(versions)
    assert verify_command.table(verify_command.Answer([engine("a", "1", "x")], [torn])).row_count == 2


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
    from vllm_refit_ext.tools import bench

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


def test_a_plan_is_reported_the_slowest_of_equal_links():
    from vllm_refit_ext.tools.bench import Measured, Speed

    speeds = [Speed("host_bytes_per_second", f"GPU 0 to GPU {i}", 1, 1.0, rate) for i, rate in enumerate((3e11, 1e11, 2e11))]
    assert Measured("cuda", speeds, {}).hardware() == {"device": "cuda", "host_bytes_per_second": 1e11}


def test_engines_planned_together_add_up_to_engines_planned_apart(monkeypatch):
    """Five engines of one shape, in one piece and one by one; a tensor that the engine computes, and one that it drops."""
    recipe = load_recipe(RECIPES / "qwen3-30b-a3b-mxfp8-async.yaml")
    trainer = msgspec.structs.replace(recipe.trainer, world_size=2)
    recipe = msgspec.structs.replace(recipe, trainer=trainer, engines=[msgspec.structs.replace(recipe.engines[0], count=5)])
    manifest = Manifest({n: TensorSpec((4, 32), "bfloat16") for n in ("copied", "computed", "dropped")})
    halves = [Buffer(n, rank, "bfloat16", (2, 32)) for n in manifest.tensors for rank in range(2)]
    rows = [
        Placement(n, 2 * i + r, (2 * r, 0), (2 * r + 2, 32), 0, (64, 2)) for i, n in enumerate(manifest.tensors) for r in range(2)
    ]
    target = [Buffer("w", 0, "bfloat16", (4, 32))], [Placement("copied", 0, (0, 0), (4, 32), 0, (64, 2))]
    routes = types.SimpleNamespace(
        placements=Placements.from_rows(*target), computed={"computed": "negated"}, dropped={"dropped": "passed over"}
    )
    monkeypatch.setattr(plan_command, "engine_routes_of", lambda *arguments: [routes])
    monkeypatch.setattr(plan_quantised, "quantised", lambda *arguments: lambda name: False)
    sources = Placements.from_rows(halves, rows)
    together = plan_command.report(recipe, manifest, sources)
    monkeypatch.setattr(plan_command, "ROWS_AT_ONCE", 1)
    said: list[str] = []
    assert plan_command.report(recipe, manifest, sources, said.append) == together
    assert said[0] == "recording vLLM's loader for each rank of engines[0]"
    assert said[1] == f"planning from engine rank 0 on, of {together.engines}"
    assert together.received == [512] * 5
    assert together.sent == [1280] * 2
    assert together.unread == ["dropped"]
    assert {(p.path, p.tensors, p.nbytes) for p in together.paths} == {
        ("copied", 1, 1280),
        ("the engine's own reload", 1, 1280),
        ("goes nowhere", 1, 0),
    }


def test_what_replicas_of_a_host_read_of_a_version_crosses_to_it_once_in_the_plans_seconds():
    """Two engine ranks alike on the second host: each takes half from the trainer and half from the other."""
    place = ((0,), (8, 9))
    found = published(np.array([[256, 256]]), place, 8, ["a", "a"])
    rows = sorted(zip(found.source.tolist(), found.target.tolist(), found.nbytes.tolist(), strict=True))
    assert rows == [(0, 8, 128), (0, 9, 128), (8, 9, 128), (9, 8, 128)]
    for apart in (
        published(np.array([[256, 256]]), place, 8, ["a", "b"]),
        published(np.array([[256, 256]]), ((0,), (8, 16)), 8, "aa"),
    ):
        rows = sorted(zip(apart.source.tolist(), apart.target.tolist(), apart.nbytes.tolist(), strict=True))
        assert [row[0] for row in rows] == [0, 0]
        assert [row[2] for row in rows] == [256, 256]
