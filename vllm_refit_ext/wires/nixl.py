"""Wire `nixl`: engine ranks READ the trainer's own parameters over NIXL, one-sided, from any host that UCX reaches.

For trainer and engine on different hosts, in a push and for engines that take what is published. A trainer rank registers the
allocations that its parameters lie in and tells where each buffer begins; an engine rank READs what its plan names into two
staging buffers, one while the other is written into the engine. What it reads in a round from one trainer rank is one prepared
list of strided rows, made at the first refit and used again until that rank registers its memory anew.

Registered memory must not be freed. A trainer that stays resident says so and registers once; of any other the memory is
registered at the begin of a refit and given back at its end.

Each trainer rank has a word beside its parameters. `begin` writes a new nonce there and sends it too; an engine READs it before
the first byte and after the last one, so memory that is not of this refit, or that the trainer has begun to change, is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import ConfigError, Problem, WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import NixlInfo, NixlRank, UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import pack, unpack
from vllm_refit_ext.wires import BUCKET_BYTES, cuda_ipc
from vllm_refit_ext.wires.boxes import wait_for
from vllm_refit_ext.wires.nixl_agent import Agent, Read, ranges_of, rows_of
from vllm_refit_ext.wires.nixl_send import WHERE, Export, NixlSender, Part, SendTable
from vllm_refit_ext.wires.staging import RING, BucketReader, RoundBuffers, rounds

HIGHEST = 1 << 62
"""No address reaches it, so sums with offsets stay exact."""


class NixlRounds(RoundBuffers):
    """The moves into one engine rank with staging as their source: what does not change with the trainer's memory."""

    def __init__(self, plan: Plan, bucket_bytes: int, device: torch.device) -> None:
        self.key, self.token = (bucket_bytes, device), object()
        self.cut = cut = rounds(plan, bucket_bytes)
        self.at, sizes = cut.staged(), [cut.size(r) for r in range(len(cut.messages))]
        super().__init__(cut, self.at, sizes, lambda nbytes: _allocate(nbytes, device), device)
        self.sources: list[int] = np.unique(plan.source_rank).tolist()
        self._words = torch.zeros(len(self.sources), dtype=torch.int64)

    def register(self, agent: Agent) -> None:
        """Make the staging known to `agent`. Raises WireError."""
        for memory in ([self._words], [*self.slots, *self.kept.values()]):
            if filled := [t for t in memory if t.nbytes]:
                device = filled[0].device
                agent.register(ranges_of([t.data_ptr() for t in filled], [t.nbytes for t in filled], device))

    def word(self, rank: int) -> int:
        """What was last read of a trainer rank's word."""
        return int(self._words[self.sources.index(rank)])

    def look(self, rank: int, export: Export, agent: Agent, where: str) -> Read:
        """The READ of a trainer rank's word."""
        here = self._words[self.sources.index(rank) :].data_ptr()
        remote, local = (np.array([[address, 8, 0, 8, 1]], np.int64) for address in (export.word, here))
        return Read(agent, export.agent, remote, local, self._words.device, "DRAM", where)

    def reads(self, rank: int, export: Export, address: Int, agent: Agent, where: str) -> list[Read | None]:
        """What is read from trainer rank `rank`, by round. address: int64 [buffers of the plan], in that process."""
        p = self.cut.plan
        item = np.array([ITEMSIZE[b.dtype] for b in p.sources], np.int64)
        found: list[Read | None] = []
        for number in range(len(self.sizes)):
            rows = np.flatnonzero((self.cut.number == number) & (p.source_rank == rank))
            if not len(rows):
                found.append(None)
                continue
            source = p.source[rows]
            local = self.place(number).data_ptr() + self.at[rows]
            remote = address[source] + p.source_offset[rows]
            far, near = rows_of(remote, local, p.extent[rows], p.source_strides[rows], item[source])
            there = np.insert(far, 2, export.device, axis=1)
            here = np.stack([near, far[:, 1], np.full_like(near, self.device.index or 0), far[:, 1], far[:, 3]], axis=1)
            found.append(Read(agent, export.agent, there, here, self.device, export.memory, where))
        return found


