"""The memory stated for vLLM's own reload is what it takes: of one module, no more in later reloads, certain or at most."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.engine.routes_support import DENSE
from tests.support import architectures
from tests.support.architectures import checkpoint, open_engine
from tests.support.engines import open_llm
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.manifest import parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.engine.reload import reload_weights
from vllm_refit_ext.receiver.peak import reload_bytes
from vllm_refit_ext.receiver.targets import build_targets
from vllm_refit_ext.receiver.writers import ReloadWriter

pytestmark = pytest.mark.engine

STOCK, MXFP8 = "vllm_refit_ext.RefitWorkerExtension", "tests.support.mxfp8_cpu.Mxfp8CpuExtension"
WIDE = {**DENSE, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 1024, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "wide": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**WIDE | {"vocab_size": 24000})),
    "moe": ("Qwen3MoeForCausalLM", lambda: transformers.Qwen3MoeConfig(**WIDE, **EXPERTS)),
}
SLACK = 4 << 20
"""Bytes of small blocks, which malloc keeps, and of one kernel's scratch."""


class Sources:
    """A trainer's tensors, in memory that is there before the reload."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._bytes = [t.contiguous().flatten().view(torch.uint8) for t in tensors]

    def memory(self, buffer: int) -> torch.Tensor:
        return self._bytes[buffer]


def resident(key: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def peak(run: Callable[[], object]) -> int:
    """Bytes that `run` takes at most, beyond what the process held."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


@pytest.fixture(scope="module", autouse=True)
def _freed_blocks_go_back_at_once() -> None:
    """malloc would keep those of less than 32 MiB, and peaks would hide in them."""
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD, which also stops it from growing


@pytest.fixture(params=[("wide", STOCK), ("moe", STOCK), ("moe", MXFP8)], ids=["dense", "experts", "experts in MXFP8"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """(an engine's view, the tensors of its checkpoint)."""
    name, extension = request.param
    monkeypatch.setitem(architectures.ALL, name, MODELS[name])
    folder = checkpoint(name, tmp_path, 0)
    coded = {"quantization": "mxfp8", "dtype": "bfloat16"} if extension == MXFP8 else {}
    with open_llm(folder, extension=extension, in_process=True, skip_tokenizer_init=True, max_model_len=64, **coded) as llm:
        dtype = torch.bfloat16 if coded else torch.float32
        tensors = {n: t.to(dtype, copy=True) for n, t in load_file(folder / "model.safetensors").items()}
        yield EngineRank.of_worker(llm.llm_engine.model_executor.driver_worker.worker), tensors


@pytest.mark.long
@torch.no_grad()
def test_a_reload_takes_what_is_stated(opened: Any) -> None:
    view, tensors = opened
    manifest = parse_state_dict_info({n: [list(t.shape), str(t.dtype)] for n, t in tensors.items()}).manifest
    targets = build_targets(view, manifest, 1, refused=dict.fromkeys(tensors, "all by the engine's own reload"))
    assert (targets.writer, targets.problems) == ("reload", [])
    plan = build_plan(manifest, whole_tensors(manifest), targets.placements)
    sources = Sources([tensors[b.name] for b in plan.sources])
    writer = ReloadWriter(plan, lambda feed, names: reload_weights(view, feed, names, targets.reloaded), view.device)
    stated = reload_bytes(view, targets)
    assert max(t.nbytes for t in tensors.values()) < stated.certain <= stated.most < sum(t.nbytes for t in tensors.values())
    for _ in range(3):
        taken = peak(lambda: writer.write(sources))
        print(f"{taken >> 20} MiB taken, {stated.certain >> 20} MiB certain, {stated.most >> 20} MiB at most")
        assert stated.certain - SLACK <= taken <= stated.most + SLACK


def test_a_refit_that_can_not_fit_is_refused_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_refit_ext.receiver import session

    folder = checkpoint("llama", tmp_path, 0)
    with open_engine(folder, STOCK) as llm:
        trainer = WholeTrainer(LLMClient(llm), folder)
        (reply,) = trainer.prepare()
        monkeypatch.setattr(session, "free_bytes", lambda device: 1 << 10)
        with pytest.raises(RefitError, match="more memory beside the weights than is free"):
            trainer.client.update(trainer.publish("never"))
        assert trainer.client.status()[0].state == "ready"
        monkeypatch.setattr(session, "free_bytes", lambda device: reply.extra_bytes - 1)
        trainer.client.update(trainer.publish("what is not certain refuses nothing"))
        trainer.close()
