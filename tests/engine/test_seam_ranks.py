"""The seam on a real engine with two ranks in processes of their own, under vLLM's default serialization."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import answers, fresh_answers, open_llm
from tests.support.seam_cases import pair

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.fake_receiver.FakeExtension"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(engine at tensor parallel 2, tensor files of checkpoint 0 and 1, answers of fresh engines)."""
    folders = pair("qwen3_moe", tmp_path_factory.mktemp("seam"))
    files = [str(folder / "model.safetensors") for folder in folders]
    # at the same tensor parallel size: sums in another order differ in the last bit
    new = fresh_answers(folders[1], ranks=2)
    with open_llm(folders[0], extension=EXTENSION, ranks=2) as llm:
        yield llm, files, [answers(llm), new]


def refused(llm: Any, method: str, *arguments: Any, **named: Any) -> str:
    with pytest.raises(Exception, match="failed") as raised:
        llm.collective_rpc(method, args=arguments, kwargs=named)
    return str(raised.value)


def marks(llm: Any) -> list[dict[str, Any]]:
    """Both ranks' status, which also proves that the replies are in step."""
    status = llm.collective_rpc("refit_status")
    assert [each.get("rank", rank) for rank, each in enumerate(status)] == [0, 1]
    return status


def test_story(engine: Any) -> None:
    """One engine's life: before prepare, refits, refusals of one rank and of all, torn, healed. In order, because each step
    needs the last.
    """
    llm, files, wanted = engine
    assert "prepare_refit_info first" in refused(llm, "update_weights", {"wire": "fake", "file": files[1]})
    assert "prepare_refit_info first" in refused(llm, "update_weights", update_info={"wire": "fake"})
    assert [each["state"] for each in llm.collective_rpc("refit_status")] == ["unprepared"] * 2
    llm.collective_rpc("refit_prepare")

    llm.collective_rpc("update_weights", args=({"wire": "fake", "file": files[1], "blob": b"\x00\xff"},))
    assert [each["blob"] for each in marks(llm)] == ["00ff", "00ff"]
    assert answers(llm) == wanted[1]

    for rank in (None, 0, 1):
        info = {"wire": "fake", "fail": "early"} | ({} if rank is None else {"rank": rank})
        text = refused(llm, "update_weights", info)
        assert "refused as the test asked" in text
        assert ("rank 0, 1" if rank is None else f"rank {rank}") in text
        assert [each["mark"]["commits"] for each in marks(llm)] == [1, 1]
    text = refused(llm, "update_weights", {"wire": "fake", "fail": "crash", "rank": 0})
    assert "rank 0 · update: ZeroDivisionError" in text
    assert answers(llm) == wanted[1]

    # vLLM's own calls around it, and two updates in one session
    llm.collective_rpc("start_weight_update")
    assert "while a weight update is active" in refused(llm, "start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": [{"wire": "fake", "file": files[0]}] * 2})
    llm.collective_rpc("finish_weight_update")
    assert answers(llm) == wanted[0]
    assert "without start_weight_update" in refused(llm, "finish_weight_update")
    assert "lacks" in refused(llm, "init_weight_transfer_engine", {"something": 1})
    assert "not a refit" in refused(llm, "update_weights", {"names": []})
    assert "too few" in refused(llm, "update_weights", [])
    assert "unknown policy" in refused(llm, "update_weights", {"wire": "fake", "caches": "perhaps"})

    for rank in (0, 1):
        text = refused(llm, "update_weights", {"wire": "fake", "fail": "torn", "file": files[1], "rank": rank})
        assert f"rank {rank} · fake wire: torn as the test asked" in text
        assert all("torn as the test asked" in each["mark"]["torn"] for each in marks(llm))
        for _ in range(2):
            with pytest.raises(Exception, match=r"mix two versions.*full refit"):
                answers(llm)
        assert "refused as the test asked" in refused(llm, "update_weights", {"wire": "fake", "fail": "early"})
        with pytest.raises(Exception, match="mix two versions"):
            answers(llm)
        llm.collective_rpc("update_weights", args=({"wire": "fake", "file": files[rank]},))
        assert not any(each["mark"]["torn"] for each in marks(llm))
        assert answers(llm) == wanted[rank]


def test_replies_stay_in_step_when_every_rank_raises(engine: Any) -> None:
    """vLLM reads replies up to the first failure; the rest must not be taken for the next call's."""
    llm, _, _ = engine
    for _ in range(2):
        refused(llm, "refit_no_such_method")
        marks(llm)


def test_the_prefix_cache_follows_the_weights(engine: Any) -> None:
    llm, files, _ = engine
    llm.collective_rpc("refit_prepare")
    prompt = ("a prompt that fills several blocks of the cache, so that a second request would find it there " * 2,)
    seen = []
    for which in (0, 1):
        llm.collective_rpc("update_weights", args=({"wire": "fake", "file": files[which]},))
        assert all(each["caches"] == "reset: prefix, encoder" for each in marks(llm))
        seen.append([greedy(llm, prompt), greedy(llm, prompt)])
        assert seen[-1][0][0] == seen[-1][1][0]
        # the second request hits the cache, the first never does
        assert seen[-1][0][1] == 0 < seen[-1][1][1]
    assert seen[0][0][0] != seen[1][0][0]
    llm.collective_rpc("update_weights", args=({"wire": "fake", "file": files[0], "caches": "keep"},))
    assert all(each["caches"] == "keep: prefix, encoder" for each in marks(llm))
    tokens, cached = greedy(llm, prompt)
    assert (tokens, cached) == (seen[0][0][0], 0), "what starts after the commit reads no block of older weights"
    assert greedy(llm, prompt)[1] > 0


def test_the_prefix_cache_follows_the_weights_when_the_caller_gave_up(engine: Any) -> None:
    """The call's time-out ends behind the commit: the new weights serve, and nothing of the old ones is read."""
    llm, files, _ = engine
    llm.collective_rpc("refit_prepare")
    llm.collective_rpc("update_weights", args=({"wire": "fake", "file": files[0]},))
    prompt = ("another prompt that fills several blocks of the cache, so that a second request would find it there " * 2,)
    old = greedy(llm, prompt)[0]
    commits = marks(llm)[0]["mark"]["commits"]
    with pytest.raises(Exception, match="timed out"):
        llm.collective_rpc("update_weights", timeout=1.0, args=({"wire": "fake", "file": files[1], "stall_s": 6.0},))
    status = marks(llm)
    assert [each["mark"]["commits"] for each in status] == [commits + 1] * 2
    assert not any(each["mark"]["torn"] for each in status)
    assert all(each["caches"] == "reset: prefix, encoder" for each in status)
    new, cached = greedy(llm, prompt)
    assert cached == 0
    assert new != old


def greedy(llm: Any, prompt: tuple[str, ...]) -> tuple[list[int], int]:
    """Greedy tokens, and how many prompt tokens came from the prefix cache."""
    from vllm import SamplingParams

    output = llm.generate(list(prompt), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)[0]
    return list(output.outputs[0].token_ids), output.num_cached_tokens
