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
