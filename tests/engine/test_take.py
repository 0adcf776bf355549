"""Real engines take published versions by themselves: late, by name, following, after a trainer that died, and when revoked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from examples.support.tiny_model import save_model
from tests.support.engine_bridge import one_by_one
from tests.support.engines import ROOT, open_llm
from tests.support.versions_trainer import VersionsTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.errors import RefitError, SessionError
from vllm_refit_ext.core.part import layers
from vllm_refit_ext.receiver import take
from vllm_refit_ext.wires.registry import StoreRegistry

pytestmark = pytest.mark.engine

PLAIN = "tests.support.plain_cpu.PlainCpuExtension"


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REFIT_HOST", "127.0.0.1")


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


@pytest.fixture
def client(llm: Any) -> Iterator[LLMClient]:
    made = LLMClient(llm)
    yield made
    with contextlib.suppress(RefitError):
        made.follow("")


@pytest.fixture
def trainer(folders: tuple[Path, Path], client: LLMClient) -> Iterator[VersionsTrainer]:
    made = VersionsTrainer(folders[0])
    yield made
    made.close()


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def entries(registry: str) -> list[Any]:
    return StoreRegistry(registry).entries(time.monotonic() + 20.0)


def test_an_engine_joins_after_versions_were_published(
    llm: Any, client: LLMClient, trainer: VersionsTrainer, folders: Any, wanted: Any
) -> None:
    trainer.publish("v1", folders[0])
    publication = trainer.publish("v2", folders[1])
    before = time.time()
    (reply,) = client.take("latest", trainer.registry)
    assert (reply.taken, reply.version, reply.epoch) == (True, "v2", publication.epoch)
    assert "prepare" in reply.seconds
    assert one_by_one(llm) == wanted[1]
    (status,) = client.status()
    assert (status.version, status.epoch, status.state) == ("v2", publication.epoch, "ready")
    assert before - 1 < status.since < time.time() + 1
    assert status.caches.startswith("reset: ")
    assert StoreRegistry(trainer.registry).leases(publication.epoch, time.monotonic() + 20.0) == []
    (again,) = client.take()
    assert (again.taken, again.version, again.epoch) == (False, "v2", publication.epoch)
    trainer.publish("v3", folders[0])
    (reply,) = client.take("v3")
    assert "prepare" not in reply.seconds, "one prepare serves all versions"
    assert one_by_one(llm) == wanted[0]
    with pytest.raises(SessionError, match=r"version 'v2'.*not published, or gone.*'v3'"):
        client.take("v2")


def test_an_engine_follows(llm: Any, client: LLMClient, trainer: VersionsTrainer, folders: Any, wanted: Any) -> None:
    (status,) = client.follow(trainer.registry, interval_s=0.05)
    assert status.following.startswith(f"{trainer.registry}, every 0.05 s")
    for version, which in (("f1", 1), ("f2", 0), ("f3", 1)):
        trainer.publish(version, folders[which])

        def taken(version: str = version) -> bool:
            one_by_one(llm)  # an engine in this process has no loop of its own: it takes before its next step
            return client.status()[0].version == version

        until(taken)
        assert one_by_one(llm) == wanted[which]
    (status,) = client.follow("")
    assert status.following == ""
    trainer.publish("f4", folders[0])
    time.sleep(0.2)
    assert one_by_one(llm) == wanted[1]


def test_a_part_leaves_the_rest_bit_for_bit(
    llm: Any, client: LLMClient, trainer: VersionsTrainer, folders: Any, wanted: Any, tmp_path: Path
) -> None:
    trainer.publish("p1", folders[0])
    client.take("latest", trainer.registry)
    trainer.publish("p2", folders[1], layers(0))
    client.take()
    (status,) = client.status()
    assert (status.version, status.parts) == ("p2", {"*": "p1", "*.layers.0.*": "p2"})
    assert status.last is not None
    old = load_file(folders[0] / "model.safetensors")
    part = {n for n in old if ".layers.0." in n}
    assert sum(status.last.received.values()) == sum(old[n].nbytes for n in part)
    (reply,) = client.verify()
    held = {n: reply.digests[n] for n in old}
    answers = one_by_one(llm)
    assert answers not in wanted
    for which, names in ((folders[1], part), (folders[0], set(old) - part)):
        trainer.publish(f"of {which.name}", which)
        client.take()
        (reply,) = client.verify()
        assert {n: reply.digests[n] for n in names} == {n: held[n] for n in names}
    assert client.status()[0].parts == {}
    trainer.publish("p3", folders[1], ["*"])
    client.take()
    assert client.status()[0].parts == {}
    assert one_by_one(llm) == wanted[1]


@pytest.mark.parametrize(
    "arguments", [("nowhere",), ("127.0.0.1:1", 0.0), ("127.0.0.1:1", float("nan")), ("127.0.0.1:1", 1.0, "drop")]
)
def test_what_can_not_be_followed(client: LLMClient, arguments: Any) -> None:
    with pytest.raises(RefitError, match=r"registry|refit_follow"):
        client.follow(*arguments)
    assert client.status()[0].following == ""


def test_a_registry_that_is_not_there(llm: Any, client: LLMClient, wanted: Any) -> None:
    before = one_by_one(llm)
    with pytest.raises(SessionError, match=r"registry at 127\.0\.0\.1:1"):
        client.take("latest", "127.0.0.1:1", deadline_s=20.0)
    client.follow("127.0.0.1:1", interval_s=0.05)
    until(lambda: "registry at 127.0.0.1:1" in client.status()[0].following)
    assert one_by_one(llm) == before


def test_a_version_that_is_revoked_before_the_first_write(
    llm: Any, client: LLMClient, trainer: VersionsTrainer, folders: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.publish("r1", folders[0])
    client.take("latest", trainer.registry)
    publication = trainer.publish("r2", folders[1])
    native = take.Leased.update

    def closing(self: Any, *arguments: Any) -> Any:
        publication.close(0.0)
        return native(self, *arguments)

    monkeypatch.setattr(take.Leased, "update", closing)
    with pytest.raises(SessionError, match="another publication"):
        client.take()
    assert one_by_one(llm) == wanted[0]
    assert client.status()[0].version == "r1"


def test_a_version_that_is_revoked_while_it_is_written(
    llm: Any, client: LLMClient, trainer: VersionsTrainer, folders: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torn by the usual rule: refused until the next version is taken, which heals."""
    publication = trainer.publish("t1", folders[1])
    native = take.Versions.check

    def closing(self: Any, entry: Any) -> None:
        publication.close(0.0)
        native(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(take.Versions, "check", closing)
        with pytest.raises(SessionError, match="the lease was revoked"):
            client.take("latest", trainer.registry)
    assert client.status()[0].state == "torn"
    with pytest.raises(RefitError):
        one_by_one(llm)
    trainer.publish("t2", folders[1])
    client.take()
    assert one_by_one(llm) == wanted[1]


def start(folder: Path, port: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.versions_trainer", str(folder), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=dict(os.environ) | {"VLLM_REFIT_HOST": "127.0.0.1"},
    )


def tell(process: subprocess.Popen[str], version: str, folder: Path) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{version} {folder}\n")
    process.stdin.flush()
    assert process.stdout.readline().strip() == "published"


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_publisher_that_is_killed_and_started_again(llm: Any, client: LLMClient, folders: Any, wanted: Any) -> None:
    """The engine serves on, says what is wrong, and takes what the next trainer publishes without another prepare."""
    first = start(folders[0])
    try:
        assert first.stdout is not None
        registry = first.stdout.readline().strip()
        tell(first, "k1", folders[1])
        client.take("latest", registry)
        assert one_by_one(llm) == wanted[1]
    finally:
        stop(first)
    with pytest.raises(SessionError, match=f"registry at {registry}"):
        client.take(deadline_s=20.0)
    assert one_by_one(llm) == wanted[1]
    second = start(folders[0], int(registry.rpartition(":")[2]))
    try:
        assert second.stdout is not None
        assert second.stdout.readline().strip() == registry
        tell(second, "k1", folders[0])
        (reply,) = client.take()
        assert (reply.taken, reply.version) == (True, "k1")
        assert "prepare" not in reply.seconds
        assert one_by_one(llm) == wanted[0]
    finally:
        stop(second)
