"""Wire `ipc_staged`: through a ring of buffers that each trainer rank exports once, where its parameters can't be exported or
must move.

For one host. The trainer packs its part of the plan into buckets of bounded size, in plan order; a tensor larger than a bucket
is cut; while one bucket is written into the engine the next is packed. The engine reads the trainer's buffers where they lie,
so the extra memory is two buckets for each engine rank on the trainer's side, and on the engine's side only scales that travel
beside their codes. Without a GPU the ring lies in shared memory, and everything else is the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import ConfigError, RefitError, WireError
from vllm_refit_ext.core.messages import IpcStagedInfo, RingInfo, UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.sites import Sites
from vllm_refit_ext.core.table import Column, pack, unpack
from vllm_refit_ext.kernels.moves import At, CopyMove, Strided, contiguous
from vllm_refit_ext.kernels.table import Table
from vllm_refit_ext.wires import BUCKET_BYTES
from vllm_refit_ext.wires.collective_rounds import Rounds, rounds
from vllm_refit_ext.wires.ipc_ring import RING, RingOwner, RingReader, Words
from vllm_refit_ext.wires.shm import FOLDER

WHERE = "wire ipc_staged"


class _Share(msgspec.Struct):
    """What a trainer rank must know: its pieces, sorted by (round, target, place in the message), one column each.

    target, number: engine rank and round. buffer, at, offset: buffer of this rank, bytes from the message's start, bytes into
    the buffer. extent [n, D] elements, strides [n, D] bytes. slots: largest message for each engine rank.
    """

    engines: int
    bucket_bytes: int
    slots: list[int]
    columns: list[Column]


class _Piece(msgspec.Struct, frozen=True):
    """A message: pieces first..last go to engine rank `target`, as its `count`-th from this rank."""

    target: int
    count: int
    first: int
    last: int
    nbytes: int


class StagedSender:
    """A trainer rank's half. `staging_bytes`: memory of its ring."""

    def __init__(self, rank: int, share: _Share, tensors: Sequence[torch.Tensor]) -> None:
        self.rank, self._share = rank, share
        self._columns = [unpack(c) for c in share.columns]
        used = np.unique(self._columns[2]).tolist()
        self._device = tensors[used[0]].device if used else torch.device("cpu")
        self._ring = RingOwner(rank, share.slots, self._device)
        self.staging_bytes = self._ring.nbytes
        self._messages = list(self._messages_of())
        self._tables: dict[int, Table] = {}
        self._tensors: list[torch.Tensor] = []
        self._nonce = 0
        self._addresses: list[int] = []
        self._bound: set[int] = set()

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Remember the live tensors and clear the words. Returns this rank's part of the message."""
        self._tensors, self._nonce = list(tensors), secrets.randbits(62) | 1
        addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            self._addresses = addresses
            self._bound.clear()
            self._tables.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ring.words.clear(self._nonce)
        info = msgspec.structs.replace(self._ring.info, nonce=self._nonce)
        return msgspec.msgpack.encode(_Part(info, self._share.bucket_bytes, self._share.engines))

    def transfer(self, session: str, info: IpcStagedInfo, deadline: float) -> dict[int, int]:
        """Pack every message when its slot is free. deadline: time.monotonic seconds. Returns bytes by engine rank.

        Raises WireError when an engine rank gave up or rank 0 was told that one refused, DeadlineError when one does not read on.
        """
        lead = next(r for r in info.rings if r.rank == 0)
        words = self._ring.words if self.rank == 0 else Words(FOLDER / lead.name, len(lead.slots))
        sent: dict[int, int] = {}
        try:
            for number, message in enumerate(self._messages):
                where = f"{WHERE}, trainer rank {self.rank} to engine rank {message.target}"
                self._ring.words.wait(message.target, 1, message.count - RING + 1, deadline, where, (words,))
                self._pack(number, message)
                self._ring.words.write(message.target, 0, message.count + 1)
                sent[message.target] = sent.get(message.target, 0) + message.nbytes
            counts = {m.target: m.count + 1 for m in self._messages}
            for target, count in counts.items():
                self._ring.words.wait(
                    target, 1, count, deadline, f"{WHERE}, trainer rank {self.rank} to engine rank {target}", (words,)
                )
        except RefitError:
            self._ring.words.stop()
            raise
        finally:
            if self.rank != 0:
                words.close()
        return sent

    def refuse(self, session: str, error: RefitError, deadline: float) -> None:
        """On rank 0: an engine's call failed; every rank that packs stops."""
        self._ring.words.stop()

    def _messages_of(self) -> Iterator[_Piece]:
        target, number, _, _, _, extent, _ = self._columns
        if not len(target):
            return
        new = np.ones(len(target), bool)
        new[1:] = (np.diff(number) != 0) | (np.diff(target) != 0)
        counts: dict[int, int] = {}
        item = self._item()
        size = np.prod(extent, axis=1, dtype=np.int64) * item
        for a, b in pairwise([*np.flatnonzero(new).tolist(), len(target)]):
            t = int(target[a])
            yield _Piece(t, counts.get(t, 0), a, b, int(size[a:b].sum()))
            counts[t] = counts.get(t, 0) + 1

    def _item(self) -> Int:
        return self._columns[4][:, 1]

    def _pack(self, number: int, message: _Piece) -> None:
        _, _, buffer, at, place, extent, strides = self._columns
        rows = range(message.first, message.last)
        if number not in self._tables:
            moves = []
            for slot, i in enumerate(rows, start=1):
                dtype, shape = _name(self._tensors[int(buffer[i])].dtype), tuple(extent[i].tolist())
                source = Strided(At(slot, int(place[i, 0])), dtype, shape, tuple(strides[i].tolist()))
                moves.append(CopyMove(source, contiguous(At(0, int(at[i])), dtype, shape), f"piece {i}"))
            # Parameters may lie at any multiple of their element's size.
            alignment = {
                slot: self._tensors[int(buffer[i])].element_size()
                for slot, i in enumerate(rows, start=1)
                if self._tensors[int(buffer[i])].data_ptr() % 16
            }
            self._tables[number] = Table(moves, self._device, alignment=alignment)
        table = self._tables[number]
        if number not in self._bound:
            table.bind([self._ring.slot(message.target, message.count), *(self._tensors[int(buffer[i])].detach() for i in rows)])
            self._bound.add(number)
        table.launch()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Free the ring. Safe to call twice."""
        self._ring.close()


class _Part(msgspec.Struct):
    ring: RingInfo
    bucket_bytes: int
    engines: int


class StagedRounds:
    """The moves into one engine rank with the ring as their source. Kept from refit to refit.

    whole: all of them. steps: those in place, a plan a round. A source buffer of these plans is one message, seen as one dtype.
    """

    def __init__(self, plan: Plan, bucket_bytes: int, device: torch.device) -> None:
        self.rounds: Rounds = rounds(plan, bucket_bytes)
        self.rank = plan.targets[0].rank if plan.targets else 0
        self._dtypes = sorted({b.dtype for b in plan.sources})
        self.messages = [(number, m.source, m.nbytes) for number, found in enumerate(self.rounds.messages) for m in found]
        self._index = {(number, source): i for i, (number, source, _) in enumerate(self.messages)}
        count: dict[int, int] = {}
        self.counts: list[int] = []
        for _, source, _ in self.messages:
            self.counts.append(count.get(source, 0))
            count[source] = count.get(source, 0) + 1
        self.whole = self._plan()
        self._kept = {
            i: torch.empty(n, dtype=torch.uint8, device=device)
            for i, (r, _, n) in enumerate(self.messages)
            if r < self.rounds.kept
        }
        scales = self.rounds.number < self.rounds.kept
        in_place = range(self.rounds.kept + self.rounds.reloads, len(self.rounds.messages))
        self.steps = [self.whole.select(scales | (self.rounds.number == r)) for r in in_place] or [self.whole.select(scales)]

    @property
    def staging_bytes(self) -> int:
        """Memory of scales that are kept."""
        return sum(t.nbytes for t in self._kept.values())

    def kept(self, message: int) -> torch.Tensor | None:
        """Where a message of scales is kept, or None."""
        return self._kept.get(message)

    def message_of(self, buffer: int) -> int:
        """The message that a source buffer of the plans is."""
        return buffer // len(self._dtypes)

    def _plan(self) -> Plan:
        plan, dtypes = self.rounds.plan, self._dtypes
        buffers = [
            Buffer(f"round {r} of trainer rank {s}", s, d, (-(-n // ITEMSIZE[d]),)) for r, s, n in self.messages for d in dtypes
        ]
        code = np.array([dtypes.index(b.dtype) for b in plan.sources], np.int64)[plan.source] if len(plan) else plan.source
        item = np.array([ITEMSIZE[d] for d in dtypes], np.int64)[code] if len(plan) else plan.source
        keys = zip(self.rounds.number.tolist(), plan.source_rank.tolist(), strict=True)
        message = np.fromiter((self._index[key] for key in keys), np.int64, len(plan))
        strides = np.ones_like(plan.extent)
        strides[:, :-1] = np.cumprod(plan.extent[:, :0:-1], axis=1)[:, ::-1]
        columns = {c: getattr(plan, c) for c in Plan.COLUMNS}
        columns |= {
            "source": message * len(dtypes) + code,
            "source_offset": self.rounds.at,
            "source_strides": strides * item[:, None],
        }
        return Plan(plan.manifest, buffers, plan.targets, **columns)


class StagedIpcReader:
    """An engine rank's half, for one refit. `token` changes with any address."""

    def __init__(self, laid: StagedRounds, rings: dict[int, RingReader], told: dict[int, RingInfo]) -> None:
        self._laid, self._rings, self._told = laid, rings, told
        self.whole, self.steps = laid.whole, laid.steps
        self.received: dict[int, int] = {}
        self._here: dict[int, torch.Tensor] = {}
        self._next, self._deadline, self._done = 0, 0.0, False
        # Addresses change only with the rings themselves.
        self.token = tuple((s, ring.info.name) for s, ring in rings.items())

    def start(self, deadline: float) -> None:
        """Nothing to meet: the words of the rings say what is there. deadline: time.monotonic seconds."""
        self._deadline = deadline

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of a source buffer of `whole` or of a step, once they are there. Asking for a round gives up those before it.

        Raises WireError, DeadlineError where it does not come.
        """
        wanted = self._laid.message_of(buffer)
        while self._next <= wanted:
            self._fetch()
        held = self._laid.kept(wanted)
        if held is None:
            if wanted not in self._here:
                raise WireError("a round was asked for after a later one", where=WHERE, got=wanted, wanted=self._next - 1)
            held = self._here[wanted]
        return held

    def _fetch(self) -> None:
        number, source, nbytes = self._laid.messages[self._next]
        for old in [m for m in self._here if self._laid.messages[m][0] < number]:
            self._give_up(old)
        ring, count = self._rings[source], self._laid.counts[self._next]
        where = f"{WHERE}, engine rank {self._laid.rank} from trainer rank {source}"
        ring.words.wait(self._laid.rank, 0, count + 1, self._deadline, where)
        self._check(source)
        memory = ring.slot(self._laid.rank, count)[:nbytes]
        self.received[source] = self.received.get(source, 0) + nbytes
        self._here[self._next] = memory
        kept = self._laid.kept(self._next)
        if kept is not None:
            kept.copy_(memory)
            if kept.device.type == "cuda":
                torch.cuda.current_stream(kept.device).synchronize()
            self._give_up(self._next)
        self._next += 1

    def _give_up(self, message: int) -> None:
        """Let the trainer fill the slot again. Writers wait for their kernels, so nothing reads it any more."""
        del self._here[message]
        self._rings[self._laid.messages[message][1]].words.write(self._laid.rank, 1, self._laid.counts[message] + 1)

    def _check(self, source: int) -> None:
        got, wanted = self._rings[source].words.nonce, self._told[source].nonce
        if got != wanted:
            do = "refit once more"
            raise WireError(
                "the ring belongs to another refit", where=f"{WHERE}, trainer rank {source}", got=got, wanted=wanted, do=do
            )

    def confirm(self) -> None:
        """Raise WireError when rounds were left or a ring went on to another refit. Then the trainer may go on."""
        if self._next != len(self._laid.messages):
            raise WireError("the writers left rounds unread", where=WHERE, got=self._next, wanted=len(self._laid.messages))
        for source in self._rings:
            self._check(source)
        for message in list(self._here):
            self._give_up(message)
        self._done = True

    def close(self) -> None:
        """Stop the trainer unless everything was read."""
        if not self._done:
            for source, ring in self._rings.items():
                if ring.words.nonce == self._told[source].nonce:
                    ring.words.stop()
        self._here = {}


class _Kept:
    """What an engine rank keeps between refits."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.laid: StagedRounds | None = None
        self.rings: dict[int, RingReader] = {}

    def close(self) -> None:
        """Unmap every ring."""
        for ring in self.rings.values():
            ring.close()
        self.rings, self.plan, self.laid = {}, None, None


