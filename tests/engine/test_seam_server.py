"""The seam over HTTP: a real `vllm serve` with the extension, by `/collective_rpc` and by vLLM's reinforcement-learning
routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm.exceptions

from tests.support.engines import Server, open_server
from tests.support.seam_cases import pair

pytestmark = pytest.mark.engine

REFUSED = 503 if hasattr(vllm.exceptions, "GracefulHTTPError") else 400
"""The status of a refusal; vLLM 0.24 has no class that carries 503."""

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

    # torn while a request runs: held by a pause after its first token, so that it can't end before
    with server.stream(count=200) as running:
        assert b"data:" in running.readline()
        assert server.call("/pause?mode=keep", {})[0] == 200
        said(server.rpc("update_weights", {"wire": "fake", "file": files[1], "fail": "torn", "caches": "keep"}), 500)
        assert "mix two versions" in running.read().decode()
    assert server.call("/resume", {})[0] == 200
    assert "full refit" in said(server.tokens(), REFUSED)
    assert "torn as the test asked" in said(server.rpc("refit_status"), 200)
    assert server.call("/health")[0] == 200
    assert server.rpc("update_weights", {"wire": "fake", "file": files[1]})[0] == 200
    assert server.tokens() == new
