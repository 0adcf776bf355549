"""Staging: in which pieces and in which order the moves into one engine rank are transferred, and the same moves with staging
buffers as their sources. It serves every wire whose bytes don't lie where the plan says:

    cut = rounds(plan, bucket_bytes)        both sides, the same tables: pieces, their rounds, their messages
    staging = Staging(cut, ...)             engine rank, kept: the plans whose sources are the buffers that a wire names; with
                                            a buffer for each round and memory for two of them, `RoundBuffers`
    class Reader(BucketReader)              engine rank, each refit: `_bring(i)` gives the bytes of buffer i once they are there,
                                            `_give_up(i)` says that what was launched until now was the last to read them
    Gather(Outgoing.read(...), groups)      trainer rank (`outgoing`): packs messages from live tensors, a launch for each

An engine rank receives its moves in rounds of at most `bucket_bytes`; in a round each source sends one message, its pieces of
that round end to end. First come scales of tensors that are sent as MXFP8, which are kept until their codes are there; then moves
for the engine's own reload; then those in place; each in plan order. A move larger than a bucket is cut.

No two ranks can wait for each other. Each sender sends in the order (round, target), each target receives in the order (round,
source), so the first message in the order (round, target, source) that has not arrived is always the next one of both its ends,
however many messages a group holds and however few groups are under way.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires import Reader

ALIGN = 256
"""Messages start at multiples of this many bytes in staging. In a message wider items come first, so all are aligned."""
RING = 2
"""Staging buffers: one is filled or under way while the other is read or sent."""
BLOCK = 32
"""Where a cut has the choice it falls on a multiple of this many elements, so that no block of MXFP8 is cut."""
RELOAD = "checkpoint"
"""How the layouts of targets begin that wait for the engine's own reload, which must come before writes in place."""


def padded(nbytes: int) -> int:
    """`nbytes`, or the next multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


class Message(msgspec.Struct, frozen=True):
    """Bytes of one source in one round, and where they lie in the receiver's staging buffer."""

    source: int
    at: int
    nbytes: int


class Rounds(msgspec.Struct):
    """The moves into one engine rank, in pieces, in the order of their transfer; one source sends one message a round.

    plan: the pieces. number: int64 [n], the round of each. kept: how many of the first rounds are scales. reloads: how many
    behind these are for the reload. at: int64 [n], bytes from the start of its message. messages: for each round, by source rank.
    """

    plan: Plan
    number: Int
    kept: int
    reloads: int
    at: Int
    messages: list[list[Message]]

    def size(self, number: int) -> int:
        """Bytes of staging that a round needs."""
        last = self.messages[number][-1]
        return last.at + last.nbytes

    def staged(self) -> Int:
        """Byte offset of each piece in the staging buffer of its round, int64 [n]."""
        start = {(r, m.source): m.at for r, messages in enumerate(self.messages) for m in messages}
        keys = zip(self.number.tolist(), self.plan.source_rank.tolist(), strict=True)
        return self.at + np.fromiter((start[key] for key in keys), np.int64, len(self.at))


def rounds(plan: Plan, bucket_bytes: int) -> Rounds:
    """The rounds of `plan`, the moves into one engine rank. bucket_bytes: most payload of a round, at least one element."""
    plan = plan.select(np.argsort(kinds_of(plan), kind="stable"))
    plan = cut_moves(plan, bucket_bytes)
    kinds, nbytes = kinds_of(plan), plan.nbytes
    number = np.zeros(len(plan), np.int64)
    borders = np.searchsorted(kinds, [0, 1, 2], side="right")
    ends = np.cumsum(nbytes)
    first, index, counts = 0, 0, [0, 0, 0]
    while first < len(plan):
        taken = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, taken + bucket_bytes, side="right")))
        last = min(last, int(borders[kinds[first]]))
        number[first:last] = index
        counts[int(kinds[first])] += 1
        first, index = last, index + 1
    at, messages = _messages(plan, number, index)
    return Rounds(plan, number, counts[0], counts[1], at, messages)


def kinds_of(plan: Plan) -> Int:
    """0 for scales that are sent beside their codes, 1 for the engine's reload, 2 for writes in place; int64 [n]."""
    if not len(plan):
        return np.zeros(0, np.int64)
    scales = {spec.scale for spec in plan.manifest.tensors.values() if spec.scale}
    is_scale = np.array([name in scales for name in plan.names], bool)
    in_place = np.array([not b.layout.startswith(RELOAD) for b in plan.targets], np.int64)
    return np.where(is_scale[plan.tensor], 0, 1 + in_place[plan.target])


