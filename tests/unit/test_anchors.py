"""What captured graphs read beside parameters stays at its address through vLLM's own reloads."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.support.inventory import inventory
from vllm_refit_ext.engine.anchors import Anchors
from vllm_refit_ext.engine.inventory import everything


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


def test_parameters_and_what_no_graph_reads_are_not_its_business():
    model = nn.Sequential(layer())
    anchors = Anchors("cuda")
    anchors.hold(model)
    replaced = model[0].weight = nn.Parameter(torch.ones(4, 4))
    pointer = model[0].workspace = torch.ones(8, dtype=torch.int32)
    assert anchors.hold(model) == []
    assert model[0].weight is replaced
    assert model[0].workspace is pointer


def test_a_parameter_that_a_config_refers_to_is_referred_to_again_on_every_device():
    model = nn.Sequential(layer())
    model[0].quant_method = Method(model[0].weight)
    anchors = Anchors("cuda")
    anchors.hold(model)
    model[0].quant_method = Method(torch.zeros(4, 4))
    anchors.hold(model)
    assert model[0].quant_method.kernel.config.scale is model[0].weight
    assert model[0].quant_method.partial.keywords["other"] is model[0].weight


@dataclass(frozen=True)
class Config:
    """What a kernel's config is: frozen, and in the engine first the layer's own tensor, after a reload a temporary one."""

    scale: torch.Tensor


class Kernel:
    """A modular kernel: callable, with a config and a workspace of its own."""

    __slots__ = ("config", "tables", "workspace")

    def __init__(self, scale: torch.Tensor) -> None:
        self.config, self.workspace, self.tables = Config(scale), torch.zeros(8), [torch.ones(2)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale


class Outside(nn.Module):
    """A module that its model does not list, since it hangs on a quantisation method."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale, persistent=False)


class Method:
    """A quantisation method, made anew as every post-load step makes it."""

    def __init__(self, scale: torch.Tensor) -> None:
        bound = scale.clone()
        self.kernel = Kernel(scale)
        self.partial = functools.partial(torch.mul, other=scale)
        self.closure = lambda x: x * bound
        self.method = self.kernel.__call__
        self.outside = Outside(scale)


REACHED = (
    "quant_method.kernel.config.scale",
    "quant_method.kernel.workspace",
    "quant_method.kernel.tables[0]",
    "quant_method.partial.keywords['other']",
    "quant_method.closure.bound",
    "quant_method.outside.scale",
)


def test_what_hangs_on_callables_and_nested_kernels_keeps_its_memory():
    model = nn.Sequential(layer())
    scale = model[0].scale = nn.Parameter(torch.ones(4), requires_grad=False)
    model[0].quant_method = Method(scale)
    found = {f.name: f.value for f in everything(model)}
    first = {name: found[f"0.{name}"] for name in REACHED}
    assert first["quant_method.kernel.config.scale"] is scale
    anchors = Anchors("cpu")
    anchors.hold(model)
    with torch.no_grad():
        scale.fill_(3)  # a reload writes the parameter and leaves the method with the tensors that it made on the way
    model[0].quant_method = Method(torch.full((4,), 3.0))
    anchors.hold(model)
    found = {f.name: f.value for f in everything(model)}
    for name in REACHED:
        assert found[f"0.{name}"] is first[name], name
    method = model[0].quant_method
    with torch.no_grad():
        scale.fill_(5)  # a refit in place
    for call in (method.kernel, method.partial, method.method):
        assert call(torch.ones(4)).tolist() == [5.0] * 4
    assert method.closure(torch.ones(4)).tolist() == [3.0] * 4


def test_the_inventory_lists_tensors_behind_callables():
    model = nn.Sequential(layer())
    model[0].quant_method = Method(torch.ones(4))
    names = {entry.name for entry in inventory(model) if entry.kind == "derived"}
    assert {f"0.{name}" for name in REACHED} - names == {
        "0.quant_method.partial.keywords['other']",
        "0.quant_method.outside.scale",
    }, "the same tensor is listed once"
