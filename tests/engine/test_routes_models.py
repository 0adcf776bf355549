"""Recorded moves against vLLM's own loaders: many architectures, every rank, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.routes_support import CONFIGS, MOE, Entries, checkpoint_entries, config, entries_of, random_tensors, replay
from vllm_refit_ext.engine.offline import as_worker, engine_config, engine_routes
from vllm_refit_ext.engine.record import record_routes
from vllm_refit_ext.receiver.routes.table import Routes

pytestmark = pytest.mark.engine

PARALLEL = [(name, tp, ep) for name in CONFIGS for tp, ep in ((1, False), (2, False), (2, True)) if not ep or name in MOE]

# Mamba's A is -exp(A_log); a loader makes Phi's lm_head.bias while loading.
COMPUTED = {
    "jamba": {"model.layers.0.mamba.A_log"},
    "nemotron-h": {"backbone.layers.0.mixer.A_log"},
    "granite-hybrid": {"model.layers.0.mamba.A_log"},
    "phi": {"lm_head.bias"},
}


def build(vllm_config: Any) -> nn.Module:
    """vLLM's model in ordinary memory, as it creates it."""
    from vllm.model_executor.model_loader.utils import initialize_model

    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        model: nn.Module = initialize_model(vllm_config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.data for n, t in (*model.named_parameters(), *model.named_buffers())}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def rows(routes: Routes) -> set[Any]:
    table = routes.placements
    return {(r.tensor, table.buffers[r.buffer], r.lo, r.hi, r.offset, r.strides) for r in table.rows()}


@torch.no_grad()
def check_rank(hf_config: Any, entries: Entries, tp: int, ep: bool, rank: int) -> Routes:
    """Load one checkpoint, load another over it, replay the first: every byte of the model must be the first's again."""
    from vllm.config import set_current_vllm_config

    offline = engine_routes(hf_config, entries, tp=tp, ep=ep, rank=rank)
    with engine_config(hf_config, tp=tp, ep=ep) as vllm_config, as_worker(vllm_config, rank):
        model = build(vllm_config)
        routes = record_routes(model, entries, rank=rank, vllm_config=vllm_config)
        assert rows(routes) == rows(offline)
        assert (routes.computed, routes.dropped) == (offline.computed, offline.dropped)
        first, second = random_tensors(entries, 1), random_tensors(entries, 2)
        second |= {name: first[name] for name in routes.computed}
        with set_current_vllm_config(vllm_config):
            model.load_weights((name, t.clone()) for name, t in first.items())
            wanted = {name: t.clone() for name, t in held(model).items()}
            model.load_weights((name, t.clone()) for name, t in second.items())
    memory = {n: t.untyped_storage().data_ptr() for n, t in held(model).items()}
    changed = {memory[n] for n, t in held(model).items() if not torch.equal(as_bytes(t), as_bytes(wanted[n]))}
    assert changed == {memory[b.name] for b in routes.placements.buffers}
    replay(routes, first, held(model))
    for name, tensor in held(model).items():
        assert torch.equal(as_bytes(tensor), as_bytes(wanted[name])), name
    assert not routes.unwritten
    return routes


@pytest.mark.parametrize(("name", "tp", "ep"), PARALLEL, ids=[f"{n}-tp{t}{'-ep' * e}" for n, t, e in PARALLEL])
def test_replay_equals_the_loader_on_every_rank(name: str, tp: int, ep: bool) -> None:
    hf_config = config(name)
    entries = entries_of(name)
    routes = [check_rank(hf_config, entries, tp, ep, rank) for rank in range(tp)]
    used = set().union(*(set(r.placements.names) for r in routes))
    for each in routes:
        assert set(each.computed) == COMPUTED.get(name, set())
        assert set(each.placements.names) | set(each.computed) | set(each.dropped) == set(entries)
    assert used == set(entries) - COMPUTED.get(name, set())


def test_expert_parallel_ranks_drop_the_experts_of_others_by_name() -> None:
    hf_config = config("qwen3-moe")
    entries = checkpoint_entries(hf_config)
    for rank, absent in ((0, range(4, 8)), (1, range(4))):
        routes = engine_routes(hf_config, entries, tp=2, ep=True, rank=rank)
        assert len(routes.dropped) == 4 * 3 * 2
        assert set(routes.dropped.values()) == {f"expert {e} belongs to another expert-parallel rank" for e in absent}


def test_pipeline_stages_drop_the_layers_of_others_by_name() -> None:
    hf_config = config("llama")
    entries = checkpoint_entries(hf_config)
    routes = [engine_routes(hf_config, entries, pp=2, rank=rank) for rank in range(2)]
    assert not set(routes[0].placements.names) & set(routes[1].placements.names)
    assert set(routes[0].placements.names) | set(routes[1].placements.names) == set(entries)
    assert "layer 1 is not among this rank's layers 0..0" in routes[0].dropped.values()


def test_prediction_layers_are_dropped_by_the_target_model() -> None:
    hf_config = config("deepseek-v3")
    hf_config.num_nextn_predict_layers = 1
    entries = checkpoint_entries(hf_config)
    extra = {n.replace("layers.2.", "layers.3."): e for n, e in entries.items() if "layers.2." in n}
    routes = engine_routes(hf_config, {**entries, **extra})
    assert set(routes.dropped) == set(extra)


def test_router_bias_in_float32_is_placed() -> None:
    routes = engine_routes(config("deepseek-v3"), checkpoint_entries(config("deepseek-v3")))
    dtypes = {b.name: b.dtype for b in routes.placements.buffers if "e_score_correction_bias" in b.name}
    assert len(dtypes) == 2
    assert set(dtypes.values()) == {"float32"}


def test_tied_embeddings_are_one_buffer() -> None:
    routes = engine_routes(config("qwen2-tied"), checkpoint_entries(config("qwen2-tied")))
    names = [b.name for b in routes.placements.buffers]
    assert ("lm_head.weight" in names) + ("model.embed_tokens.weight" in names) == 1
    assert "lm_head.weight" in {**routes.aliases, **{b: a for a, b in routes.aliases.items()}}


def test_a_bias_that_one_rank_adds_is_zeros_on_the_others() -> None:
    entries = checkpoint_entries(config("gpt-oss"))
    biases = {n for n in entries if n.endswith("down_proj_bias")}
    routes = [engine_routes(config("gpt-oss"), entries, tp=2, rank=rank) for rank in range(2)]
    assert biases <= set(routes[0].placements.names)
    assert routes[1].dropped == dict.fromkeys(biases, "the loader puts zeros in its place on this rank")


@pytest.fixture
def shared_tables() -> Any:
    from vllm.model_executor.layers import rotary_embedding

    return rotary_embedding._ROPE_DICT


def test_building_on_meta_leaves_nothing_behind_in_the_process(shared_tables: dict[Any, Any]) -> None:
    """vLLM shares rotary tables over models of a process: an engine built later must not find tables without storage."""
    from vllm.distributed import parallel_state

    before, groups = dict(shared_tables), parallel_state._TP
    engine_routes(config("llama"), checkpoint_entries(config("llama")))
    assert dict(shared_tables) == before
    assert parallel_state._TP is groups
