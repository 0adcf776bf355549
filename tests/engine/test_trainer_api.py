"""vLLM's own trainer-side classes with our backend's name, against a real `vllm serve` over HTTP.

The installed vLLM is 0.32. The protocol of 0.33 is held to classes that are written to the signatures in its wheel.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support.engines import ROOT, Server, environment, fresh_answers, open_server
from tests.support.trainer_api_jobs import PRELOAD, SOURCES, send
from vllm_refit_ext.client import HTTPClient

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, list[int]]]:
    """A server of other weights without our extension, the checkpoint, and a fresh engine's tokens."""
    base = tmp_path_factory.mktemp("trainer-api")
    start, trained = (save_model("qwen3", base / str(seed), seed=seed) for seed in (0, 1))
    wanted = list(fresh_answers(trained)[0].tokens)
    with open_server(start, "--weight-transfer-config", '{"backend": "refit"}') as server:
        assert server.tokens()[1] != wanted
        yield server, trained, wanted


SHORT = ("Whole", "Local33")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in SHORT else [pytest.mark.long]) for k in SOURCES])
def test_every_kind_of_source(served: tuple[Server, Path, list[int]], kind: str) -> None:
    server, folder, wanted = served
    first, second = run_ranks(send, 2, str(folder), kind, server.url, {}, preload=PRELOAD, timeout=200)
    assert server.tokens()[1] == wanted
    given = load_file(folder / "model.safetensors")
    assert first["nbytes"] == sum(math.prod(t.shape) * 4 for t in given.values())
    assert first["ranks"] == [0, 1], "each rank gives its part"
    assert first["kept"] == second["kept"] == 0, "what the source made is let go of"
    assert first["compared"] == (0 if kind == "Whole" else len(given))
    assert HTTPClient(server.url).status()[0].version == first["version"] == "send-2"
    assert server.call("/weight_info")[1]["weight_version"] == "send-2"


@pytest.mark.long
def test_example(served: tuple[Server, Path, list[int]]) -> None:
    server, folder, wanted = served
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += [str(ROOT / "examples/vllm_trainer_api.py"), str(folder), "--url", server.url, "--steps", "2"]
    done = subprocess.run(
        command, env=os.environ | environment(), capture_output=True, text=True, timeout=240, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "send-2: " in done.stdout
    assert server.tokens()[1] == wanted


def test_problems_come_back_by_name(served: tuple[Server, Path, list[int]]) -> None:
    """vLLM's client raises a bare status; the reason comes by the store."""
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from vllm_refit_ext.core.errors import ConfigError, PlanError
    from vllm_refit_ext.sender import RefitTrainerInitInfo

    server, folder, _ = served
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)

    class Source:
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            return iter(tensors.items())

    def make(rank: int) -> Any:
        client = HTTPVLLMWeightSyncClient(server.url)
        return WeightTransferTrainerFactory.trainer_init(RefitTrainerInitInfo(rank=rank), client=client, source=Source())

    with pytest.raises(PlanError) as found:
        make(0)
    assert "model.norm.weight" in str(found.value)
    assert "128" in str(found.value), "what the engine wanted stands there too"
    with pytest.raises(ConfigError, match="not this process's rank"):
        make(1)
