"""What a recipe means for the sender, and that no setting of a recipe is without a reader."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from megatron_sender import config
from megatron_sender.config_load import find_recipes, load_recipe
from megatron_sender.config_sender import sender_config, wire_name
from vllm_refit_ext.core.messages import WireName

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [load_recipe(file) for file in find_recipes(ROOT / "examples" / "recipes")]
PARTS = [part for part in vars(config).values() if isinstance(part, type) and issubclass(part, config.Part)]


@pytest.mark.parametrize(
    ("wire", "mode", "name"),
    [
        ("ipc", None, "ipc"),
        ("ipc", "direct", "ipc"),
        ("ipc", "staged", "ring"),
        ("shm", None, "shm"),
        ("shm", "staged", "shm"),
        ("collective", None, "collective"),
        ("collective", "staged", "collective"),
    ],
)
def test_wire_and_mode_name_the_senders_wire(wire, mode, name):
    assert wire_name(config.Refit(placement="colocated", wire=wire, mode=mode)) == name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_shipped_recipe_becomes_a_sender_configuration(recipe):
    found = sender_config(recipe)
    assert found.wire in get_args(WireName)
    assert (found.bucket_bytes, found.deadline_s) == (recipe.refit.bucket_bytes, recipe.refit.deadline_s)
    assert (found.caches, found.prequantize) == (recipe.refit.caches, recipe.refit.prequantize)


def test_what_a_recipe_says_reaches_the_sender():
    refit = config.Refit(
        placement="disaggregated", wire="collective", bucket_bytes=8192, prequantize=True, caches="keep", deadline_s=7.0
    )
    recipe = msgspec.structs.replace(RECIPES[0], refit=refit)
    found = sender_config(recipe, unused=["mtp.0"], resident=True)
    assert (found.wire, found.bucket_bytes, found.prequantize, found.caches) == ("collective", 8192, True, "keep")
    assert (found.deadline_s, found.unused, found.resident) == (7.0, ("mtp.0",), True)


def readers() -> set[str]:
    """Names of the attributes that the preflight, the plan and the sender's settings read."""
    files = [*(ROOT / "megatron_sender").glob("*.py"), *(ROOT / "vllm_refit_ext" / "tools").glob("plan*.py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_setting_is_read(part):
    # For people: a recipe's summary, and a format that has one value.
    shown = {"summary"} if part is config.Recipe else {"format"} if part is config.Quantization else set()
    assert {field.name for field in msgspec.structs.fields(part)} - shown - readers() == set()
