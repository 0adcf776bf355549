"""What captured graphs read beside parameters stays at its address through vLLM's own reloads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm_refit_ext.receiver.anchors import Anchors


def layer() -> nn.Module:
    """A layer as a kernel's post-load step leaves it: a parameter, and a workspace hung beside it."""
    made = nn.Linear(4, 4)
    made.workspace = torch.zeros(8, dtype=torch.int32)  # a plain attribute: neither parameter nor buffer
    return made


def test_a_replaced_tensor_goes_back_to_its_first_memory():
    model = nn.Sequential(layer(), layer())
    anchors = Anchors("cpu")
    first = model[1].workspace
    assert anchors.hold(model) == []
    for value in (3, 4):
        model[1].workspace = torch.full((8,), value, dtype=torch.int32)
        assert anchors.hold(model) == ["1.workspace"]
        assert model[1].workspace is first
        assert first.tolist() == [value] * 8
    assert anchors.hold(model) == []


def test_the_first_memory_lives_until_it_is_restored():
    """Between the reload and the next call nothing else may be given the memory that a graph still reads."""
    import weakref

    model = nn.Sequential(layer())
    anchors = Anchors("cpu")
    anchors.hold(model)
    alive = weakref.ref(model[0].workspace)
    model[0].workspace = torch.zeros(8, dtype=torch.int32)
    assert alive() is not None


@pytest.mark.parametrize("other", [torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)])
def test_another_shape_or_dtype_is_left_alone(other):
    model = nn.Sequential(layer())
    anchors = Anchors("cpu")
    anchors.hold(model)
    model[0].workspace = other
    assert anchors.hold(model) == []
    assert model[0].workspace is other


def test_parameters_and_other_devices_are_not_its_business():
    model = nn.Sequential(layer())
    anchors = Anchors("cuda")
    anchors.hold(model)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    model[0].workspace = torch.ones(8, dtype=torch.int32)
    assert anchors.hold(model) == []
    assert model[0].workspace.tolist() == [1] * 8
