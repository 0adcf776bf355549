"""An engine of two ranks in processes of its own: both take the same version, and it follows while it is idle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from examples.support.tiny_model import save_model
from tests.support.engine_bridge import one_by_one
from tests.support.engines import open_llm
from tests.support.versions_trainer import VersionsTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.errors import SessionError
from vllm_refit_ext.core.part import layers

pytestmark = pytest.mark.engine

EXTENSION = "vllm_refit_ext.RefitWorkerExtension"


def test_two_ranks_take_and_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REFIT_HOST", "127.0.0.1")
    folders = [save_model("qwen3", tmp_path / f"seed{seed}", seed=seed) for seed in (0, 1)]
    with open_llm(folders[1], extension=EXTENSION, ranks=2) as fresh:
        wanted = one_by_one(fresh)
    trainer = VersionsTrainer(folders[0])
    with open_llm(folders[0], extension=EXTENSION, ranks=2) as llm:
        client, before = LLMClient(llm), one_by_one(llm)
        with pytest.raises(SessionError, match="no registry was named yet"):
            client.take()
        trainer.publish("v1", folders[1])
        replies = client.take("latest", trainer.registry)
        assert [(r.rank, r.taken, r.version) for r in replies] == [(0, True, "v1"), (1, True, "v1")]
        assert one_by_one(llm) == wanted
        assert len({s.epoch for s in client.status()}) == 1
        client.follow(trainer.registry, interval_s=0.1)
        for version, answers in (("v2", 0), ("v3", 1)):
            trainer.publish(version, folders[answers])
            end = time.monotonic() + 60.0
            while {s.version for s in client.status()} != {version}:  # nobody asks it for a token meanwhile
                assert time.monotonic() < end, client.status()
                time.sleep(0.1)
            assert one_by_one(llm) == (wanted if answers else before)
        statuses = client.follow("")
        assert {s.following for s in statuses} == {""}
        # In parts, some of them through the engine's own reload: the answers of the whole once all have come.
        others = sorted(n for n in trainer.tensors if ".layers.0." not in n)
        for version, part in (("p1", layers(0)), ("p2", others)):
            trainer.publish(version, folders[0], part)
            client.take()
            assert {s.version for s in client.status()} == {version}
        parts = client.status()[0].parts
        assert parts.items() >= {("*.layers.0.*", "p1"), (others[0], "p2")}
        assert "*" not in parts
        assert one_by_one(llm) == before
    trainer.close()
