"""Trainers and plans without a GPU: what is reported for a rank is what that rank would hold, and shipped recipes plan at full
size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import build_megatron, save_model

pytestmark = pytest.mark.engine

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
GEOMETRIES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp2-dp2": (4, "float32", {"tp": 2}),
    "ep4-bf16": (4, "bfloat16", {"ep": 4}),
    "tp2-ep2-pp2": (4, "float32", {"tp": 2, "ep": 2, "pp": 2}),
    "ep2-etp2": (4, "float32", {"tp": 2, "ep": 2, "etp": 2}),
}
"""Name -> (ranks, type of the stored parameters, how the model is cut)."""
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "ME*-EM",
    "hidden_size": 256,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_latent_size": 64,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 160,
}
"""What makes Nemotron-3 Super tiny."""


def held(folder: str, dtype: str, geometry: dict[str, Any]) -> bytes:
    """The source map of a live rank, packed."""
    import torch.distributed as dist

    from megatron_sender.source import source_map
    from vllm_refit_ext.core.table import pack_placements

    bridge, chunks = build_megatron(folder, dtype=dtype, **geometry)
    return msgspec.msgpack.encode(pack_placements(source_map(chunks, bridge, rank=dist.get_rank()).placements))


def offered(config: dict[str, Any], world: int, dtype: str, geometry: dict[str, Any]) -> Any:
    """What the offline trainer says that all ranks hold."""
    from megatron_sender.config import Engine, Model, Parallelism, Recipe, Refit, Trainer
    from megatron_sender.offline import trainer_placements

    recipe = Recipe(
        name="tiny",
        model=Model(name="tiny", hf_config=config),
        trainer=Trainer(world_size=world, parallelism=Parallelism(**geometry), dtype=dtype),  # type: ignore[arg-type]
        engines=[Engine()],
        refit=Refit(placement="disaggregated", wire="collective"),
    )
    return trainer_placements(recipe)


def report(folder: str, world: int, dtype: str, geometry: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The rows that the offline trainer gives for all ranks."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return rows(offered(config, world, dtype, geometry).sources)


def hybrid(geometry: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name -> (shape, dtype) of what a hybrid trainer of four ranks offers. Raises PlanError if a part of it is on no rank."""
    from vllm_refit_ext.core.manifest import whole_tensors
    from vllm_refit_ext.core.plan import build_plan

    config = json.loads((RECIPES / "models" / "nemotron-3-super.json").read_text()) | HYBRID
    found = offered(config, 4, "bfloat16", geometry)
    build_plan(found.manifest, found.sources, whole_tensors(found.manifest))
    return {name: (spec.shape, spec.dtype) for name, spec in found.manifest.tensors.items()}


def published() -> dict[str, tuple[int, ...]]:
    """Name -> shape in the checkpoint of the same model, from transformers. It stacks the experts, names the whole otherwise, and
    builds no prediction layers.
    """
    import torch
    import transformers

    config = json.loads((RECIPES / "models" / "nemotron-3-super.json").read_text()) | HYBRID
    built = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    found = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.", "backbone.", 1)
        if ".experts." in name and tensor.ndim == 3:
            head, _, last = name.rpartition(".experts.")
            found |= {f"{head}.experts.{e}.{last}.weight": tuple(tensor.shape[1:]) for e in range(tensor.shape[0])}
        else:
            found[name] = tuple(tensor.shape)
    return found


