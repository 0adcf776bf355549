"""Versions in pieces: how an engine rank's final bytes are cut, and who takes which piece from whom.

Every rank of equal layout cuts its memory into the same pieces, so a piece that one rank has is bytes for another. Of the ranks
of one host, one reads each piece from elsewhere, a trainer or a rank of another host, and the others copy it from that one.
Nobody plans this for all: each rank looks at what the registry says the others have and claim, and takes its next step. So a
rank that joins in the middle copies what is there, and one that dies leaves only its claim, which ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from vllm_refit_ext.core.manifest import Manifest
from vllm_refit_ext.core.placement import Int, Placements
from vllm_refit_ext.core.plan import Plan

PIECES = 32
"""Most pieces of a rank's memory. With more of them ranks that read together wait less for each other, and the registry is
asked more often."""
ALIGN = 256
"""Bytes at whose multiples a piece is cut among sources."""


class Peer(msgspec.Struct, frozen=True):
    """What is known of another rank that has a part of the version. near: of this host. claim: the piece that it reads, or -1.
    given: bytes that others read of it, as far as the registry says."""

    epoch: str
    near: bool
    done: Collection[int]
    claim: int = -1
    given: int = 0


class Step(msgspec.Struct, frozen=True):
    """What a rank does next with `piece`. sources: epochs to copy it from, in equal parts; empty to read it from the trainer.
    claimed: whether it must be claimed for the host first."""

    piece: int
    sources: tuple[str, ...] = ()
    claimed: bool = False


def cut(sizes: Sequence[int], most: int = PIECES) -> Int:
    """The piece of each group of bytes: neighbours together, of nearly equal bytes. sizes: bytes of each group. int64 [groups],
    from 0, without gaps."""
    ends = np.cumsum(np.array(sizes, np.int64))
    if not len(ends):
        return np.zeros(0, np.int64)
    middle = ends - np.array(sizes, np.int64) // 2
    piece = np.minimum(middle * most // max(int(ends[-1]), 1), most - 1)
    return np.unique(piece, return_inverse=True)[1].astype(np.int64)


def part(nbytes: Sequence[int], number: int, of: int) -> list[tuple[int, int, int]]:
    """Part `number` of `of` equal parts of regions of these bytes, as (region, first byte, last byte + 1)."""
    ends = np.cumsum(np.array(nbytes, np.int64))
    total = int(ends[-1]) if len(ends) else 0
    low, high = (min(total, -(-total * n // of // ALIGN) * ALIGN) if n < of else total for n in (number, number + 1))
    found = []
    for i, (end, size) in enumerate(zip(ends.tolist(), nbytes, strict=True)):
        a, b = max(low, end - size), min(high, end)
        if b > a:
            # Elements of a region are not cut: both ends of the parts lie at whole blocks of it.
            a, b = (x if x == end else (x - (end - size)) // ALIGN * ALIGN + (end - size) for x in (a, b))
            if b > a:
                found.append((i, a - (end - size), b - (end - size)))
    return found


def next_step(
    pieces: int, done: Collection[int], peers: Sequence[Peer], trainer: bool, given: int, first: int, shares: bool, stalled: bool
) -> Step | None:
    """The next step of a rank, or None where it has to wait for a rank of its host that reads the rest.

    done: its own pieces. trainer: whether the trainer can be read, and given: bytes that were read of it. first: the piece that
    it begins with, so that ranks that begin together read different ones. shares: whether others can copy from it, so that it
    claims what it reads. stalled: read what others claim too.

    What is read from elsewhere comes first, as others wait for it; then what ranks of this host have, in equal parts of all that
    have it. Among elsewhere, the source that gave least is taken: of many hosts that join together, each is a source for others
    as soon as it has a piece, so that they form a tree by themselves.
    """
    order = [p for n in range(pieces) if (p := (first + n) % pieces) not in done]
    near = [p for p in peers if p.near]
    has = {piece: [p.epoch for p in near if piece in p.done] for piece in order}
    claimed = {p.claim for p in near}
    wanted = {piece: n for n, piece in enumerate(order) if not has[piece] and (stalled or piece not in claimed)}
    far = [(p.given, wanted[piece], piece, p.epoch) for p in peers if not p.near for piece in p.done if piece in wanted]
    if trainer and wanted:
        elsewhere = {p.claim for p in peers if not p.near}  # another host will have it soon
        far.append((given, 0, min(wanted, key=lambda piece: (piece in elsewhere, wanted[piece])), ""))
    if far:
        _, _, piece, source = min(far)
        return Step(piece, (source,) if source else (), shares and piece not in claimed)
    for piece in order:
        if has[piece]:
            return Step(piece, tuple(has[piece]))
    return None


def identity(manifest: Manifest, sources: Placements) -> Plan:
    """A plan whose moves are all boxes of `sources`, each onto itself: what readers that nobody knows yet may read."""
    index = {name: i for i, name in enumerate(manifest.tensors)}
    table = sources.widened(max([sources.lo.shape[1], *(len(t.shape) for t in manifest.tensors.values())]))
    numbers = np.array([index[name] for name in table.names], np.int64)
    return Plan(
        manifest,
        table.buffers,
        table.buffers,
        tensor=numbers[table.tensor] if len(table) else np.zeros(0, np.int64),
        source=table.buffer,
        target=table.buffer,
        lo=table.lo,
        extent=table.hi - table.lo,
        source_offset=table.offset,
        source_strides=table.strides,
        target_offset=table.offset,
        target_strides=table.strides,
    )


def given_by(taken: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by source, of what each reader took."""
    total: dict[str, int] = {}
    for each in taken:
        for epoch, nbytes in each.items():
            total[epoch] = total.get(epoch, 0) + nbytes
    return total
