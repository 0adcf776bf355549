"""What ranks do in the tests of the DTensor source: a model with known values in some layout, and every box held to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.sender.dtensor import DTensorSource
from vllm_refit_ext.sender.geometry import shards
from vllm_refit_ext.wires.boxes import as_bytes, box_view

PRELOAD = ("tests.support.dtensor_jobs",)
Box = tuple[str, tuple[int, ...], tuple[int, ...]]


class Block(nn.Module):
    """Two linear layers of sizes that four ranks don't divide, biases, a norm, and a buffer."""

    def __init__(self, rows: int = 10, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, rows)
        self.down = nn.Linear(rows, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("bias", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> [n, 6]."""
        y: torch.Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return y


class Experts(nn.Module):
    """Fused experts, as DTensors over an expert-parallel mesh."""

    def __init__(self, mesh: DeviceMesh, experts: int = 8) -> None:
        super().__init__()
        whole = torch.zeros(experts, 6, 4)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))


def number(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give every element of a whole model a number of its own. Returns the tensors of its state dict."""
    at = 1
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.arange(at, at + tensor.numel()).reshape(tensor.shape))
            at += tensor.numel()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check(source: DTensorSource, values: Mapping[str, torch.Tensor]) -> list[Box]:
    """Hold the memory at every placement to the box of `values` that it says. Returns the boxes."""
    table, found = source.placements, []
    for buffer, tensor in zip(table.buffers, source.tensors, strict=True):
        assert (buffer.shape, buffer.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    for row in table.rows():
        depth = len(source.specs[row.tensor].shape)
        assert source.specs[row.tensor].shape == tuple(values[row.tensor].shape)
        lo, hi = row.lo[:depth], row.hi[:depth]
        memory = source.tensors[row.buffer]
        extent = [b - a for a, b in zip(lo, hi, strict=True)]
        box = box_view(as_bytes(memory), memory.dtype, row.offset, extent, row.strides[:depth])
        wanted = values[row.tensor][tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
        assert torch.equal(box.cpu().double(), wanted.double()), (row, box, wanted)
        found.append((row.tensor, lo, hi))
    return found


def _fsdp(**options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = nn.Sequential(Block(), Block(7))
    values = number(model)
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, values


def _parallel(rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Block(rows)
    values = number(model)
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model, values


def _experts(dim: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = Experts(mesh["ep"])
    whole = torch.arange(8.0 * 24).reshape(8, 6, 4)
    with torch.no_grad():
        model.weight.copy_(distribute_tensor(whole, mesh["ep"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    return model, {"weight": whole}


LAYOUTS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "fsdp": _fsdp,
    "fsdp-offloaded": lambda: _fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp-mixed": lambda: _fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "hsdp": lambda: _fsdp(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))),
    "fsdp-columns": lambda: _fsdp_columns(),
    "tp-fsdp": lambda: _parallel(16),
    "tp-fsdp-13": lambda: _parallel(13),
    "tp-fsdp-14": lambda: _parallel(14),
    "tp-fsdp-1": lambda: _parallel(1),
    "ep-fsdp-0": lambda: _experts(0),
    "ep-fsdp-1": lambda: _experts(1),
}


def _fsdp_columns() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = nn.Sequential(nn.Linear(8, 5, bias=False), nn.Linear(8, 4, bias=False))
    values = number(model)
    fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    return model, values


def layout(name: str) -> list[Box]:
    """The boxes of one layout, each held to its values, before and after an optimizer step."""
    model, values = LAYOUTS[name]()
    source = DTensorSource(model)
    assert "0.scratch" not in source.specs
    boxes = check(source, values)
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                described = (tuple(parameter.shape), tuple(mesh.shape), mesh.get_coordinate(), parameter.placements)
                offline, live = shards(*described), shards(*described, local=parameter._local_tensor.shape)
                assert offline == live, "a description alone says what a rank holds"
            parameter.mul_(2)
    source.refresh()
    parameters = {n for n, _ in model.named_parameters()}
    assert check(source, {n: v * 2 if n in parameters else v for n, v in values.items()}) == boxes
    return boxes


def layouts() -> dict[str, list[Box]]:
    """The boxes of every layout."""
    return {name: layout(name) for name in LAYOUTS}


def distributed(seed: int) -> list[list[Box]]:
    """Tensors in random placements of meshes of one, two and three dimensions."""
    draw, found = random.Random(seed), []
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 1, 2))):
        for _ in range(12):
            shape = tuple(draw.randint(0, 9) for _ in range(draw.randint(1, 3)))
            placements = [draw.choice([Replicate(), Shard(draw.randrange(len(shape)))]) for _ in range(mesh.ndim)]
            if mesh.ndim == 1 and draw.random() < 0.5:
                placements = [_StridedShard(draw.randrange(len(shape)), split_factor=draw.choice([2, 3]))]
            whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
            # Each rank cuts for itself: torch scatters no uneven strided shards.
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            found.append(check(DTensorSource({"t": tensor}), {"t": whole}))
    return found


def refused() -> dict[str, str]:
    """What is said of what can't be offered, by case."""
    mesh = init_device_mesh("cpu", (4,))
    cases: dict[str, Callable[[], Any]] = {
        "partial": lambda: DTensorSource({"t": DTensor.from_local(torch.ones(3), mesh, [Partial()])}),
        "dtype": lambda: DTensorSource({"t": torch.ones(3).to(torch.float8_e4m3fn)}),
        "whole": lambda: DTensorSource([("t", nn.Parameter(torch.ones(3)))]),
        "local": lambda: DTensorSource(
            {"t": DTensor.from_local(torch.ones(3 + dist.get_rank()), mesh, [Shard(0)], shape=(10,), stride=(1,))}
        ),
    }
    return dict(_said(cases))


def _said(cases: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, str]]:
    for name, case in cases.items():
        try:
            case()
        except RefitError as error:
            yield name, f"{type(error).__name__}: {error}"
        else:
            yield name, ""


def outside() -> int:
    """A tensor on a mesh of two of the four ranks; the others hold nothing of it. Returns the boxes held."""
    mesh = DeviceMesh("cpu", [1, 3])
    whole = torch.arange(10.0)
    tensor = DTensor.from_local(whole[5 * (dist.get_rank() == 3) :][:5].clone(), mesh, [Shard(0)])
    source = DTensorSource({"t": tensor})
    return len(check(source, {"t": whole}))


def unsharded() -> dict[str, str]:
    """A module that is unsharded: after a forward pass it is resharded and read, inside one it is refused."""
    model = Block()
    values = number(model)
    fully_shard(model, reshard_after_forward=False)
    source = DTensorSource(model)
    said: dict[str, str] = {}

    def hook(*_: Any) -> None:
        said.update(_said({"inside": source.refresh}))

    handle = model.up.register_forward_hook(hook)
    model(torch.ones(2, 8))
    handle.remove()
    assert not isinstance(model.up.weight, DTensor), "FSDP leaves the root unsharded"
    with torch.no_grad():
        for parameter in [p for state in model._get_fsdp_state()._fsdp_param_groups for p in state.fsdp_params]:
            parameter.sharded_param.mul_(3)
    source.refresh()
    parameters = {n for n, _ in model.named_parameters()}
    wanted = {n: v * 3 if n in parameters else v for n, v in values.items()}
    check(source, wanted)
    model(torch.ones(2, 8))
    check(DTensorSource(model), wanted)
    model.to_empty(device="cpu")
    source.refresh()
    index = [b.name for b in source.placements.buffers].index("up.weight")
    assert source.tensors[index].data_ptr() == model.up.weight._local_tensor.data_ptr(), "memory that moved is followed"
    model.up.weight._local_tensor.untyped_storage().resize_(0)
    said.update(_said({"freed": source.refresh}))
    return said
