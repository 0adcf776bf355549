"""What planning puts in the place of a running job is gone afterwards, and refuses to be run."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import types

import pytest
import torch

from megatron_sender.bridge import known_missing
from megatron_sender.local_hybrid import GatedNorm, WholeLinear
from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.stand_ins import Members, quiet, swap
from vllm_refit_ext.kernels.meta import LargeOnMeta


def test_a_swap_is_undone_for_own_and_for_inherited_attributes():
    class Base:
        there = 1

    class Child(Base):
        own = 2

    with contextlib.ExitStack() as stack:
        swap(stack, Child, "own", 20)
        swap(stack, Child, "there", 10)
        swap(stack, Child, "new", 30)
        assert (Child.own, Child.there, Child.new) == (20, 10, 30)
    assert (Child.own, Child.there) == (2, 1)
    assert set(vars(Child)) & {"there", "new"} == set()


def test_a_swap_is_undone_after_an_error():
    module = types.ModuleType("m")
    module.answer = 1

    def fail() -> None:
        with contextlib.ExitStack() as stack:
            swap(stack, module, "answer", 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert module.answer == 1


def test_silence_inside_silence_ends_with_the_outer_one():
    before = logging.root.manager.disable
    with quiet(logging.ERROR):
        with quiet():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == logging.ERROR
    assert logging.root.manager.disable == before


def test_only_large_tensors_lose_their_storage():
    with LargeOnMeta(8):
        assert torch.empty(7).device.type == "cpu"
        assert torch.zeros((2, 4)).device.type == "meta"
        assert torch.ones(size=(8,)).device.type == "meta"
        assert torch.empty(8, device="cpu").device.type == "cpu"
    with LargeOnMeta(8, placed=True):
        assert torch.empty(8, device="cpu").device.type == "meta"
    assert torch.empty(8).device.type == "cpu"


def test_a_group_knows_its_place():
    group = Members(4, 3)
    assert (group.size(), group.rank()) == (4, 3)


def test_modules_to_plan_with_hold_parameters_and_refuse_to_compute():
    class Config:
        params_dtype = torch.bfloat16

    norm = GatedNorm(16, dtype=torch.bfloat16, eps=1e-5, group_size=8, norm_before_gate=False, device="cpu")
    linear = WholeLinear(16, 4, config=Config, parallel_mode="duplicated", bias=True, skip_bias_add=False)
    assert {n: (tuple(p.shape), p.dtype) for n, p in norm.named_parameters()} == {"weight": ((16,), torch.bfloat16)}
    shapes = {n: (tuple(p.shape), p.dtype) for n, p in linear.named_parameters()}
    assert shapes == {"weight": ((4, 16), torch.bfloat16), "bias": ((4,), torch.bfloat16)}
    for module in (norm, linear):
        with pytest.raises(ConfigError, match="can't compute"):
            module(torch.zeros(16))
    with pytest.raises(ConfigError, match="split linear"):
        WholeLinear(16, 4, config=Config, parallel_mode="column")


def test_a_missing_package_stays_missing_and_an_installed_one_installed():
    name = "no_such_package_anywhere"
    with known_missing(name):
        with pytest.raises(ImportError):
            importlib.import_module(f"{name}.part")
        with known_missing(name):
            pass
        with pytest.raises(ImportError):
            importlib.import_module(name)
    assert name not in sys.modules
    with known_missing("numpy"), known_missing("colorsys"):
        assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    assert sys.modules["numpy"] is not None
