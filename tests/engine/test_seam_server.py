"""The seam over HTTP: a real `vllm serve` with the extension, by `/collective_rpc` and by vLLM's reinforcement-learning
routes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.engines import Server, open_server
from tests.support.seam_cases import pair

pytestmark = pytest.mark.engine

EXTENSION = "tests.support.fake_receiver.FakeExtension"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, list[str]]]:
    """(server of checkpoint 0, tensor files of checkpoint 0 and 1)."""
    folders = pair("qwen3", tmp_path_factory.mktemp("server"))
    with open_server(folders[0], "--worker-extension-cls", EXTENSION) as server:
        yield server, [str(folder / "model.safetensors") for folder in folders]


def said(answer: tuple[int, Any], status: int) -> str:
    assert answer[0] == status, answer
    return str(answer[1])


def test_story(served: tuple[Server, list[str]]) -> None:
    server, files = served
    old = server.tokens()
    assert old[0] == 200

    # vLLM's routes, without --weight-transfer-config
    answer = server.call("/update_weights", {"update_info": {"wire": "fake", "file": files[1]}})
    assert answer[0] >= 400
    assert server.call("/init_weight_transfer_engine", {"init_info": {"state_dict_info": {"a": [[1], "float32"]}}})[0] == 200
    assert server.call("/start_weight_update", {})[0] == 200
    assert server.call("/update_weights", {"update_info": {"wire": "fake", "file": files[1]}})[0] == 200
    assert server.call("/finish_weight_update", {})[0] == 200
    new = server.tokens()
    assert new[0] == 200
    assert new[1] != old[1]

    # the extension's way
    assert server.rpc("update_weights", {"wire": "fake", "file": files[0]})[0] == 200
    assert server.tokens() == old

    # torn while a request runs
    running: list[Any] = []
    thread = threading.Thread(target=lambda: running.append(server.tokens(count=200)))
    thread.start()
    while "'num_requests_running': 0" in str(_running(server)):
        pass
    said(server.rpc("update_weights", {"wire": "fake", "file": files[1], "fail": "torn", "caches": "keep"}), 500)
    thread.join(60)
    assert "mix two versions" in said(running[0], 503)
    assert "full refit" in said(server.tokens(), 503)
    assert "torn as the test asked" in said(server.rpc("refit_status"), 200)
    assert server.call("/health")[0] == 200
    assert server.rpc("update_weights", {"wire": "fake", "file": files[1]})[0] == 200
    assert server.tokens() == new


def _running(server: Server) -> dict[str, int]:
    """How many requests the scheduler runs, by vLLM's own metric."""
    text = str(server.call("/metrics")[1])
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return {"num_requests_running": int(sum(float(line.rpartition(" ")[2]) for line in lines))}