def rows(table: Any) -> list[tuple[Any, ...]]:
    """Rows by rank and name, independent of the order of tables."""
    found = []
    for r in table.rows():
        b = table.buffers[r.buffer]
        n = next((i for i in range(len(r.lo), 0, -1) if (r.lo[i - 1], r.hi[i - 1], r.strides[i - 1]) != (0, 1, 0)), 0)
        found.append((b.rank, r.tensor, r.lo[:n], r.hi[:n], r.offset, r.strides[:n], b.name, b.dtype, b.shape))
    return sorted(found, key=repr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_rank_is_reported_what_it_would_hold(folder: Path, name: str) -> None:
    from vllm_refit_ext.core.placement import concatenate
    from vllm_refit_ext.core.table import PackedPlacements, unpack_placements

    world, dtype, geometry = GEOMETRIES[name]
    live = run_ranks(held, world, str(folder), dtype, geometry, timeout=240)
    tables = [unpack_placements(msgspec.msgpack.decode(raw, type=PackedPlacements)) for raw in live]
    offline = run_ranks(report, 1, str(folder), world, dtype, geometry, timeout=240, init_process_group=False)[0]
    assert offline == rows(concatenate(tables))


def test_context_parallel_ranks_are_reported_the_same_as_replicas(folder: Path) -> None:
    """Megatron builds its own attention for one context parallel rank alone; the ranks' numbers must come out right anyway."""
    one, other = (
        run_ranks(report, 1, str(folder), 4, "float32", geometry, timeout=240, init_process_group=False)[0]
        for geometry in ({"tp": 2, "cp": 2}, {"tp": 2})
    )
    assert one == other


@pytest.mark.parametrize("geometry", [{"tp": 2, "ep": 2}, {"ep": 4}, {"tp": 2, "pp": 2, "ep": 2}], ids=str)
def test_a_hybrid_trainer_offers_the_checkpoint(geometry: dict[str, Any]) -> None:
    """Mamba, attention, dense and latent expert layers, though neither mamba_ssm nor Transformer Engine is installed here."""
    found = run_ranks(hybrid, 1, geometry, timeout=240, init_process_group=False)[0]
    assert {name: shape for name, (shape, _) in found.items() if not name.startswith("mtp.")} == published()
    assert {dtype for name, (_, dtype) in found.items() if "e_score_correction_bias" not in name} == {"bfloat16"}
    predicting = {name.removeprefix("mtp.layers.") for name in found if name.startswith("mtp.")}
    assert {"0.eh_proj.weight", "0.mixer.q_proj.weight", "0.norm.weight", "1.mixer.experts.7.up_proj.weight"} <= predicting


def refused(geometry: dict[str, Any]) -> str:
    from vllm_refit_ext.core.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        hybrid(geometry)
    return str(caught.value)


def test_a_trainer_that_megatron_refuses_is_one_clear_error() -> None:
    said = run_ranks(refused, 1, {"pp": 4}, timeout=240, init_process_group=False)[0]
    assert "Megatron refuses to build this trainer" in said
    assert "evenly divisible by pipeline-model-parallel-size (4)" in said


def plan(path: str) -> dict[str, Any]:
    from vllm_refit_ext.tools.plan_command import plan_recipe

    return dict(msgspec.to_builtins(plan_recipe(Path(path))))


def check(found: dict[str, Any]) -> None:
    assert found["nbytes"] == sum(found["sent"]) == sum(found["received"]) == sum(e["nbytes"] for e in found["edges"])
    assert found["nbytes"] == sum(p["nbytes"] for p in found["paths"])
    assert all(n > 0 for n in found["received"]), "every engine rank needs something"
    across = sum(c["nbytes"] for c in found["crossings"] if c["link"] == "between hosts")
    assert found["nbytes"] == sum(c["nbytes"] for c in found["crossings"])
    assert found["crossing_hosts"] == pytest.approx(across / found["nbytes"])
    assert found["floor"]["seconds"] > 0
    assert found["floor"]["seconds"] == pytest.approx(sum(p["seconds"] for p in found["floor"]["parts"]))
    assert len(found["unread"]) == sum(p["tensors"] for p in found["paths"] if not p["nbytes"])


def test_a_dense_recipe_plans_at_full_size() -> None:
    path = RECIPES / "qwen3-32b-mxfp8-colocated.yaml"
    found = run_ranks(plan, 1, str(path), timeout=500, init_process_group=False)[0]
    check(found)
    assert (found["trainers"], found["engines"], found["wire"]) == (16, 16, "nixl")
    # To each of eight engines 32.8 billion parameters, 25.2 of them feed-forward that the sender quantises: 33 bytes for 32.
    # Norms alone are on both ranks of an engine.
    feed_forward = 64 * 3 * 5120 * 25600
    assert found["nbytes"] == pytest.approx(8 * (feed_forward * 33 / 32 + 2 * (32.76e9 - feed_forward)), rel=0.002)
    assert found["unread"] == []
    # GPUs 0 to 3 of a host hold one of four pipeline stages, so three quarters of what its engines need lie elsewhere.
    assert found["crossing_hosts"] == pytest.approx(0.75, abs=0.05)


@pytest.mark.long
def test_the_smallest_recipe_plans_at_full_size() -> None:
    found = run_ranks(plan, 1, str(RECIPES / "qwen3-30b-a3b-mxfp8-ep8-to-tp2.yaml"), timeout=500, init_process_group=False)[0]
    check(found)
    assert len(found["edges"]) == 8 * 2
    # 30.5 billion parameters, of which norms and routers alone are on both ranks.
    assert 61.0e9 < found["nbytes"] < 61.2e9
    assert found["received"][0] == found["received"][1]


@pytest.mark.full_size
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_plans_at_full_size(path: Path) -> None:
    check(run_ranks(plan, 1, str(path), timeout=3500, init_process_group=False)[0])
