"""What a refit tells the trainer."""

from __future__ import annotations

import msgspec

from vllm_refit_ext.core.messages import UpdateReport


class RefitReport(msgspec.Struct, frozen=True):
    """One refit as every trainer rank sees it.

    seconds: `look` (at the tensors, with what the source gathers late), `quantise`, `publish` (this rank's part of the wire),
    `transfer` (wire `collective`: until its last byte was taken), `update` (from the calls to the engines' commits), `total`.
    nbytes: what was sent to all engine ranks. engines: the reports of all engine ranks, by engine. sent: payload bytes that this
    rank itself sent, by engine rank (wire `collective`); where engine ranks of a host hand boxes to each other, `nbytes` counts
    every copy and `sent` the one.
    """

    version: str
    seconds: dict[str, float]
    nbytes: int
    gbytes_per_s: float
    engines: list[list[UpdateReport]]
    sent: dict[int, int] = {}
