"""Published versions on a GPU over wire `ipc`: engines take, take a part, and copy from each other without the trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from examples.support.tiny_model import save_model  # noqa: E402
from tests.gpu.test_refit import KINDS, SIZES, differing  # noqa: E402
from tests.support.gpu_engine import GRAPHS, Engine  # noqa: E402
from tests.support.versions_trainer import VersionsTrainer  # noqa: E402
from vllm_refit_ext.sender import SenderConfig  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Two checkpoints, and for each kind two engines of the first and a fresh engine of the second; all start at once."""
    base = tmp_path_factory.mktemp("versions")
    logs = Path(os.environ.get("OUT", base))
    folders = [save_model("qwen3_moe", base / str(seed), seed=seed, dtype="bfloat16", **SIZES) for seed in (0, 1)]
    engines = {
        kind: [Engine(folders[i == 2], logs / f"versions-{kind}-{i}.log", **GRAPHS, **more) for i in range(3)]
        for kind, more in KINDS.items()
    }
    yield folders, engines
    for found in engines.values():
        for engine in found:
            engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_versions(started, kind, monkeypatch):
    """From the trainer, from a neighbour, and in part; every byte and answer is a fresh engine's."""
    monkeypatch.setenv("VLLM_REFIT_HOST", "127.0.0.1")
    folders, engines = started
    first, late, other = engines[kind]
    wanted, answers = other.tensors(), other.answers()
    old = first.tensors()
    assert differing(old, wanted)
    trainer = VersionsTrainer(folders[0], config=SenderConfig(wire="ipc", registry_port=0, deadline_s=60.0), device="cuda")
    try:
        publication = trainer.publish("v1", folders[1])
        reply = first.wait().take("latest", trainer.registry, serve="ipc")[0]
        print(kind, "from the trainer", reply)
        assert reply.replica.startswith("by wire ipc"), reply.replica
        assert differing(first.tensors(), wanted) == []
        assert first.answers() == answers

        publication.close()
        for tensor in trainer.tensors.values():
            tensor.zero_()
        reply = late.wait().take("latest", trainer.registry)[0]
        print(kind, "from a neighbour", reply)
        assert (reply.received, reply.version) == ({}, "v1")
        assert sum(late.wait().status()[0].last.forwarded.values()) > 0
        assert differing(late.tensors(), wanted) == []
        assert late.answers() == answers

        trainer.publish("v2", folders[0], part=["model.layers.0.*"])
        late.wait().take("v2", trainer.registry)
        now = late.tensors()
        changed = differing(now, wanted)
        assert changed
        assert all("layers.0." in name for name in changed)
        assert [n for n in now if "layers.0." in n and "workspace" not in n and now[n][0] != old[n][0]] == []
    finally:
        trainer.close()
