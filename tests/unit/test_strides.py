"""Strides belong to what a refit looks at: a parameter that becomes non-contiguous is refused, or sent as its elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_sender.bridge import Held
from megatron_sender.source import SourceMap
from tests.unit.test_ring_relay import crossed
from vllm_refit_ext.core.errors import LayoutError, WireError
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placements
from vllm_refit_ext.core.sites import Sites
from vllm_refit_ext.wires import collective, ring, shm
from vllm_refit_ext.wires.boxes import as_bytes


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))


def test_the_source_map_looks_at_strides():
    """Same memory, shape and type, other strides: its own view of the memory would send other elements."""
    layer = Layer()
    held = Held(0, "weight", layer, "weight", None, None)
    known = layer.weight.detach()
    rows = Placements.from_rows([Buffer("weight", 0, "float32", (4, 4))], [], ["w"])
    source = SourceMap({}, {}, rows, [known], None, [held], [], [known.data_ptr()])
    assert source.refresh() == []
    plain = layer.weight.data
    layer.weight.data = plain.t()
    for _ in range(2):
        with pytest.raises(WireError, match="no longer contiguous"):
            source.refresh()
    layer.weight.data = plain
    assert source.refresh() == []


@pytest.mark.parametrize("wire", [ring, collective])
def test_a_wire_that_counts_row_major_elements_refuses_others(wire):
    """Between two refits, with the same address; in order again, it is taken again."""
    plan, tensors, _ = crossed(1, 1)
    sender = wire.open_sender(0, wire.shares(plan, Sites("a", "a"))[0], tensors)
    strided = [tensors[0], tensors[1].view(16, -1).t().contiguous().t().view_as(tensors[1].view(16, -1)), tensors[2]]
    try:
        sender.begin(tensors)
        with pytest.raises(WireError, match=r"buffer 1: a tensor is no longer contiguous"):
            sender.begin(strided)
        sender.begin(tensors)
    finally:
        sender.close()


def test_shared_memory_takes_any_strides():
    plan, tensors, _ = crossed(1, 1)
    sender = shm.open_sender(0, shm.shares(plan, Sites("a", "a"))[0], tensors)
    try:
        told = shm.info([sender.begin([t.t().contiguous().t() for t in tensors])])
        kept: dict = {}
        reader = shm.open_reader(UpdateInfo(wire="shm", version="v", session="s", shm=told), plan, kept)
        for i in np.unique(plan.source).tolist():
            assert torch.equal(reader.memory(i).view(torch.float32).view(tensors[i].shape), tensors[i])
        kept["shm"].close()
    finally:
        sender.close()


def test_bytes_of_a_tensor_are_never_those_of_a_copy():
    with pytest.raises(LayoutError, match="not contiguous"):
        as_bytes(torch.randn(4, 4).t())
    tensor = torch.zeros(())
    as_bytes(tensor).fill_(1)
    assert tensor.item() != 0
