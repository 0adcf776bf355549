"""The seam inside one process: the backend `refit` without the extension, and another configured backend that keeps its calls."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from tests.engine.own_extension import MixedExtension, OwnExtension
from tests.support.engines import answers, fresh_answers, open_llm, unmixed
from tests.support.fake_receiver import FakeHandler
from tests.support.seam_cases import pair
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.errors import ConfigError, SessionError, TornError
from vllm_refit_ext.engine import weight_transfer
from vllm_refit_ext.engine.extension import RPCS, missing_rpcs
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.receiver.session import Receiver

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair("qwen3", tmp_path_factory.mktemp("backends"))


@pytest.fixture(scope="module")
def wanted(folders: tuple[Path, Path]) -> list[Any]:
    return [fresh_answers(folder, in_process=True) for folder in folders]


@pytest.fixture(scope="module")
def with_backend(folders: tuple[Path, Path], wanted: list[Any]) -> Iterator[Any]:
    """An engine with the backend `refit` and no extension; made after the fresh ones, as one process holds one engine at a
    time.
    """
    with pytest.MonkeyPatch.context() as patch, unmixed():
        patch.setattr(weight_transfer, "open_handler", FakeHandler)
        with open_llm(folders[0], in_process=True, weight_transfer_config={"backend": "refit"}) as llm:
            yield llm


def update(llm: Any, **info: Any) -> None:
    llm.collective_rpc("update_weights", args=({"wire": "fake", **info},))


def test_backend_alone(with_backend: Any, folders: tuple[Path, Path], wanted: list[Any]) -> None:
    llm = with_backend
    files = [str(folder / "model.safetensors") for folder in folders]
    with pytest.raises(SessionError, match="before prepare_refit_info"):
        update(llm, file=files[1])
    with pytest.raises(ConfigError, match=r"lacks the manifest.*got nothing_known"):
        llm.init_weight_transfer_engine({"init_info": {"nothing_known": 1}})
    with pytest.raises(ConfigError, match="does not fit"):
        llm.init_weight_transfer_engine({"init_info": {"state_dict_info": {"a": 1}, "colour": 2}})
    with pytest.raises(SessionError, match="manifest is empty"):
        llm.init_weight_transfer_engine({"init_info": {"state_dict_info": {}}})
    llm.init_weight_transfer_engine({"init_info": {"state_dict_info": {"a": [[1], "float32"]}}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"wire": "fake", "file": files[1]}})
    llm.finish_weight_update()
    assert answers(llm) == wanted[1]
    update(llm, file=files[0])
    assert answers(llm) == wanted[0]


def test_torn_in_process(with_backend: Any, folders: tuple[Path, Path], wanted: list[Any]) -> None:
    llm = with_backend
    files = [str(folder / "model.safetensors") for folder in folders]
    llm.init_weight_transfer_engine({"init_info": {"state_dict_info": {"a": [[1], "float32"]}}})
    with pytest.raises(TornError, match="torn as the test asked"):
        update(llm, file=files[1], fail="torn")
    for _ in range(2):
        with pytest.raises(TornError, match="mix two versions"):
            answers(llm)
    update(llm, file=files[1])
    assert answers(llm) == wanted[1]


def test_running_requests_are_ended_when_the_engine_tears(
    with_backend: Any, folders: tuple[Path, Path], wanted: list[Any]
) -> None:
    from vllm import SamplingParams

    llm = with_backend
    files = [str(folder / "model.safetensors") for folder in folders]
    llm.init_weight_transfer_engine({"init_info": {"state_dict_info": {"a": [[1], "float32"]}}})
    core = llm.llm_engine
    for name in ("one", "two"):
        core.add_request(name, "Hello refit", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    for _ in range(3):
        core.step()
    with pytest.raises(SessionError, match=r"requests are running.*2 running"):
        update(llm, file=files[1])
    assert core.has_unfinished_requests()
    with pytest.raises(TornError):
        update(llm, file=files[1], fail="torn", caches="keep")
    with pytest.raises(TornError, match="mix two versions"):
        run_out(core)
    assert not core.has_unfinished_requests()
    update(llm, file=files[0])
    assert answers(llm) == wanted[0]


def test_running_requests_start_over_when_asked(with_backend: Any, folders: tuple[Path, Path]) -> None:
    from vllm import SamplingParams

    llm = with_backend
    files = [str(folder / "model.safetensors") for folder in folders]
    llm.init_weight_transfer_engine({"init_info": {"state_dict_info": {"a": [[1], "float32"]}}})
    core = llm.llm_engine
    core.add_request("long", "Hello refit", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        core.step()
    update(llm, file=files[1], caches="reset_running")
    outputs = []
    while core.has_unfinished_requests():
        outputs += core.step()
    assert [len(output.outputs[0].token_ids) for output in outputs if output.finished] == [20]
    # the old weights' blocks are gone: what comes after equals what the new weights say to the same text
    text = outputs[-1].prompt_token_ids + list(outputs[-1].outputs[0].token_ids)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    again = llm.generate([{"prompt_token_ids": text[:-1]}], params, use_tqdm=False)[0].outputs[0].token_ids
    assert list(again) == text[-1:]


def run_out(core: Any) -> None:
    """Step until no request is left."""
    while core.has_unfinished_requests():
        core.step()


class OtherEngine:
    """Stands for a configured backend (nccl needs a GPU): notes the calls that vLLM's worker makes."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, *parts: Any) -> None:
        self.calls: list[str] = []

    def parse_init_info(self, info: Any) -> Any:
        return info

    def init_transfer_engine(self, info: Any) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: Any) -> None:
        self.calls.append("update")
        if info.get("fail"):
            raise RuntimeError("the other backend failed")

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def set_weight_update_target(self, *parts: Any) -> None:
        self.calls.append("target")

    def reset_weight_update_target(self) -> None:
        pass

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_another_backend_keeps_its_calls(folders: tuple[Path, Path], wanted: list[Any]) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    files = [str(folder / "model.safetensors") for folder in folders]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WeightTransferEngineFactory._registry, "other", lambda: OtherEngine)
        with open_llm(folders[0], in_process=True, weight_transfer_config={"backend": "other"}) as llm:
            worker = llm.llm_engine.model_executor.driver_worker.worker
            other = worker.weight_transfer_engine
            handler = FakeHandler(EngineRank.of_worker(worker))
            handler.prepare({"a": [[1], "float32"]})
            weight_transfer.install(worker, handler)
            llm.collective_rpc("init_weight_transfer_engine", args=({"rank_offset": 1},))
            llm.collective_rpc("start_weight_update")
            # ours in the middle of a session whose start the other backend has not seen yet
            update(llm, file=files[1])
            assert other.calls == ["init"]
            llm.collective_rpc("update_weights", args=({"names": []},))
            llm.collective_rpc("update_weights", args=({"names": []},))
            llm.collective_rpc("finish_weight_update")
            assert other.calls == ["init", "start", "update", "update", "finish"]
            with pytest.raises(RuntimeError, match="start_weight_update must be called"):
                llm.collective_rpc("update_weights", args=({"names": []},))
            llm.collective_rpc("start_weight_update")
            with pytest.raises(RuntimeError, match="the other backend failed"):
                llm.collective_rpc("update_weights", args=({"fail": True},))
            llm.collective_rpc("start_weight_update")
            with pytest.raises(SessionError, match="while a weight update is active"):
                llm.collective_rpc("start_weight_update")
            llm.collective_rpc("finish_weight_update")
            assert worker.weight_transfer_engine is other
            assert answers(llm) == wanted[1]


