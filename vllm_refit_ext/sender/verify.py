"""What a trainer holds, as digests: each rank of what it sends, and rank 0 of what every engine rank is to have."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from vllm_refit_ext.sender.prepared import EngineRanks, Prepared
from vllm_refit_ext.wires.boxes import MODULUS, Memory, as_bytes
from vllm_refit_ext.wires.coded import PlacedScales
from vllm_refit_ext.wires.digests import SentDigests


def sent_digests(prepared: Prepared, rank: int) -> bytes:
    """Of what trainer rank `rank` holds now, for `wanted_digests`."""
    tensors = prepared.offered.current({})
    part = prepared.digests.plan if prepared.digests else prepared.plan.for_source(rank)
    scales = PlacedScales(part, prepared.offered.placements, tensors)
    if prepared.digests is None:
        prepared.digests = SentDigests(part, tensors[0].device if tensors else torch.device("cpu"), scales)
    place = {(b.rank, b.name): i for i, b in enumerate(prepared.offered.placements.buffers)}
    used = np.unique(part.source).tolist()
    memory = _Memory({i: as_bytes(tensors[place[part.sources[i].rank, part.sources[i].name]]) for i in used})
    return msgspec.msgpack.encode(prepared.digests(memory, scales))


def wanted_digests(raw: Sequence[bytes], engines: Sequence[EngineRanks]) -> list[dict[str, dict[str, str]]]:
    """By engine, what `refit_verify` is asked for. raw: of all trainer ranks."""
    total: dict[int, dict[str, int]] = {}
    for part in (msgspec.msgpack.decode(r, type=dict[int, dict[str, int]]) for r in raw):
        for rank, digests in part.items():
            mine = total.setdefault(rank, {})
            for name, value in digests.items():
                mine[name] = (mine.get(name, 0) + value) % MODULUS
    return [
        {str(r.rank): {n: f"{v:016x}" for n, v in total.get(e.first + r.rank, {}).items()} for r in e.replies} for e in engines
    ]


class _Memory(Memory):
    """The trainer's own tensors as a reader."""

    def __init__(self, tensors: dict[int, torch.Tensor]) -> None:
        self._tensors = tensors

    def memory(self, buffer: int) -> torch.Tensor:
        return self._tensors[buffer]
