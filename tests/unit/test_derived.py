"""What a commit puts back after a deep sleep, and what it must leave alone."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from vllm_refit_ext.engine.derived import Derived, constants


def layer() -> nn.Module:
    """A layer of experts as vLLM's own reload leaves it: a workspace, and the kernel's scales in memory of their own."""
    made = nn.Linear(4, 4)
    made.workspace = torch.zeros(8, dtype=torch.int32)
    made.kernel_scales = torch.ones(4, dtype=torch.uint8)
    return made


def test_what_the_writer_fills_is_no_constant():
    model = nn.Sequential(layer())
    scales = model[0].kernel_scales
    saved = constants(model, {scales.untyped_storage().data_ptr()}, "cpu")
    assert [tensor.data_ptr() for tensor, _ in saved] == [model[0].workspace.data_ptr()]
    assert len(constants(model, set(), "cpu")) == 2


def test_a_refresh_keeps_what_was_written(monkeypatch):
    """An engine with sleep mode: the workspace is zero again, the written scales stay."""
    import vllm_refit_ext.engine.derived as room

    real = room.constants
    monkeypatch.setattr(room, "constants", lambda model, mine: real(model, mine, "cpu"))
    model = nn.Sequential(layer())
    config = SimpleNamespace(dtype=torch.float32, enable_sleep_mode=True)
    view = SimpleNamespace(model=model, vllm_config=SimpleNamespace(model_config=config))
    derived = Derived(view, [model[0].weight, model[0].kernel_scales])
    model[0].workspace.fill_(7)
    model[0].kernel_scales.fill_(9)
    derived.refresh()
    assert model[0].workspace.tolist() == [0] * 8
    assert model[0].kernel_scales.tolist() == [9] * 4