class _Peer:
    """A trainer rank as this engine rank reads it. look: the READ of its word. reads: by round of `laid`."""

    def __init__(self, agent: Agent, epoch: str, export: Export) -> None:
        self.epoch, self.export, self._agent = epoch, export, agent
        self.laid: NixlRounds | None = None
        self.look: Read | None = None
        self.reads: list[Read | None] = []

    def bind(self, laid: NixlRounds, rank: int, first: int, count: int, where: str) -> None:
        """Prepare what is read of it. first, count: its buffers in the plan. Raises WireError where they lie elsewhere."""
        self.release()
        table = unpack(self.export.address)
        address = np.zeros(len(laid.cut.plan.sources), np.int64)
        if table.shape == (count,):
            address[first : first + count] = table
        read = np.unique(laid.cut.plan.source[laid.cut.plan.source_rank == rank])
        bad = (address[read] <= 0) | (address[read] >= HIGHEST)
        if table.shape != (count,) or bad.any():
            got = f"{table.size} addresses, {int(bad.sum())} unknown"
            raise WireError("its memory does not fit the plan", where=where, got=got, wanted=count, do="prepare again")
        self.laid = laid
        self.look = laid.look(rank, self.export, self._agent, where)
        self.reads = laid.reads(rank, self.export, address, self._agent, where)

    def release(self) -> None:
        """Let go of what is prepared; memory that a READ may still write to, as it can't be aborted, is never used again."""
        reads = [r for r in (self.look, *self.reads) if r is not None]
        if left := [r for r in reads if not r.close()]:
            _LEFT.append((self.laid, left))
        self.look, self.reads, self.laid = None, [], None


_LEFT: list[object] = []
"""What READs that could not be aborted may still write to, for as long as this process lives."""


class _Kept:
    """What an engine rank keeps between refits."""

    def __init__(self) -> None:
        self.agent = Agent("engine", WHERE)
        self.peers: dict[int, _Peer] = {}
        self._plan: Plan | None = None
        self._laid: NixlRounds | None = None

    def lay(self, plan: Plan, bucket_bytes: int, device: torch.device) -> NixlRounds:
        """The rounds of `plan`, made anew where it is another. Raises WireError."""
        if self._laid is None or self._plan is not plan or self._laid.key != (bucket_bytes, device):
            for peer in self.peers.values():
                peer.release()
            self.agent.deregister()
            self._laid = None
            made = NixlRounds(plan, bucket_bytes, device)
            made.register(self.agent)
            self._laid, self._plan = made, plan
        return self._laid

    def know(self, laid: NixlRounds, rank: int, sent: NixlRank | None, first: int, count: int) -> None:
        """Be ready to read from a trainer rank. first, count: its buffers in the plan. Raises WireError."""
        where = f"{WHERE}, engine rank {laid.rank} from trainer rank {rank}"
        if sent is None or not sent.epoch:
            raise WireError("it said nothing of its memory", where=where, do="call begin on every trainer rank")
        where += f" on {sent.host}" * bool(sent.host)
        peer = self.peers.get(rank)
        if peer is not None and peer.epoch == sent.epoch and peer.laid is laid:
            return
        if peer is None or peer.epoch != sent.epoch:
            if sent.export is None:
                do = "refit again; it is told after a failure"
                raise WireError("its registered memory is not known here", where=where, got=f"epoch {sent.epoch}", do=do)
            self.forget([rank])
            export = _export(sent.export, where)
            self.agent.add(export.agent, export.metadata, where)
            peer = self.peers[rank] = _Peer(self.agent, sent.epoch, export)
        try:
            peer.bind(laid, rank, first, count, where)
        except WireError:
            self.forget([rank])
            raise

    def forget(self, ranks: Sequence[int]) -> None:
        """Leave these trainer ranks."""
        for rank in ranks:
            if (peer := self.peers.pop(rank, None)) is not None:
                peer.release()
                self.agent.remove(peer.export.agent)

    def close(self) -> None:
        """Leave all, and give back the staging."""
        self.forget(list(self.peers))
        self.agent.close()
        self._plan = self._laid = None


