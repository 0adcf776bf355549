"""`RayClient` with a real local Ray, whose actor holds a real engine. Run by `make test-integrations`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.engines import environment, fresh_answers, open_llm
from tests.support.loose_sender import LooseSender
from tests.support.seam_cases import pair
from vllm_refit_ext.core.errors import DeadlineError, RefitError
from vllm_refit_ext.integrations.ray import RayClient

ray = pytest.importorskip("ray", reason="it is not installed; `make test-integrations` has it")
pytestmark = pytest.mark.engine


class Engine:
    """What a user's actor is: an LLM, and its `collective_rpc`."""

    def __init__(self, folder: str) -> None:
        self._open = open_llm(folder, extension="vllm_refit_ext.RefitWorkerExtension")
        self._llm = self._open.__enter__()

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "sleep_s":
            time.sleep(args[0])
            return []
        return list(self._llm.collective_rpc(method, timeout=timeout, args=args))

    def answers(self) -> Any:
        from tests.support.engines import answers

        return answers(self._llm)


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, tuple[Path, Path]]]:
    folders = pair("qwen3", tmp_path_factory.mktemp("ray"))
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, runtime_env={"env_vars": environment()})
    try:
        yield ray.remote(Engine).options(max_concurrency=4).remote(str(folders[0])), folders
    finally:
        ray.shutdown()


def test_a_refit_of_an_engine_in_an_actor(actor: tuple[Any, tuple[Path, Path]]) -> None:
    handle, folders = actor
    client = RayClient(handle)
    sender = LooseSender(client, load_file(folders[1] / "model.safetensors"))
    sender.prepare()
    sender.refit("by ray")
    assert [s.version for s in client.status()] == ["by ray"]
    assert ray.get(handle.answers.remote(), timeout=120) == fresh_answers(folders[1])


def test_a_call_ends_at_its_deadline_and_a_dead_actor_is_an_error(actor: tuple[Any, tuple[Path, Path]]) -> None:
    handle, _ = actor
    begin = time.monotonic()
    with pytest.raises(DeadlineError):
        RayClient([handle]).call("sleep_s", (30.0,), 1.0)
    assert time.monotonic() - begin < 20
    with pytest.raises(RefitError, match="unheard_of"):
        RayClient(handle).call("unheard_of", (), 30.0)
    ray.kill(handle)
    with pytest.raises(RefitError, match="the engine failed"):
        RayClient(handle).status(30.0)
