"""`vllm-refit verify` against a live `vllm serve`: before a refit, after it, and compared with checkpoints on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines import Server, open_server
from tests.support.loose_sender import LooseSender
from tests.support.seam_cases import pair
from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import VerifyError
from vllm_refit_ext.tools import cli

pytestmark = [pytest.mark.engine, pytest.mark.long]

PLAIN = "tests.support.plain_cpu.PlainCpuExtension"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, tuple[Path, Path]]]:
    """A server of the first of two checkpoints that differ in every weight."""
    folders = pair("qwen3_moe", tmp_path_factory.mktemp("verify"))
    with open_server(folders[0], "--worker-extension-cls", PLAIN) as server:
        yield server, folders


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Exit status of the command, and its JSON (the error's text where it printed none)."""
    with pytest.raises(SystemExit) as done:
        cli.main(["verify", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    return int(done.value.code or 0), json.loads(said.out) if said.out else said.err


def test_story(served: tuple[Server, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, (old, new) = served

    # An engine that nothing has prepared has no digests.
    status, answer = verify(capsys, server.url)
    assert status == 1
    assert [p["got"] for p in answer["problems"]] == ["unprepared"]

    # Compared with what it was started with, and with another checkpoint, before any refit.
    status, answer = verify(capsys, server.url, "--checkpoint", old)
    assert (status, answer["problems"]) == (0, [])
    names = set(load_file(old / "model.safetensors"))
    assert set(answer["engines"][0]["wanted"]["0"]) == names == set(answer["engines"][0]["digests"][0]["digests"])
    status, answer = verify(capsys, server.url, "--checkpoint", new)
    assert status == 1
    assert f"{len(names)} tensor(s) are not the checkpoint's" in answer["problems"][0]["what"]

    # After a refit: the version, and the other checkpoint.
    sender = LooseSender(HTTPClient(server.url), load_file(new / "model.safetensors"))
    sender.prepare()
    sender.refit("step-1")
    status, answer = verify(capsys, server.url)
    assert (status, answer["engines"][0]["ranks"][0]["version"]) == (0, "step-1")
    assert answer["engines"][0]["digests"][0]["digests"] == sender.digests()["0"]
    assert verify(capsys, server.url, "--checkpoint", new)[0] == 0

    # One element is seen, and the tensor named.
    changed = load_file(new / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    changed[name].view(-1)[7] += 1
    save_file(changed, tmp_path / "model.safetensors")
    status, answer = verify(capsys, server.url, "--checkpoint", tmp_path)
    assert status == 1
    assert [p["what"] for p in answer["problems"]] == [f"1 tensor(s) are not the checkpoint's, the first is {name!r}"]
    with pytest.raises(VerifyError, match=r"layers\.1\.mlp\.experts\.5\.down_proj"):
        HTTPClient(server.url).verify({"0": {name: "0" * 16}})

    # What can't be asked is one error, and status 2.
    status, said = verify(capsys, server.url, "http://127.0.0.1:9")
    assert status == 2
    assert "127.0.0.1:9" in said
    status, said = verify(capsys, server.url, "--checkpoint", tmp_path / "absent")
    assert status == 2
    assert "no checkpoint is here" in said
    save_file({"model.norm.weight": changed["model.norm.weight"]}, tmp_path / "model.safetensors")
    status, said = verify(capsys, server.url, "--checkpoint", tmp_path)
    assert status == 2
    assert "embed_tokens" in said