def shares(plan: Plan, sites: Sites, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]:
    """Cut the travel of the whole plan for the trainer's ranks."""
    travels = [rounds(plan.for_target(t), bucket_bytes) for t in range(len(sites.engines))]
    return [msgspec.msgpack.encode(_share(travels, plan, rank, bucket_bytes)) for rank in range(len(sites.trainers))]


def _share(travels: Sequence[Rounds], plan: Plan, rank: int, bucket_bytes: int) -> _Share:
    first = int(np.searchsorted([b.rank for b in plan.sources], rank))
    depth = plan.extent.shape[1]
    item = np.array([ITEMSIZE[b.dtype] for b in plan.sources], np.int64)
    none = np.zeros(0, np.int64)
    parts: list[tuple[Int, ...]] = [(none, none, none, none, np.zeros((0, 2), np.int64), *(np.zeros((0, depth), np.int64),) * 2)]
    slots = []
    for target, r in enumerate(travels):
        rows = np.flatnonzero(r.plan.source_rank == rank)
        rows = rows[np.lexsort((r.at[rows], r.number[rows]))]
        p = r.plan
        place = np.stack([p.source_offset[rows], item[p.source[rows]]], axis=1)
        parts.append(
            (
                np.full(len(rows), target),
                r.number[rows],
                p.source[rows] - first,
                r.at[rows],
                place,
                p.extent[rows],
                p.source_strides[rows],
            )
        )
        slots.append(max((m.nbytes for found in r.messages for m in found if m.source == rank), default=0))
    columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
    order = np.lexsort((columns[0], columns[1]))
    return _Share(len(travels), bucket_bytes, slots, [pack(c[order].astype(np.int64)) for c in columns])