class NixlReader(BucketReader):
    """An engine rank's half, for one refit. `token` changes with any address of the staging."""

    def __init__(self, laid: NixlRounds, kept: _Kept, ranks: dict[int, NixlRank], deadline: float) -> None:
        """ranks: what those said that the plan reads. deadline: time.monotonic seconds."""
        super().__init__(laid, WHERE)
        self._laid, self._kept, self._ranks, self._deadline = laid, kept, ranks, deadline
        self.token, self._posted = laid.token, 0

    def start(self, deadline: float) -> None:
        """Nothing is read before it is asked for. deadline: time.monotonic seconds."""
        self._deadline = deadline

    def _reads(self, number: int) -> dict[int, Read]:
        return {rank: r for rank in self._ranks if (r := self._kept.peers[rank].reads[number]) is not None}

    def _bring(self, number: int) -> torch.Tensor:
        """This round and the one behind it are asked for, then it is waited for."""
        wait_for(self._laid.device)  # what was launched may still read the memory that is filled now
        while self._posted < min(number + RING, len(self._laid.sizes)):
            for read in self._reads(self._posted).values():
                read.post()
            self._posted += 1
        for rank, read in self._reads(number).items():
            read.wait(self._deadline)
            self.received[rank] = self.received.get(rank, 0) + read.nbytes
        return self._laid.place(number)

    def look(self) -> None:
        """Read all words and compare. Raises WireError naming every rank whose memory is not that of this refit."""
        looks = {rank: look for rank in self._ranks if (look := self._kept.peers[rank].look) is not None}
        problems: list[Problem] = []
        for look in looks.values():
            look.post()
        for rank, look in looks.items():
            look.wait(self._deadline)
            got, wanted = self._laid.word(rank), self._ranks[rank].nonce
            if got != wanted:
                what, do = "the trainer's memory is not that of this refit", "refit once more; hold the weights still meanwhile"
                problems.append(Problem(what, look.where, f"nonce {got}", str(wanted), do))
        if problems:
            raise WireError.of(problems)

    def confirm(self) -> None:
        """Raise WireError when rounds were left, or a trainer rank has begun another refit or dropped its memory meanwhile."""
        self._check_read()
        self.look()

    def close(self) -> None:
        """Abort what is under way, and leave the trainer ranks that did not give it."""
        stuck = [
            rank
            for rank in self._ranks
            if (peer := self._kept.peers.get(rank)) and any(r and r.active for r in (peer.look, *peer.reads))
        ]
        self._kept.forget(stuck)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Staging, uint8. On a GPU by cudaMalloc: what torch's allocator maps piece by piece is slow to reach or can't be."""
    if device.type != "cuda" or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    return cuda_ipc.as_tensor(cuda_ipc.allocate(nbytes, device), nbytes, device)


def send_tables(plan: Plan, hosts: Hosts, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]:
    """Which of its buffers each rank must register."""
    return [msgspec.msgpack.encode(SendTable(pack(read), bucket_bytes)) for read in plan.read_buffers(len(hosts.trainers))]


def open_sender(rank: int, table: bytes, tensors: Sequence[torch.Tensor]) -> NixlSender:
    """This rank's half. Memory is registered at the first `begin`. Raises ConfigError without NIXL, WireError."""
    read = msgspec.msgpack.decode(table, type=SendTable)
    return NixlSender(rank, unpack(read.used), read.bucket_bytes)


def info(parts: Sequence[bytes]) -> NixlInfo:
    """The message for `update_weights`."""
    decoded = [msgspec.msgpack.decode(p, type=Part) for p in parts]
    return NixlInfo(ranks=[p.rank for p in decoded], bucket_bytes=decoded[0].bucket_bytes)


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> NixlReader:
    """Know the trainer ranks that this rank's plan reads, and check that their memory is that of this refit. Raises ConfigError,
    WireError with every problem."""
    message = update.nixl
    if message is None:
        raise ConfigError("wire nixl needs the field nixl", where="update_weights", do="pass what the sender made")
    if message.bucket_bytes < 8:
        raise ConfigError("a bucket is too small", where=WHERE, got=message.bucket_bytes, wanted="at least 8 bytes")
    by_rank = {r.rank: r for r in message.ranks}
    if len(by_rank) < len(message.ranks):
        raise WireError("one trainer rank is named twice", where=WHERE, got=[r.rank for r in message.ranks])
    if "nixl" not in kept:
        kept["nixl"] = _Kept()
    mine: _Kept = kept["nixl"]
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    laid = mine.lay(
        plan, message.bucket_bytes, torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    )
    owner = np.array([b.rank for b in plan.sources], np.int64)
    problems: list[Problem] = []
    for rank in laid.sources:
        mask = owner == rank
        try:
            mine.know(laid, rank, by_rank.get(rank), int(np.argmax(mask)), int(mask.sum()))
        except WireError as error:
            problems += error.problems
    if problems:
        raise WireError.of(problems, f"wire nixl: {len(problems)} problem(s), nothing was written")
    reader = NixlReader(laid, mine, {r: by_rank[r] for r in laid.sources}, time.monotonic() + update.deadline_s)
    try:
        reader.look()
    except BaseException:
        reader.close()
        raise
    return reader


def _export(raw: bytes, where: str) -> Export:
    try:
        export = msgspec.msgpack.decode(raw, type=Export)
        unpack(export.address)
        if not 0 < export.word < HIGHEST or not 0 <= export.device < 1 << 16:
            raise ValueError("a number lies outside of what is possible")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("its export can't be read", where=where, got=error) from None
    return export
