"""Routes and inventory of a running engine, whose parameters its kernels have packed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.routes_support import Entries, checkpoint_entries, config
from tests.support.engines import choose_layouts
from tests.support.inventory import inventory
from vllm_refit_ext.core.errors import RouteError
from vllm_refit_ext.engine.offline import engine_routes
from vllm_refit_ext.engine.record import record_routes

pytestmark = pytest.mark.engine


def pack_linears(patch: pytest.MonkeyPatch) -> None:
    """Have this process's vLLM pack every linear and free its parameter, whatever the CPU: oneDNN's primitive needs AVX-512."""
    import vllm.model_executor.layers.utils as layer_utils
    from torch.nn.functional import linear
    from vllm import _custom_ops as ops

    patch.setattr(layer_utils, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    patch.setattr(ops, "_supports_onednn", True)
    patch.setattr(ops, "create_onednn_mm", lambda transposed, sizes: transposed.t())
    patch.setattr(ops, "onednn_mm", lambda weight, x, bias: linear(x, weight, bias))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The worker of a tiny Qwen3-MoE engine in this process."""
    folder: Path = tmp_path_factory.mktemp("model")
    config("qwen3-moe").save_pretrained(folder)
    saved = dict(os.environ)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    patch = pytest.MonkeyPatch()
    try:
        from vllm import LLM

        choose_layouts("")
        pack_linears(patch)
        llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=2,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
        )
        yield llm.llm_engine.model_executor.driver_worker.worker
        llm.llm_engine.engine_core.shutdown()
    finally:
        patch.undo()
        os.environ.clear()
        os.environ.update(saved)


@pytest.fixture(scope="module")
def entries() -> Entries:
    return checkpoint_entries(config("qwen3-moe"))


def test_a_processed_engine_has_the_routes_of_its_parameters_as_created(worker: Any, entries: Entries) -> None:
    model = worker.model_runner.model
    assert model.model.layers[0].self_attn.qkv_proj.weight.numel() == 0
    live = record_routes(model, entries, rank=0, vllm_config=worker.vllm_config)
    offline = engine_routes(config("qwen3-moe"), entries)
    assert live.placements.buffers == offline.placements.buffers
    assert list(live.placements.rows()) == list(offline.placements.rows())
    assert (live.computed, live.dropped, live.unwritten) == ({}, {}, {})


@pytest.mark.parametrize("refused", [False, True])
def test_recording_leaves_every_live_tensor_in_place(worker: Any, entries: Entries, refused: bool) -> None:
    model = worker.model_runner.model
    objects = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    before = inventory(model)
    if refused:
        with pytest.raises(RouteError, match="no_such_layer"):
            record_routes(model, {**entries, "model.no_such_layer.weight": ((4,), "bfloat16")}, rank=0)
    else:
        record_routes(model, entries, rank=0)
    assert inventory(model) == before
    assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == objects


def test_the_inventory_names_what_is_derived_from_parameters(worker: Any) -> None:
    held = {entry.name: entry for entry in inventory(worker.model_runner.model)}
    assert {entry.kind for entry in held.values()} == {"parameter", "buffer", "derived", "float"}
    attention = "model.layers.0.self_attn.attn"
    assert held[f"{attention}._k_scale"].kind == "buffer"
    assert held[f"{attention}._k_scale_float"].value == 1.0
    assert not [name for name in held if name.endswith("kv_cache")]