def open_sender(rank: int, share: bytes, tensors: Sequence[torch.Tensor]) -> StagedSender:
    """Allocate and export this rank's ring. Raises WireError when there is no room."""
    return StagedSender(rank, msgspec.msgpack.decode(share, type=_Share), tensors)


def info(parts: Sequence[bytes]) -> IpcStagedInfo:
    """The message for `update_weights`."""
    decoded = [msgspec.msgpack.decode(p, type=_Part) for p in parts]
    return IpcStagedInfo(rings=[p.ring for p in decoded], bucket_bytes=decoded[0].bucket_bytes, engines=decoded[0].engines)


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> StagedIpcReader:
    """Map the rings that this rank's plan reads, and check that they belong to this refit. Raises ConfigError, WireError."""
    told = update.ipc_staged
    if told is None:
        raise ConfigError("wire ipc_staged needs the field ipc_staged", where="update_weights", do="pass what the sender made")
    ranks = {b.rank for b in plan.targets}
    if ranks and (max(ranks) >= told.engines or told.bucket_bytes < 8):
        raise ConfigError(
            "this rank's number does not fit the message",
            where=WHERE,
            got=sorted(ranks),
            wanted=f"below {told.engines}",
            do="prepare again",
        )
    held = kept.setdefault("ipc_staged", _Kept())
    on_gpu = any(r.handle for r in told.rings)
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("the trainer's ring is on a GPU and this engine has none", where=WHERE, do="use the wire shm")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if held.laid is None or held.plan is not plan:
        held.close()
        held.plan, held.laid = plan, StagedRounds(plan, told.bucket_bytes, device)
    by_rank = {r.rank: r for r in told.rings}
    sources = sorted({source for _, source, _ in held.laid.messages})
    missing = [s for s in sources if s not in by_rank]
    if missing:
        raise WireError("no ring was named for trainer ranks that the plan reads", where=WHERE, got=missing, do="prepare again")
    for source in sources:
        ring, now = held.rings.get(source), by_rank[source]
        if ring is None or msgspec.structs.replace(ring.info, nonce=0) != msgspec.structs.replace(now, nonce=0):
            if ring is not None:
                ring.close()
            held.rings[source] = RingReader(now, device)
    reader = StagedIpcReader(held.laid, {s: held.rings[s] for s in sources}, by_rank)
    for source in sources:
        reader._check(source)
    return reader


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
