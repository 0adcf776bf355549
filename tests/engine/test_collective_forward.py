"""Engines that share a host, over wire `collective` on gloo: one copy of the model crosses to the host, the engines hand it to
each other, and each ends equal to a fresh one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.engine.test_collective import share_bytes
from tests.support.collective_jobs import cycle_apart, loses_engine, stalls
from tests.support.engine_bridge import bridge, one_by_one
from tests.support.engines import open_llm

pytestmark = pytest.mark.engine

WITH_HOST = "tests.support.collective_jobs.HostExtension"
MODEL = share_bytes(1, False)
"""Bytes of the whole model, by hand from its sizes."""


def plain(answers: list[Any]) -> list[dict[str, Any]]:
    """As they look after a JSON round trip."""
    return [{k: list(v) for k, v in asdict(a).items()} for a in answers]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return save_model("qwen3_moe", root / "start", seed=0), save_model("qwen3_moe", root / "trained", seed=1)


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Iterator[tuple[list[tuple[Any, str]], list[dict[str, Any]]]]:
    """Two engines of one rank, in processes of their own, and what the first answers, fresh from the trainer's checkpoint."""
    one, other = open_llm(folders[1], extension=WITH_HOST), open_llm(folders[0], extension=WITH_HOST)
    with one as first, bridge(first) as a:
        answers = plain(one_by_one(first))
        with other as second, bridge(second) as b:
            yield [(first, a), (second, b)], answers


@pytest.fixture
def two(pair: Any) -> list[tuple[Any, str]]:
    return pair[0]  # type: ignore[no-any-return]


@pytest.fixture
def wanted(pair: Any) -> list[dict[str, Any]]:
    return pair[1]  # type: ignore[no-any-return]


def put(engines: list[tuple[Any, str]], *hosts: str) -> list[str]:
    """Engines on these hosts; their URLs."""
    for (llm, _), host in zip(engines, hosts, strict=True):
        llm.collective_rpc("refit_move_to", args=(host,))
    return [url for _, url in engines]


def sent(found: list[dict[str, Any]]) -> list[int]:
    """Bytes that each trainer rank sent, by its own report."""
    return [sum(rank["report"]["sent"].values()) for rank in found]


@pytest.mark.parametrize("bucket", [pytest.param(20_000, marks=pytest.mark.long), 200_000])
def test_one_copy_crosses_to_a_host_of_two_engines(two, folders, wanted, bucket) -> None:
    urls = put(two, "host", "host")
    found = run_ranks(cycle_apart, 2, str(folders[1]), {"ep": 2}, urls, bucket, timeout=300)
    assert found[0]["other"] != [wanted, wanted], "the first refit must have changed the engines"
    assert found[0]["repeated"] == [[wanted, wanted]] * 2
    assert found[0]["rounds"] > 2
    assert sum(sent(found)) == MODEL, "one copy, to the byte"
    assert abs(sent(found)[0] - sent(found)[1]) <= bucket, "experts are half on each, what both hold is dealt evenly"
    first, second = (reports[0] for reports in found[0]["report"]["engines"])
    for mine, other in ((first, "1"), (second, "0")):
        assert sum(mine["received"].values()) + sum(mine["forwarded"].values()) == MODEL
        assert set(mine["forwarded"]) == {other}
    assert first["forwarded"]["1"] == sum(second["received"].values()), "what lands on one is what the other gets from it"
    assert abs(sum(first["received"].values()) - MODEL // 2) <= bucket, "half lands on each"
    for trainer, rank in enumerate(found):
        landed = {e: r["received"].get(str(trainer), 0) for e, r in enumerate((first, second))}
        assert {int(e): n for e, n in rank["report"]["sent"].items()} == {e: n for e, n in landed.items() if n}


@pytest.mark.long
def test_two_copies_cross_to_two_hosts(two, folders, wanted) -> None:
    urls = put(two, "host", "other host")
    found = run_ranks(cycle_apart, 2, str(folders[1]), {"ep": 2}, urls, 200_000, timeout=300)
    assert found[0]["repeated"] == [[wanted, wanted]] * 2
    assert sum(sent(found)) == 2 * MODEL
    assert [reports[0]["forwarded"] for reports in found[0]["report"]["engines"]] == [{}, {}]


@pytest.mark.long
def test_an_engine_of_two_ranks_gets_its_cuts_from_one_of_one_rank(two, folders, wanted) -> None:
    with open_llm(folders[0], extension=WITH_HOST, ranks=2) as large, bridge(large) as url:
        engines = [two[0], (large, url)]
        urls = put(engines, "host", "host")
        found = run_ranks(cycle_apart, 4, str(folders[1]), {"tp": 2, "ep": 2}, urls, 60_000, timeout=300)
    with open_llm(folders[1], extension=WITH_HOST, ranks=2) as fresh:
        expected = plain(one_by_one(fresh))
    assert found[0]["repeated"] == [[wanted, expected]] * 2
    assert sum(sent(found)) == MODEL, "the cuts of the larger engine are parts of what the smaller one needs"
    for reports, share in zip(found[0]["report"]["engines"], (MODEL, share_bytes(2, False)), strict=True):
        for report in reports:
            assert sum(report["received"].values()) + sum(report["forwarded"].values()) == share


@pytest.mark.long
def test_a_rank_that_hands_on_is_stopped_and_goes_on(two, folders, wanted) -> None:
    urls = put(two, "host", "host")
    pid = two[1][0].collective_rpc("refit_pid")[0]
    results = run_ranks(stalls, 2, str(folders[1]), {"ep": 2}, urls, 50_000, pid, "trainers", timeout=180)
    assert len({r[0][1] for r in results}) == 1, "every trainer rank raises the same error"
    assert {r[0][0] for r in results} <= {"DeadlineError", "WireError"}
    assert all(seconds < 6 + 10 for (_, _, seconds), _ in results)
    assert results[0][1] == [wanted, wanted], "the next refit, by the same processes, is exact"


@pytest.mark.long
def test_a_rank_that_hands_on_is_killed_and_the_other_engine_goes_on(two, folders, wanted) -> None:
    with open_llm(folders[0], extension=WITH_HOST) as third, bridge(third) as url:
        urls = put([two[0], (third, url)], "host", "host")
        pid = third.collective_rpc("refit_pid")[0]
        results = run_ranks(loses_engine, 2, str(folders[1]), {"ep": 2}, urls, 50_000, pid, "trainers", timeout=180)
    assert len({r[0][1] for r in results}) == 1
    assert all(seconds < 15 + 10 for (_, _, seconds), _ in results)
    assert results[0][1] == [wanted]
