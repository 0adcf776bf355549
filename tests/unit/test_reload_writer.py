"""What the engine's own reload is fed with: read from a source only while that source's memory is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_refit_ext.core.coded import CHECKPOINT
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.receiver import writers
from vllm_refit_ext.wires.boxes import Memory


def test_a_box_is_copied_before_the_next_source_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring gives a buffer back when the next message is asked for or the write is over, so copies on a device have ended."""
    manifest = Manifest({"w": TensorSpec((4, 8), "float32")})
    halves = [Buffer("w", rank, "float32", (2, 8)) for rank in range(2)]
    rows = [Placement("w", rank, (2 * rank, 0), (2 * rank + 2, 8), 0, (32, 4)) for rank in range(2)]
    whole = [Buffer("w", 0, "float32", (4, 8), CHECKPOINT)], [Placement("w", 0, (0, 0), (4, 8), 0, (32, 4))]
    plan = build_plan(manifest, Placements.from_rows(halves, rows), Placements.from_rows(*whole))
    events: list[str] = []

    class Ring(Memory):
        ordered = True

        def memory(self, buffer: int) -> torch.Tensor:
            events.append(f"source {buffer}")
            return torch.full((64,), buffer + 1, dtype=torch.uint8)

    def reload(tensors: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> None:
        (pair,) = tensors
        assert (pair[0], names) == ("w", ["w"])
        assert pair[1].view(torch.uint8).unique(dim=1).flatten().tolist() == [1, 1, 2, 2]

    monkeypatch.setattr(writers, "wait_for", lambda device: events.append("wait"))
    writers.ReloadWriter(plan, reload, torch.device("cpu")).write(Ring())
    assert events == ["source 0", "wait", "source 1", "wait"]
