"""Strides belong to what a refit looks at: a parameter that becomes non-contiguous is refused, or sent as its elements."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_sender.bridge import ModelTensor
from megatron_sender.source import SourceMap
from tests.support.ring_ranks import crossed
from vllm_refit_ext.core.errors import LayoutError, WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender import look
from vllm_refit_ext.sender.prepared import Offered
from vllm_refit_ext.wires import collective, ring, shm
from vllm_refit_ext.wires.boxes import as_bytes


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))


def test_the_source_map_looks_at_strides():
    """Same memory, shape and type, other strides: its own view of the memory would send other elements."""
    layer = Layer()
    held = ModelTensor(0, "weight", layer, "weight", None, None)
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
    sender = wire.open_sender(0, wire.send_tables(plan, Hosts("a", "a"))[0], tensors)
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
    sender = shm.open_sender(0, shm.send_tables(plan, Hosts("a", "a"))[0], tensors)
    try:
        report = shm.info([sender.begin([t.t().contiguous().t() for t in tensors])])
        kept: dict = {}
        reader = shm.open_reader(UpdateInfo(wire="shm", version="v", session="s", shm=report), plan, kept)
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.view(torch.int32), "int32"),
        (lambda t: t.view(2, 8), "float32 [2, 8]"),
        (lambda t: t.t(), "no longer contiguous"),
        (lambda t: torch.empty(4, 4, dtype=torch.float64), "float64"),
    ],
)
@pytest.mark.parametrize("guards", [True, False])
def test_what_is_offered_is_looked_at_in_one_pass(change, said, guards, monkeypatch):
    """A tensor whose memory stays and whose meaning changes in place is refused by name; memory that moved is taken up. The same
    on a torch whose guards do not hold."""
    if not guards:
        monkeypatch.setattr(look, "_guards_hold", lambda: False)
    assert look._guards_hold() == guards
    tensors = [torch.randn(4, 4) for _ in range(3)]
    names = [f"t{i}" for i in range(3)]
    rows = [Placement(n, i, (0, 0), (4, 4), 0, (16, 4)) for i, n in enumerate(names)]
    specs = {n: TensorSpec((4, 4), "float32") for n in names}
    placements = Placements.from_rows([Buffer(n, 0, "float32", (4, 4)) for n in names], rows, names)
    source = SimpleNamespace(specs=specs, aliases={}, placements=placements, tensors=tensors, refresh=lambda: None)
    offered = Offered(source, 0)
    assert offered.current({}) is tensors
    assert offered.addresses == [t.data_ptr() for t in tensors]
    tensors[2].data = tensors[2].clone()
    offered.current({})
    assert offered.addresses[2] == tensors[2].data_ptr()
    tensors[1].data = change(tensors[1].data)
    with pytest.raises(WireError) as caught:
        offered.current({})
    assert [p.where for p in caught.value.problems] == ["t1"]
    assert said in str(caught.value)
