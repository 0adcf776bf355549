"""vLLM's private names: which ones the project needs, and that they stand in `engine/` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_refit_ext.engine.needed import NEEDED, lacking

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {"vllm.config", "vllm.distributed", "vllm.exceptions", "vllm.model_executor.models", "vllm"}
"""Modules that vLLM's own documentation names."""
WHERE_THERE = {"vllm.model_executor.layers.quantization.utils.mxfp8_utils": "stored.py"}
"""Module -> file that asks whether it is there. Files that plan without an engine (`offline*`) are no part of a refit either."""
# fmt: off
ATTRIBUTES = (
    "_expert_map", "_map_name", "_weight_update_active", "block_hashes", "cache_salt", "end_layer", "fp8_backend",
    "hf_to_vllm_mapper", "kernel_tensors", "kv_b_proj", "load_numel", "moe_config", "moe_kernel", "moe_quant_config",
    "mxfp8_backend", "process_weights_after_loading", "quant_method", "request_block_hasher", "reset_lora_state",
    "response_mqs", "restore_metadata", "rpc_broadcast_mq", "start_layer", "unquantized_backend", "vllm_config",
    "weight_loader", "weight_loader_numel", "weight_transfer_engine",
)
# fmt: on
"""What vLLM hangs on its workers, engines, requests, layers and quantisation methods, as far as it is touched."""


def product() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("vllm_refit_ext", "megatron_sender"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.relative_to(ROOT), ast.parse(file.read_text())


def names_in(tree: ast.Module) -> Iterator[str]:
    """Every attribute and every text of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of everything taken from vLLM; a module itself has an empty name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "vllm":
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_only_the_engines_room_touches_what_vllm_keeps_to_itself() -> None:
    within: dict[str, set[str]] = {}
    outside = []
    for file, tree in product():
        found = sorted(set(ATTRIBUTES) & set(names_in(tree)))
        if file.parts[:2] == ("vllm_refit_ext", "engine"):
            for name in found:
                within.setdefault(name, set()).add(file.name)
        else:
            outside += [f"{file}: {name}" for name in found]
    assert outside == []
    assert sorted(within) == sorted(ATTRIBUTES), "the list names nothing that is no longer used"


def test_only_the_engines_room_imports_vllm() -> None:
    named = [str(f) for f, tree in product() if "engine" not in f.parts and any(name in NEEDED for name in names_in(tree))]
    assert named == [], "modules of vLLM by name"
    assert [str(f) for f, tree in product() if "engine" not in f.parts and list(imports_of(tree))] == []


def test_the_check_at_start_covers_every_import() -> None:
    unchecked = []
    for file, tree in product():
        for module, name in imports_of(tree) if not file.name.startswith("offline") else ():
            covered = f"{module}.{name}" in NEEDED or any(n.partition(".")[0] == name for n in NEEDED.get(module, ()))
            if not covered and module not in PUBLIC and WHERE_THERE.get(module) != file.name:
                unchecked.append(f"{file}: {module}.{name}")
    assert unchecked == []


@pytest.mark.parametrize("module", NEEDED)
def test_this_vllm_has_them(module: str) -> None:
    pytest.importorskip("vllm", reason="needs a vLLM in this environment")
    assert lacking(module) == []
