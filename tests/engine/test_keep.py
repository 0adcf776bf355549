"""What the user keeps is not written, and listed in the reply and in the report; a name that matches nothing is a problem."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.architectures import checkpoint, contents, open_engine
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient

pytestmark = pytest.mark.engine

EXTENSIONS = {"stock": "vllm_refit_ext.RefitWorkerExtension", "plain": "tests.support.plain_cpu.PlainCpuExtension"}


@pytest.fixture(scope="module", params=EXTENSIONS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Path, Any]]:
    """(layout, an engine of one checkpoint, the folder of another, what an engine of that holds)."""
    root = tmp_path_factory.mktemp("llama")
    start, new = (checkpoint("llama", root / str(seed), seed) for seed in (0, 1))
    with open_engine(new, EXTENSIONS[request.param]) as llm:
        wanted = contents(llm)
    with open_engine(start, EXTENSIONS[request.param]) as llm:
        yield request.param, llm, new, wanted


@pytest.fixture
def trainer(live: Any) -> Iterator[WholeTrainer]:
    made = WholeTrainer(LLMClient(live[1]), live[2])
    yield made
    made.close()


def without(trainer: WholeTrainer, *parts: str) -> dict[str, Any]:
    """An offer that leaves out the tensors whose names have one of `parts`."""
    trainer.tensors = {n: t for n, t in trainer.tensors.items() if not any(p in n for p in parts)}
    return trainer.info()


def problems(trainer: WholeTrainer, info: Any, *patterns: str) -> str:
    (reply,) = trainer.client.prepare(info, keep=patterns)
    return "\n".join(map(str, reply.problems))


@pytest.mark.parametrize("offered", [False, True])
def test_what_is_kept_stays_and_the_rest_is_written(live: Any, trainer: WholeTrainer, offered: bool) -> None:
    _, llm, _, wanted = live
    before = contents(llm)
    patterns = ["model.embed_tokens.*", "model.layers.1.mlp.*", "lm_head.weight"]
    info = trainer.info() if offered else without(trainer, "embed_tokens", "layers.1.mlp", "lm_head")
    (reply,) = trainer.client.prepare(info, keep=patterns)
    assert reply.problems == []
    engine = {"model.embed_tokens.weight", "model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.mlp.down_proj.weight"}
    engine.add("lm_head.weight")
    assert engine <= reply.kept.keys()
    (report,) = trainer.client.update(trainer.publish("kept"))
    assert report.kept == sorted(reply.kept)
    after = contents(llm)
    for name in after:
        assert after[name] == (before if name in engine else wanted)[name], name


def test_names_that_match_nothing_are_problems_all_at_once(live: Any, trainer: WholeTrainer) -> None:
    found_ = problems(trainer, trainer.info(), "model.embd_tokens.weight", "visual.*")
    assert "keep 'model.embd_tokens.weight'" in found_
    assert "keep 'visual.*'" in found_
    assert "model.embed_tokens.weight" in found_


def test_what_is_left_out_and_not_kept_is_still_a_problem(live: Any, trainer: WholeTrainer) -> None:
    found_ = problems(trainer, without(trainer, "embed_tokens", "model.norm"), "model.embed_tokens.weight")
    assert "model.norm.weight" in found_
    assert "embed_tokens" not in found_


def test_a_part_of_a_module_that_a_reload_writes_can_not_be_kept(live: Any, trainer: WholeTrainer) -> None:
    layout, llm, *_ = live
    name = "model.layers.0.self_attn.q_proj.weight"
    found_ = problems(trainer, trainer.info(), name)
    if layout == "plain":  # written in place: the rows of q stay, those of k and v are written
        assert found_ == ""
        before = contents(llm)
        for tensor in trainer.tensors.values():
            tensor.mul_(2)
        trainer.client.update(trainer.publish("part"))
        k, v = (trainer.tensors[name.replace("q_proj", other)].numpy().tobytes() for other in ("k_proj", "v_proj"))
        fused, size = "model.layers.0.self_attn.qkv_proj.weight", trainer.tensors[name].nbytes
        assert contents(llm)[fused] == before[fused][:size] + k + v
        return
    assert f"keep: {name!r}" in found_
    assert "writes a module as a whole" in found_


@pytest.mark.parametrize("keep", ["model.norm.weight", 7, [1], [""], {"a": 1}])
def test_an_argument_that_is_no_list_of_names_is_refused(live: Any, trainer: WholeTrainer, keep: Any) -> None:
    (reply,) = trainer.client.call("prepare_refit_info", (trainer.info(), None, keep))
    assert "keep can't be read" in str(reply["problems"])