def _messages(plan: Plan, number: Int, count: int) -> tuple[Int, list[list[Message]]]:
    """Where each piece lies in its message, int64 [n], and the messages of each round."""
    nbytes, source = plan.nbytes, plan.source_rank
    item = np.array([ITEMSIZE[b.dtype] for b in plan.sources], np.int64)[plan.source] if len(plan) else nbytes
    at = np.zeros(len(plan), np.int64)
    messages: list[list[Message]] = [[] for _ in range(count)]
    order = np.lexsort((np.arange(len(plan)), -item, source, number))
    key = number[order] * (int(source.max(initial=0)) + 1) + source[order]
    for a, b in pairwise(np.flatnonzero(np.diff(key, prepend=-1, append=-1)).tolist()):
        rows = order[a:b]
        sizes = nbytes[rows]
        at[rows] = np.cumsum(sizes) - sizes
        here = messages[int(number[rows[0]])]
        start = padded(here[-1].at + here[-1].nbytes) if here else 0
        here.append(Message(int(source[rows[0]]), start, int(sizes.sum())))
    return at, messages


def plan_over(plan: Plan, buffer: Int, offset: Int, buffers: Sequence[tuple[str, int, int]]) -> Plan:
    """`plan` with row-major boxes in staging as its sources. buffer, offset: int64 [n], the staging buffer of each move and bytes
    into it. buffers: name, rank and bytes of each. In the plan made here it is a source buffer for each of `dtypes_of(plan)`.
    """
    dtypes = dtypes_of(plan)
    sources = [Buffer(name, rank, d, (-(-nbytes // ITEMSIZE[d]),)) for name, rank, nbytes in buffers for d in dtypes]
    code = np.array([dtypes.index(b.dtype) for b in plan.sources], np.int64)[plan.source] if len(plan) else plan.source
    item = np.array([ITEMSIZE[d] for d in dtypes], np.int64)[code] if len(plan) else plan.source
    strides = np.ones_like(plan.extent)
    strides[:, :-1] = np.cumprod(plan.extent[:, :0:-1], axis=1)[:, ::-1]
    columns = {c: getattr(plan, c) for c in Plan.COLUMNS}
    columns |= {"source": buffer * len(dtypes) + code, "source_offset": offset, "source_strides": strides * item[:, None]}
    return Plan(plan.manifest, sources, plan.targets, **columns)


def dtypes_of(plan: Plan) -> list[str]:
    """The dtypes as which a staging buffer is seen."""
    return sorted({b.dtype for b in plan.sources})


def steps_of(whole: Plan, number: Int, kept: int, reloads: int) -> list[Plan]:
    """The moves in place, a plan for each round, with the scales that its codes need; where nothing but scales is written in
    place, these. number: int64 [n], the round of each move. kept, reloads: as in `Rounds`."""
    steps = [whole.select(whole.with_scales(number == r)) for r in range(kept + reloads, int(number.max(initial=-1)) + 1)]
    return steps or [whole.select(number < kept)]


def cut_moves(plan: Plan, limit: int) -> Plan:
    """`plan` with every move larger than `limit` bytes cut into pieces, in row-major order. One element is never cut."""
    item = np.array([ITEMSIZE[b.dtype] for b in plan.sources], np.int64)[plan.source] if len(plan) else plan.nbytes
    move, start, extent = cut_boxes(plan.extent, plan.nbytes, np.full(len(plan), limit, np.int64), item)
    return plan if len(move) == len(plan) else boxes_of(plan, move, start, extent)


def cut_boxes(extent: Int, nbytes: Int, limit: Int, item: Int) -> tuple[Int, Int, Int]:
    """Boxes cut into parts of at most `limit` bytes, in row-major order, at least one element each.

    extent: int64 [n, D]. nbytes, limit, item: int64 [n], `item` the bytes of an element. Returns for every part the box that it
    is of, int64 [m], where in this box it starts and its extent, int64 [m, D].
    """
    large = np.flatnonzero(nbytes > limit)
    parts = {int(i): list(_cut(extent[i].tolist(), max(1, int(limit[i] // item[i])))) for i in large}
    repeats = np.ones(len(extent), np.int64)
    repeats[large] = [len(parts[int(i)]) for i in large]
    box = np.repeat(np.arange(len(extent)), repeats)
    start, size = np.zeros((len(box), extent.shape[1]), np.int64), extent[box]
    first = np.cumsum(repeats) - repeats
    for i, boxes in parts.items():
        rows = slice(int(first[i]), int(first[i]) + len(boxes))
        start[rows] = [lo for lo, _ in boxes]
        size[rows] = [part for _, part in boxes]
    return box, start, size


def boxes_of(plan: Plan, move: Int, start: Int, extent: Int) -> Plan:
    """Parts of moves as a plan. move: int64 [n], which move. start, extent: int64 [n, D], where in its box the part starts and
    its extent."""
    columns = {c: getattr(plan, c)[move] for c in Plan.COLUMNS}
    columns["lo"] = columns["lo"] + start
    columns["extent"] = extent
    for side in ("source", "target"):
        columns[f"{side}_offset"] = columns[f"{side}_offset"] + (start * columns[f"{side}_strides"]).sum(axis=1)
    return Plan(plan.manifest, plan.sources, plan.targets, **columns)


def _cut(extent: list[int], limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """Boxes (lo, extent) of at most `limit` elements that make up a box, in row-major order."""
    axis = next((d for d, n in enumerate(extent) if n > 1), None)
    row = int(np.prod(extent, dtype=np.int64)) // extent[axis] if axis is not None else 1
    if axis is None or row * extent[axis] <= limit:
        yield [0] * len(extent), list(extent)
        return
    step = max(1, limit // row)
    step -= step % BLOCK if step > BLOCK else 0
    for at in range(0, extent[axis], step):
        piece = [*extent[:axis], min(step, extent[axis] - at), *extent[axis + 1 :]]
        for lo, part in _cut(piece, limit):
            yield [*lo[:axis], lo[axis] + at, *lo[axis + 1 :]], part


class Staging:
    """The moves into one engine rank with buffers as their sources. Kept from refit to refit.

    whole: all of them. steps: those in place, a plan a round. round_of: of each buffer, ascending. kept: buffers of scales,
    uint8, which stay until the refit ends. rank: of the engine. device: where the buffers lie.
    """

    def __init__(
        self,
        cut: Rounds,
        buffer: Int,
        offset: Int,
        buffers: Sequence[tuple[str, int, int]],
        round_of: Sequence[int],
        device: torch.device,
    ) -> None:
        """buffer, offset: int64 [n], the buffer of each piece and the byte in it. buffers: name, rank and bytes of each."""
        self.device, self.round_of = device, list(round_of)
        self.rank = cut.plan.targets[0].rank if cut.plan.targets else 0
        self.whole = plan_over(cut.plan, buffer, offset, buffers)
        self.steps = steps_of(self.whole, cut.number, cut.kept, cut.reloads)
        self.dtypes = len(dtypes_of(cut.plan))
        self.kept = {
            i: torch.empty(padded(nbytes), dtype=torch.uint8, device=device)
            for i, (_, _, nbytes) in enumerate(buffers)
            if round_of[i] < cut.kept
        }

    @property
    def staging_bytes(self) -> int:
        """Memory of scales that are kept."""
        return sum(t.nbytes for t in self.kept.values())


class RoundBuffers(Staging):
    """Staging with a buffer for each round, all but scales in RING slots that they take in turn. sizes: bytes of each round."""

    def __init__(self, cut: Rounds, offset: Int, sizes: Sequence[int], slot: Callable[[int], torch.Tensor], device: torch.device):
        """offset: int64 [n], where in its round a piece lies. slot: makes one of so many bytes."""
        self.sizes = [padded(n) for n in sizes]
        buffers = [(f"round {r}", 0, n) for r, n in enumerate(self.sizes)]
        super().__init__(cut, cut.number, offset, buffers, range(len(buffers)), device)
        moving = self.sizes[cut.kept :]
        self.slots = [slot(max(moving)) for _ in range(min(RING, len(moving)))]

    @property
    def staging_bytes(self) -> int:
        """Memory of the slots and of kept scales."""
        return super().staging_bytes + sum(t.nbytes for t in self.slots)

    def place(self, number: int) -> torch.Tensor:
        """Where round `number` lies, uint8."""
        kept = self.kept.get(number)
        return self.slots[(number - len(self.kept)) % RING][: self.sizes[number]] if kept is None else kept


class BucketReader(Reader):
    """What readers of staged bytes have in common, for one refit. A buffer is waited for when it is first asked for, and with
    it all before it; those of earlier rounds are given up then. received: bytes by trainer rank."""

    ordered = True
    received: dict[int, int]

    def __init__(self, staging: Staging, where: str) -> None:
        self._staging, self._where = staging, where
        self.whole, self.steps = staging.whole, staging.steps
        self.received = {}
        self._here: dict[int, torch.Tensor] = {}
        self._next = 0

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of a source buffer of `whole` or of a step, uint8, once they are there. Raises WireError, DeadlineError where
        they do not come."""
        wanted, rounds = buffer // self._staging.dtypes, self._staging.round_of
        while self._next <= wanted:
            for old in [i for i in self._here if rounds[i] < rounds[self._next]]:
                del self._here[old]
                self._give_up(old)
            memory = self._bring(self._next)
            if self._next not in self._staging.kept:
                self._here[self._next] = memory
            self._next += 1
        found = self._staging.kept.get(wanted, self._here.get(wanted))
        if found is None:
            raise WireError("a round was asked for after a later one", where=self._where, got=wanted, wanted=self._next - 1)
        return found

    def fetch(self, plan: Plan) -> None:
        """Wait for all that a step reads."""
        for buffer in np.unique(plan.source).tolist():
            self.memory(buffer)

    @abc.abstractmethod
    def _bring(self, number: int) -> torch.Tensor:
        """Wait for buffer `number`, the next one. One that is kept is in `Staging.kept` afterwards."""

    def _give_up(self, number: int) -> None:
        """Nothing that is launched from now on reads buffer `number`."""

    def _check_read(self) -> None:
        """Raise WireError when buffers were left."""
        if self._next != len(self._staging.round_of):
            got, wanted = self._next, len(self._staging.round_of)
            raise WireError("the writers left rounds unread", where=self._where, got=got, wanted=wanted)
