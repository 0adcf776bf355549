"""Offers and updates that are not what the trainer holds, on real engines: a named problem, or the right bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.support.tiny_model import save_model
from tests.support.engine_bridge import one_by_one
from tests.support.engines import open_llm
from tests.support.mutate import mutated
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.messages import to_rpc

pytestmark = pytest.mark.engine

PLAIN = "tests.support.plain_cpu.PlainCpuExtension"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("checkpoints") / "start", seed=0)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks with expert parallelism"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    two = request.param == 2
    more = {"enable_expert_parallel": True} if two else {"in_process": True}
    with open_llm(folder, extension=PLAIN, ranks=request.param, **more) as engine:
        yield engine


@pytest.fixture
def trainer(llm: Any, folder: Path) -> Iterator[WholeTrainer]:
    made = WholeTrainer(LLMClient(llm), folder)
    yield made
    made.close()


def text(trainer: WholeTrainer, info: Any, **more: Any) -> str:
    replies = trainer.client.prepare(info, **more)
    return "\n".join(str(p) for r in replies for p in r.problems)


@pytest.mark.parametrize(
    ("name", "dim"),
    [("self_attn.q_proj.weight", 0), ("self_attn.o_proj.weight", 1), ("self_attn.k_proj.weight", 0)]
    + [(f"mlp.experts.3.{p}_proj.weight", d) for p, d in (("gate", 0), ("up", 0), ("down", 1))],
)
@pytest.mark.parametrize("grown", ["twice", "by a few"])
def test_a_trainer_of_larger_sizes_is_refused(trainer: WholeTrainer, name: str, dim: int, grown: str) -> None:
    """Twice the heads or the feed-forward, and a few rows more: the loader cuts all of them off without a word."""
    info = trainer.info()
    name = f"model.layers.1.{name}"
    shape = info[name][0]
    shape[dim] = 2 * shape[dim] if grown == "twice" else shape[dim] + 8
    problems = text(trainer, info)
    assert name in problems
    assert text(trainer, trainer.info()) == ""


def test_the_reply_says_what_is_cast(trainer: WholeTrainer) -> None:
    info = trainer.info()
    names = ["model.layers.0.mlp.gate.weight", "model.norm.weight"]
    for name in names:
        info[name][1] = "bfloat16"
    for reply in trainer.client.prepare(info):
        assert not reply.problems
        assert reply.casts == dict.fromkeys(names, "bfloat16 to float32, exact")
    assert all(not r.casts for r in trainer.client.prepare(trainer.info()))


def test_mutated_messages_end_in_an_error_or_in_the_right_bytes(llm: Any, trainer: WholeTrainer) -> None:
    wanted = one_by_one(llm)
    digests = {str(r.rank): r.digest for r in trainer.prepare()}
    refused = 0
    for seed in range(25):
        trainer.prepare(mutated(trainer.info(), seed))
        refused += _refused(trainer, lambda: trainer.client.update(trainer.publish("changed offer", digests=digests)))
    trainer.prepare()
    for seed in range(100):
        message = mutated(to_rpc(trainer.publish("changed update", digests=digests)), seed)
        refused += _refused(trainer, lambda m=message: llm.collective_rpc("update_weights", args=(m,)))  # type: ignore[misc]
    assert refused > 60
    assert one_by_one(llm) == wanted
    with torch.no_grad():
        trainer.refit("good")
    assert one_by_one(llm) == wanted


def _refused(trainer: WholeTrainer, call: Any) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - vLLM wraps a worker's error in its own
        assert {s.state for s in trainer.client.status()} <= {"ready", "unprepared"}
        return True
    return False
