"""A real CPU engine over wire `nixl`: pushed to, and taking what is published, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from examples.support.tiny_model import save_model
from tests.support.engine_bridge import one_by_one
from tests.support.engines import open_llm
from tests.support.loose_sender import LooseSender
from tests.support.versions_trainer import VersionsTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.part import layers
from vllm_refit_ext.sender import SenderConfig
from vllm_refit_ext.wires import nixl_agent

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not nixl_agent.installed(), reason="NIXL is not installed here: `make test-nixl` has it"),
]
PLAIN = "tests.support.plain_cpu.PlainCpuExtension"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return save_model("qwen3_moe", root / "start", seed=0), save_model("qwen3_moe", root / "new", seed=1)


@pytest.fixture(scope="module")
def wanted(folders: tuple[Path, Path]) -> list[Any]:
    """Answers of a fresh engine of each checkpoint."""
    found = []
    for folder in folders:
        with open_llm(folder, extension=PLAIN, in_process=True) as fresh:
            found.append(one_by_one(fresh))
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path], wanted: Any) -> Iterator[Any]:
    with open_llm(folders[0], extension=PLAIN, in_process=True) as engine:
        yield engine
        LLMClient(engine).abort()


def test_push(llm: Any, folders: Any, wanted: Any) -> None:
    """Cut by rows and by columns, in buckets smaller than a tensor."""
    given = load_file(folders[1] / "model.safetensors")
    cuts = {name: (i % 2, 2) for i, (name, t) in enumerate(given.items()) if t.ndim == 2}
    sender = LooseSender(LLMClient(llm), given, cuts=cuts, wire_name="nixl", bucket_bytes=20_000)
    try:
        sender.prepare()
        for version in ("p1", "p2"):
            sender.refit(version)
            assert one_by_one(llm) == wanted[1]
        sender.verify()
    finally:
        sender.close()


def test_take(llm: Any, folders: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REFIT_HOST", "127.0.0.1")
    client = LLMClient(llm)
    trainer = VersionsTrainer(folders[0], config=SenderConfig(wire="nixl", registry_port=0, deadline_s=60.0))
    try:
        for version, which in (("v1", 0), ("v2", 1)):
            trainer.publish(version, folders[which])
            (reply,) = client.take("latest", trainer.registry)
            assert (reply.taken, reply.version) == (True, version)
            assert one_by_one(llm) == wanted[which]
        trainer.publish("v3", folders[0], part=layers(0))
        client.take("v3")
        (status,) = client.status()
        assert status.parts == {"*": "v2", "*.layers.0.*": "v3"}
        trainer.publish("v4", folders[0])
        client.take("v4")
        assert one_by_one(llm) == wanted[0]
        publication = trainer.publish("v5", folders[1])
        publication.close(0.0)
        with pytest.raises(RefitError, match="v5"):
            client.take("v5", deadline_s=20)
        assert client.status()[0].version == "v4"
    finally:
        trainer.close()
    begin = time.monotonic()
    with pytest.raises(RefitError):
        client.take("v6", deadline_s=5)
    assert time.monotonic() - begin < 60
