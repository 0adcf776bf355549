"""What a trainer rank packs, by the kernels in Triton's interpreter: the bytes that torch packs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.kernels.table import Table
from vllm_refit_ext.wires import outgoing
from vllm_refit_ext.wires.outgoing import Gather, Outgoing
from vllm_refit_ext.wires.staging import padded, rounds

SPECS = {
    "a": ("bfloat16", (5, 9)),
    "b": ("float32", (7, 12)),
    "c": ("uint8", (1, 3)),
    "d": ("bfloat16", (32, 64)),
    "e": ("float8_e4m3fn", (3, 33)),
}
ITEM = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8_e4m3fn": 1}


@pytest.mark.parametrize("bucket", [50, 700, 1 << 20])
@pytest.mark.parametrize("odd", [0, 1])
def test_messages_are_packed_by_kernels_as_by_torch(bucket, odd, monkeypatch):
    """Widths that differ, rows that are cut, parameters at odd addresses; a message a launch, and all in one."""
    manifest = Manifest({n: TensorSpec(s, d) for n, (d, s) in SPECS.items()})
    buffers = [Buffer(n, 0, d, s) for n, (d, s) in SPECS.items()]
    rows = [Placement(n, i, (0, 0), s, 0, (s[1] * ITEM[d], ITEM[d])) for i, (n, (d, s)) in enumerate(SPECS.items())]
    table = Placements.from_rows(buffers, rows)
    plan = build_plan(manifest, table, table)
    cut = rounds(plan, bucket)
    order = np.lexsort((cut.at, cut.number))
    pieces = Outgoing.read(outgoing.outgoing([(cut.plan, cut.number, order)], plan, 0))
    tensors = []
    for dtype, shape in SPECS.values():
        raw = torch.randint(0, 120, (int(np.prod(shape)) * ITEM[dtype] + 8,), dtype=torch.uint8)
        first = odd * ITEM[dtype]
        tensors.append(raw[first : first + raw.numel() - 8].view(getattr(torch, dtype)).view(shape))
    messages = list(pieces.messages())
    assert sum(m.nbytes for m in messages) == sum(t.nbytes for t in tensors)
    ends = np.cumsum([padded(m.nbytes) for m in messages]).tolist()
    together = list(zip(messages, [0, *ends], strict=False))
    for groups in ([[(m, 0)] for m in messages], [together]):
        packed = []
        for backend in ("torch", "triton"):
            monkeypatch.setattr(outgoing, "Table", functools.partial(Table, backend=backend))
            gather, into = Gather(pieces, groups), [torch.zeros(ends[-1], dtype=torch.uint8) for _ in groups]
            gather.look(tensors, "here", None)
            for number, memory in enumerate(into):
                gather.pack(number, memory)
            packed.append(torch.cat(into))
        assert torch.equal(*packed)
