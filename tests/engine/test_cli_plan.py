"""Trainers and plans without a GPU: what is told for a rank is what that rank would hold, and shipped recipes plan at full
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
GEOMETRIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-dp2": (4, {"tp": 2}),
    "ep4": (4, {"ep": 4}),
    "tp2-ep2-pp2": (4, {"tp": 2, "ep": 2, "pp": 2}),
    "ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}),
}


def held(folder: str, geometry: dict[str, Any]) -> bytes:
    """The source map of a live rank, packed."""
    import torch.distributed as dist

    from megatron_sender.source import source_map
    from vllm_refit_ext.core.table import pack_placements

    bridge, chunks = build_megatron(folder, **geometry)
    return msgspec.msgpack.encode(pack_placements(source_map(chunks, bridge, rank=dist.get_rank()).placements))


def told(folder: str, world: int, geometry: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The rows that the offline trainer gives for all ranks."""
    from megatron_sender.config import Engine, Model, Parallelism, Recipe, Refit, Trainer
    from megatron_sender.offline import trainer_placements

    config = json.loads((Path(folder) / "config.json").read_text())
    recipe = Recipe(
        name="tiny",
        model=Model(name="tiny", hf_config=config),
        trainer=Trainer(world_size=world, parallelism=Parallelism(**geometry), dtype="float32"),
        engines=[Engine()],
        refit=Refit(placement="disaggregated", wire="collective"),
    )
    return rows(trainer_placements(recipe).sources)


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
def test_a_rank_is_told_what_it_would_hold(folder: Path, name: str) -> None:
    from vllm_refit_ext.core.placement import concatenate
    from vllm_refit_ext.core.table import PackedPlacements, unpack_placements

    world, geometry = GEOMETRIES[name]
    live = run_ranks(held, world, str(folder), geometry, timeout=240)
    tables = [unpack_placements(msgspec.msgpack.decode(raw, type=PackedPlacements)) for raw in live]
    offline = run_ranks(told, 1, str(folder), world, geometry, timeout=240, init_process_group=False)[0]
    assert offline == rows(concatenate(tables))


def plan(path: str) -> dict[str, Any]:
    from vllm_refit_ext.cli_plan import plan_recipe

    return dict(msgspec.to_builtins(plan_recipe(Path(path))))


def check(found: dict[str, Any]) -> None:
    assert found["nbytes"] == sum(found["sent"]) == sum(found["received"]) == sum(e["nbytes"] for e in found["edges"])
    assert found["nbytes"] == sum(p["nbytes"] for p in found["paths"])
    assert all(n > 0 for n in found["received"]), "every engine rank needs something"
    assert found["seconds"] is not None
    assert found["seconds"] > 0


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