@pytest.mark.parametrize(("extension", "backend"), [("OwnExtension", "refit"), ("MixedExtension", None)])
def test_our_client_drives_an_engine_with_an_extension_of_the_users_own(
    folders: tuple[Path, Path], wanted: list[Any], monkeypatch: pytest.MonkeyPatch, extension: str, backend: str | None
) -> None:
    """Beside the backend `refit`, or mixed with ours."""
    monkeypatch.setattr(weight_transfer, "open_handler", Receiver)
    more = {"weight_transfer_config": {"backend": backend}} if backend else {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("VLLM_REFIT_METRICS_PORT", str(port))
    with open_llm(folders[0], extension=f"tests.engine.own_extension.{extension}", **more) as llm:
        client = LLMClient(llm)
        assert client.status()[0].state == "unprepared"
        trainer = WholeTrainer(client, folders[1])
        try:
            trainer.refit("by our client")
        finally:
            trainer.close()
        assert client.status()[0].version == "by our client"
        assert set(client.verify()[0].unhashed) <= set(trainer.tensors)
        assert llm.collective_rpc("own") == ["mine"]
        shown = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        assert 'refit_engine_total{rank="0",result="ok"} 1.0' in shown
        assert answers(llm) == wanted[1]


def test_methods_with_the_names_of_ours_are_refused() -> None:
    class Clash(OwnExtension):
        def refit_status(self) -> str:
            return "mine"

    with pytest.raises(ConfigError, match=r"Clash\.refit_status.*derive that class"):
        missing_rpcs(type("Worker", (Clash,), {}))
    assert missing_rpcs(type("Worker", (MixedExtension,), {})) == {}
    assert set(missing_rpcs(type("Worker", (OwnExtension,), {}))) == set(RPCS)


def test_backend_outside_of_a_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside of a vLLM worker"):
        weight_transfer.RefitEngine(None, None, None, None)


def test_registering_twice_is_harmless() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore

    from vllm_refit_ext import plugin

    before = EngineCore.collective_rpc
    plugin.register()
    plugin.register()
    assert EngineCore.collective_rpc is before
    assert "refit" in WeightTransferEngineFactory._registry
    assert hasattr(Worker.update_weights, "_refit_native")
