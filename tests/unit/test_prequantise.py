"""What a trainer that quantises offers."""

from __future__ import annotations

import torch

from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.sender.prequantize import Prequantised


def test_the_table_names_what_the_manifest_has_and_nothing_else() -> None:
    """`a` and `c` stay as they are, `b` in between is quantised."""
    shapes = {"a": (4,), "b": (4, 64), "c": (3, 32)}
    specs = {name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()}
    tensors = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes.values()]
    buffers = [Buffer(name, 0, "bfloat16", shape) for name, shape in shapes.items()]
    strides = {"a": (2,), "b": (128, 2), "c": (64, 2)}
    rows = [Placement(n, i, (0,) * len(s), s, 0, strides[n]) for i, (n, s) in enumerate(shapes.items())]
    offered = Prequantised(specs, Placements.from_rows(buffers, rows), tensors, ["b"])
    assert set(offered.placements.names) == set(offered.specs)
    assert len(offered.specs) == 4
    assert {row.tensor for row in offered.placements.rows()} == set(offered.specs)


def test_codes_and_scales_can_be_given_back_between_refits() -> None:
    """The next fill takes memory anew and makes the same bytes; what was there is offered at the new addresses."""
    names = ("a", "b")
    tensors = [torch.randn(8, 64, dtype=torch.bfloat16) for _ in names]
    specs = {n: TensorSpec((8, 64), "bfloat16") for n in names}
    rows = [Placement(n, i, (0, 0), (8, 64), 0, (128, 2)) for i, n in enumerate(names)]
    buffers = [Buffer(n, 0, "bfloat16", (8, 64)) for n in names]
    offered = Prequantised(specs, Placements.from_rows(buffers, rows), tensors, names)

    def made() -> list[list[int]]:
        filled = offered.fill(tensors)[2:]
        assert offered.addresses == [t.data_ptr() for t in (*tensors, *filled)]
        return [t.view(torch.uint8).flatten().tolist() for t in filled]

    first = made()
    assert first == made()
    released = offered.release()
    assert released >= 2 * (8 * 64 + 8 * 2)
    assert offered.release() == 0
    assert made() == first
    assert offered.release() == released
