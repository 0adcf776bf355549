"""What a trainer holds, as digests: each rank of what it sends, and rank 0 of what every engine rank is to have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires.boxes import MODULUS, Memory, as_bytes
from vllm_refit_ext.wires.coded import PlacedScales
from vllm_refit_ext.wires.digests import SentDigests

if TYPE_CHECKING:
    from vllm_refit_ext.sender.prepared import EngineRanks, Offered, Prepared


class Check(Memory):
    """What one trainer rank's digests are made with, kept from one `verify` to the next; its own tensors as a reader."""

    def __init__(self, offered: Offered, part: Plan) -> None:
        """part: the moves out of this rank."""
        self._offered, self._part = offered, part
        place = {(b.rank, b.name): i for i, b in enumerate(offered.placements.buffers)}
        self._places = {i: place[part.sources[i].rank, part.sources[i].name] for i in np.unique(part.source).tolist()}
        self._tensors: Sequence[torch.Tensor] = ()
        self._digests: SentDigests | None = None

    def memory(self, buffer: int) -> torch.Tensor:
        return as_bytes(self._tensors[self._places[buffer]])

    def address(self, buffer: int) -> int:
        return self._offered.addresses[self._places[buffer]]

    def __call__(self) -> bytes:
        """Digests of what is there now, for `wanted_digests`."""
        self._tensors = self._offered.current({})
        scales = PlacedScales(self._part, self._offered.placements, self._tensors)
        if self._digests is None:
            device = self._tensors[0].device if self._tensors else torch.device("cpu")
            self._digests = SentDigests(self._part, device, scales)
        try:
            return msgspec.msgpack.encode(self._digests(self, scales))
        finally:
            self._tensors = ()


def sent_digests(prepared: Prepared, rank: int) -> bytes:
    """Of what trainer rank `rank` holds now, for `wanted_digests`."""
    if prepared.check is None:
        prepared.check = Check(prepared.offered, prepared.plan.for_source(rank))
    return prepared.check()


def wanted_digests(raw: Sequence[bytes], engines: Sequence[EngineRanks]) -> list[dict[str, dict[str, str]]]:
    """By engine, what `refit_verify` is compared with. raw: of all trainer ranks."""
    total: dict[int, dict[str, int]] = {}
    for part in (msgspec.msgpack.decode(r, type=dict[int, dict[str, int]]) for r in raw):
        for rank, digests in part.items():
            mine = total.setdefault(rank, {})
            for name, value in digests.items():
                mine[name] = (mine.get(name, 0) + value) % MODULUS
    return [
        {str(r.rank): {n: f"{v:016x}" for n, v in total.get(e.first + r.rank, {}).items()} for r in e.replies} for e in engines
    ]
