"""Whatever is written into a configuration, the answer is a recipe or a ConfigError that names settings."""

import copy
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sender import preflight
from megatron_sender.config_load import find_recipes, load_recipe
from megatron_sender.preflight import check_nccl_reshard_refit_support, check_refit_support
from tests.unit.test_preflight_reference import VALID
from vllm_refit_ext.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [msgspec.to_builtins(load_recipe(path)) for path in find_recipes(ROOT / "examples" / "recipes")]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["mxfp8", "float16", "float32", "ipc", "shm", "collective", "colocated", "direct", "marlin", "cpu", "Et|t*60L"]
    ),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 64, 94, 128, 256])


def places(value, path=()):
    """Every place in nested data, as a way of keys and indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def spoil(draw, data, *, plausible):
    for _ in range(draw(st.integers(1, 4))):
        ways = [way for way in places(data) if not plausible or isinstance(read(data, way), int)]
        if not ways:  # all of it was deleted
            break
        *way, last = draw(st.sampled_from(ways))
        at = read(data, way)
        action = "set" if plausible else draw(st.sampled_from(["set", "set", "delete", "rename", "add"]))
        value = draw(SIZES if plausible else VALUES)
        if plausible and isinstance(at[last], bool):
            value = not at[last]
        if action == "set":
            at[last] = value
        elif action == "delete":
            del at[last]
        elif isinstance(at, dict):
            at[draw(st.text(max_size=6))] = at.pop(last) if action == "rename" else value
    return data


def read(data, way):
    for key in way:
        data = data[key]
    return data


def outcome(check, config):
    """What `check` returns, and the problems of its ConfigError; any other exception comes through."""
    try:
        return check(config), []
    except ConfigError as error:
        return None, error.problems


@st.composite
def spoilt_recipes(draw, *, plausible):
    return spoil(draw, copy.deepcopy(draw(st.sampled_from(RECIPES))), plausible=plausible)


@pytest.mark.parametrize("plausible", [False, True])
def test_a_recipe_or_a_config_error(plausible, monkeypatch):
    """Of the rules by hand: the planner is asked where Megatron and vLLM are installed."""
    monkeypatch.setattr(preflight, "PLANNER_NEEDS", ("not_installed",))
    outcomes = {"accepted": 0, "refused": 0}

    @settings(max_examples=120, deadline=None)
    @given(spoilt_recipes(plausible=plausible))
    def attempt(data):
        before = repr(data)
        recipe, problems = outcome(check_refit_support, data)
        outcomes["refused" if recipe is None else "accepted"] += 1
        assert (recipe is None) == bool(problems)
        for problem in problems:
            assert problem.where
            assert problem.what
            assert problem.got or problem.wanted
        if recipe is not None:
            plain = {name: value for name, value in msgspec.to_builtins(recipe).items() if name != "unchecked"}
            assert check_refit_support(plain) == recipe
        assert repr(data) == before

    attempt()
    assert outcomes["refused"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_reference_systems_configuration(data):
    config = spoil(data.draw, copy.deepcopy(VALID), plausible=False)
    _, problems = outcome(check_nccl_reshard_refit_support, config)
    assert all(problem.where.startswith("policy") for problem in problems)
