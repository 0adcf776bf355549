"""Bad input and faults on a real engine: one clear error, old weights or a refusal by name, and the next refit works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.support.tiny_model import save_model
from tests.support.engine_bridge import one_by_one
from tests.support.engines import open_llm
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.errors import RefitError, VerifyError
from vllm_refit_ext.core.messages import to_rpc
from vllm_refit_ext.engine import live_layout
from vllm_refit_ext.receiver import session
from vllm_refit_ext.receiver.writers import InPlaceWriter

pytestmark = pytest.mark.engine

PLAIN = "tests.support.plain_cpu.PlainCpuExtension"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return save_model("qwen3_moe", root / "start", seed=0), save_model("qwen3_moe", root / "new", seed=1)


@pytest.fixture(scope="module")
def wanted(folders: tuple[Path, Path]) -> Any:
    with open_llm(folders[1], extension=PLAIN, in_process=True) as fresh:
        return one_by_one(fresh)


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path], wanted: Any) -> Iterator[Any]:
    with open_llm(folders[0], extension=PLAIN, in_process=True, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture
def trainer(llm: Any, folders: tuple[Path, Path]) -> Iterator[WholeTrainer]:
    made = WholeTrainer(LLMClient(llm), folders[1])
    yield made
    made.close()


def scaled(trainer: WholeTrainer, factor: float) -> None:
    for tensor in trainer.tensors.values():
        tensor.mul_(factor)


def check_recovers(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    """The next good refit succeeds, and changes the engine to exactly the new checkpoint."""
    trainer.refit("good")
    assert one_by_one(llm) == wanted


def test_update_before_prepare(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    trainer.client.abort()
    before = one_by_one(llm)
    with pytest.raises(RefitError, match="before prepare_refit_info"):
        trainer.client.update(trainer.publish("early"))
    assert one_by_one(llm) == before
    check_recovers(llm, trainer, wanted)


def problems(trainer: WholeTrainer, info: Any) -> str:
    (reply,) = trainer.prepare(info)
    assert reply.problems
    assert not reply.digest
    return "\n".join(str(p) for p in reply.problems)


def misspelt(info: dict[str, Any]) -> str:
    info["model.layers.0.self_attn.qproj.weight"] = info.pop("model.layers.0.self_attn.q_proj.weight")
    return "model.layers.0.self_attn.qproj.weight"


def missing(info: dict[str, Any]) -> str:
    del info["model.layers.1.mlp.experts.3.up_proj.weight"]
    return "model.layers.1.mlp.experts.routed_experts.w13_weight"


def missing_norm(info: dict[str, Any]) -> str:
    del info["model.norm.weight"]
    return "model.norm.weight"


def unexpected(info: dict[str, Any]) -> str:
    info["model.layers.7.self_attn.q_proj.weight"] = [[128, 128], "float32"]
    return "model.layers.7.self_attn.q_proj.weight"


def unexpected_scale(info: dict[str, Any]) -> str:
    info["model.layers.0.self_attn.q_proj.weight_scale"] = [[128, 4], "uint8"]
    return "model.layers.0.self_attn.q_proj.weight_scale"


def wrong_shape(info: dict[str, Any]) -> str:
    info["model.layers.0.mlp.gate.weight"][0] = [9, 128]
    return "model.layers.0.mlp.gate.weight"


def transposed(info: dict[str, Any]) -> str:
    info["model.layers.0.mlp.experts.0.down_proj.weight"][0] = [128, 64]
    return "model.layers.0.mlp.experts.0.down_proj.weight"


def wrong_dtype(info: dict[str, Any]) -> str:
    info["model.norm.weight"][1] = "int32"
    return "model.norm.weight"


def unknown_dtype(info: dict[str, Any]) -> str:
    info["model.norm.weight"][1] = "float7"
    return "model.norm.weight"


@pytest.mark.parametrize(
    "spoil", [misspelt, missing, missing_norm, unexpected, unexpected_scale, wrong_shape, transposed, wrong_dtype, unknown_dtype]
)
def test_bad_manifest(llm: Any, trainer: WholeTrainer, wanted: Any, spoil: Any) -> None:
    before = one_by_one(llm)
    info = trainer.info()
    name = spoil(info)
    assert name in problems(trainer, info)
    with pytest.raises(RefitError, match="the last prepare_refit_info found problems"):
        trainer.client.update(trainer.publish("spoilt"))
    assert one_by_one(llm) == before
    check_recovers(llm, trainer, wanted)


def test_problems_come_together(trainer: WholeTrainer) -> None:
    info = trainer.info()
    names = [wrong_shape(info), misspelt(info)]
    text = problems(trainer, info)
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    "info",
    [[], "not base64!", b"\xc1broken", {}, 7, {"a": 3}, {"a": [[-1], "float32"]}, {"a": {"shape": [1], "dtipe": "float32"}}],
)
def test_not_a_manifest(llm: Any, trainer: WholeTrainer, info: Any) -> None:
    assert problems(trainer, info)
    assert one_by_one(llm)


def test_wrong_arity(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    for args, kwargs in [((), {}), (({}, None, 3), {}), (({},), {"fp8": 1})]:
        (reply,) = llm.collective_rpc("prepare_refit_info", args=args, kwargs=kwargs)
        assert "wrong arguments" in reply["problems"][0]["what"]
        assert "state_dict_info" in reply["problems"][0]["wanted"]
    assert "wrong arguments" in llm.collective_rpc("refit_status", args=(1,))[0]["problems"][0]["what"]
    (reply,) = llm.collective_rpc(
        "prepare_refit_info", kwargs={"state_dict_info": trainer.info(), "fp8_config": {"prequantise": True}}
    )
    assert "fp8_config" in reply["problems"][0]["what"]
    check_recovers(llm, trainer, wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"version": ""},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"digests": {"0": "another plan"}},
        {"shm": None},
    ],
    ids=str,
)
def test_bad_update(llm: Any, trainer: WholeTrainer, wanted: Any, change: dict[str, Any]) -> None:
    trainer.prepare()
    before = one_by_one(llm)
    with pytest.raises(RefitError):
        llm.collective_rpc("update_weights", args=(to_rpc(trainer.publish("bad", **change)),))
    status = trainer.client.status()[0]
    assert status.state == "ready"
    assert one_by_one(llm) == before
    check_recovers(llm, trainer, wanted)


def test_unknown_fields_are_refused(llm: Any, trainer: WholeTrainer) -> None:
    trainer.prepare()
    with pytest.raises(Exception, match="unknown field"):
        llm.collective_rpc("update_weights", args=({"wire": "shm", "version": "v", "session": "s", "speed": 3},))
    assert one_by_one(llm)


def test_sender_killed_while_publishing(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    """A trainer that dies in the middle of filling its segment leaves the old weights serving."""
    code = (
        "import time, sys; from vllm_refit_ext.wires import shm\n"
        f"p = shm.ShmPublisher(0, {{}}, {trainer_bytes(trainer)})\n"
        "p._write_header(shm.FILLING, 42); print(p.name, flush=True); time.sleep(120)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    trainer.prepare()
    before = one_by_one(llm)
    info = trainer.publish("dead")
    assert info.shm is not None
    dead = type(info.shm.segments[0])(rank=0, name=name, nbytes=info.shm.segments[0].nbytes, nonce=42)
    from msgspec.structs import replace

    with pytest.raises(RefitError, match=r"not finished filling|can't be opened"):
        trainer.client.update(replace(info, shm=replace(info.shm, segments=[dead])))
    assert one_by_one(llm) == before
    check_recovers(llm, trainer, wanted)


def trainer_bytes(trainer: WholeTrainer) -> int:
    return sum(t.numel() * t.element_size() for t in trainer.tensors.values()) + 256 * (len(trainer.tensors) + 2)


def test_failure_after_the_first_write_tears_the_engine(
    llm: Any, trainer: WholeTrainer, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.refit("whole")

    def half(self: InPlaceWriter, reader: Any) -> None:
        torch._foreach_zero_(self._targets[: len(self._targets) // 2])
        raise OSError("the disk of this test is full")

    with monkeypatch.context() as patch:
        patch.setattr(InPlaceWriter, "write", half)
        with pytest.raises(RefitError, match=r"failed after its first write(.|\n)*the disk of this test is full"):
            trainer.client.update(trainer.publish("half"))
    status = trainer.client.status()[0]
    assert (status.state, status.version) == ("torn", "whole")
    with pytest.raises(Exception, match="refit"):
        one_by_one(llm)
    assert trainer.client.abort()[0].state == "torn", "giving up does not heal a torn engine"
    check_recovers(llm, trainer, wanted)
    assert trainer.client.status()[0].state == "ready"


def test_an_interrupt_during_a_write_tears_the_engine(
    llm: Any, trainer: WholeTrainer, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.refit("whole")

    def interrupted(self: InPlaceWriter, reader: Any) -> None:
        torch._foreach_zero_(self._targets[: len(self._targets) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(InPlaceWriter, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.collective_rpc("update_weights", args=(to_rpc(trainer.publish("interrupted")),))
    status = trainer.client.status()[0]
    assert (status.state, status.version) == ("torn", "whole")
    with pytest.raises(Exception, match="refit"):
        one_by_one(llm)
    check_recovers(llm, trainer, wanted)


def test_requests_that_run_are_refused_without_a_prefix_cache(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    """Their keys and values are of the older weights, whatever caches exist."""
    from vllm import SamplingParams

    trainer.refit("before")
    llm.llm_engine.add_request("runs", "abc", SamplingParams(max_tokens=100, ignore_eos=True))
    llm.llm_engine.step()
    with pytest.raises(RefitError, match="requests are running"):
        trainer.client.update(trainer.publish("refused"))
    assert trainer.client.status()[0].version == "before"
    llm.llm_engine.abort_request(["runs"])
    check_recovers(llm, trainer, wanted)


def test_second_update_while_one_runs(llm: Any, trainer: WholeTrainer, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.prepare()
    entered, go_on = threading.Event(), threading.Event()
    write = InPlaceWriter.write

    def slow(self: InPlaceWriter, reader: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        write(self, reader)

    info = trainer.publish("first")
    failed: list[BaseException] = []

    def first() -> None:
        try:
            trainer.client.update(info)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(InPlaceWriter, "write", slow)
        thread = threading.Thread(target=first)
        thread.start()
        assert entered.wait(60)
        status = trainer.client.status()[0]
        assert status.state == "receiving"
        with pytest.raises(RefitError, match="while another refit call runs"):
            trainer.client.update(info)
        go_on.set()
        thread.join(60)
    assert not failed
    assert trainer.client.status()[0].version == "first"
    assert one_by_one(llm) == wanted


def test_changed_content_is_found_by_verify(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    trainer.refit("v")
    digests = trainer.client.verify()[0].digests
    assert len(digests) == len(trainer.tensors)
    spoilt = {"0": digests | {"model.layers.1.mlp.gate.weight": "0" * 16}}
    with pytest.raises(RefitError, match=r"model\.layers\.1\.mlp\.gate\.weight"):
        trainer.client.verify(spoilt)
    trainer.client.verify({"0": digests})


def test_verify_names_what_no_refit_hashed(llm: Any, trainer: WholeTrainer, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(live_layout.KNOWN, "UnquantizedLinearMethod")
    with monkeypatch.context() as patch:
        patch.delattr(session, "add_digest")  # nobody asked, so nothing is hashed
        trainer.refit("not hashed")
    (reply,) = trainer.client.verify()
    name = "model.layers.1.self_attn.o_proj.weight"
    assert name in reply.unhashed
    assert not set(reply.unhashed) & set(reply.digests)
    assert set(reply.unhashed) | set(reply.digests) == set(trainer.tensors)
    with pytest.raises(VerifyError, match=rf"vLLM's own reload(.|\n)*{name}(.|\n)*hash_reloaded=True"):
        trainer.client.verify({"0": reply.digests | dict.fromkeys(reply.unhashed, "0" * 16)})
    trainer.client.update(trainer.publish("hashed", hash_reloaded=True))
    (reply,) = trainer.client.verify()
    assert (set(reply.digests), reply.unhashed) == (set(trainer.tensors), [])
    trainer.client.verify({"0": reply.digests})
    assert one_by_one(llm) == wanted


def test_a_sample_is_checked_before_the_commit(
    llm: Any, trainer: WholeTrainer, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.prepare()
    (report,) = trainer.client.update(trainer.publish("checked", sample=16))
    assert report.sampled == 16
    assert one_by_one(llm) == wanted

    def wrong(self: InPlaceWriter, reader: Any) -> None:
        torch._foreach_zero_(self._targets)

    with monkeypatch.context() as patch:
        patch.setattr(InPlaceWriter, "write", wrong)
        with pytest.raises(RefitError, match="memory differs from its source"):
            trainer.client.update(trainer.publish("wrong", sample=16))
    assert trainer.client.status()[0].state == "torn"
    check_recovers(llm, trainer, wanted)


def test_abort_is_idempotent_and_keeps_the_version(llm: Any, trainer: WholeTrainer, wanted: Any) -> None:
    trainer.refit("kept")
    for _ in range(2):
        status = trainer.client.abort()[0]
        assert (status.state, status.version) == ("unprepared", "kept")
    assert one_by_one(llm) == wanted


def test_a_hundred_refits_hold_no_memory(llm: Any, trainer: WholeTrainer) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/refit-")

    trainer.refit("warm")
    start = time.monotonic()
    for i in range(100):
        trainer.client.update(trainer.publish(f"v{i}"))
        assert time.monotonic() - start < 300
    assert mapped() <= 3, "the publisher's and the reader's mappings of the last segment, and no more"
