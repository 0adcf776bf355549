"""Wire `collective`: shard to shard over torch.distributed, NCCL between GPUs and gloo between CPUs, with the same code.

For trainer and engines on different GPUs or hosts. Every trainer rank packs exactly the bytes that the plan takes from it and
sends them to the engine rank that needs them. Nothing is gathered and nothing is broadcast; all parameters travel this way.

A refit goes through these steps, each with the refit's deadline:

1. Engine ranks check everything they can, agree inside their engine, then meet the trainer's ranks in the store. A rank that
   shares boxes with others of its site has fetched its table from there before, once a plan (`collective_forward`).
2. If some rank has no group, or another one than the rest, all drop theirs and build a new one; a second meeting follows. So a
   rank that was restarted, or that failed in the last refit, is taken in again without a restart of the others.
3. Rounds travel while earlier ones are written (`collective_rounds`, `collective_travel`, `collective_move`).

Until all have met, no byte travels and no weight is written. After any failure a rank drops its group.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, WireError
from vllm_refit_ext.core.messages import CollectiveInfo, UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.sites import Sites
from vllm_refit_ext.core.table import Column, pack, unpack
from vllm_refit_ext.wires import BUCKET_BYTES, Reader, Sender
from vllm_refit_ext.wires.collective_forward import sent_by, travels
from vllm_refit_ext.wires.collective_group import Backend, Group
from vllm_refit_ext.wires.collective_host import Host
from vllm_refit_ext.wires.collective_meet import CONNECT_S, Store, open_store
from vllm_refit_ext.wires.collective_move import Outgoing, Packer, Unpacker
from vllm_refit_ext.wires.collective_rounds import rounds
from vllm_refit_ext.wires.collective_table import pack_table, read_table
from vllm_refit_ext.wires.collective_travel import Travel, travel_alone


class _Share(msgspec.Struct):
    """What a trainer rank must know: the sizes of both sides, and its pieces as in `Outgoing`, one column each. tables, on rank
    0: by engine rank what `read_table` reads, for those that share; forwarding names them, empty where there are none."""

    trainers: int
    engines: int
    bucket_bytes: int
    pieces: list[Column]
    forwarding: str = ""
    tables: dict[int, bytes] = {}


class _Part(msgspec.Struct):
    """What a trainer rank tells rank 0: how it can travel, and from rank 0 where the store is."""

    backend: Backend
    trainers: int
    engines: int
    bucket_bytes: int
    forwarding: str
    host: str = ""
    port: int = 0

    def message(self) -> CollectiveInfo:
        """Rank 0's, as the message."""
        return CollectiveInfo(**msgspec.structs.asdict(self))


def rank_names(trainers: int, engines: int) -> list[str]:
    """Names of all ranks of the group: trainer ranks, then engine ranks in the plan's numbers."""
    return [*(f"trainer rank {r}" for r in range(trainers)), *(f"engine rank {r}" for r in range(engines))]


class Link:
    """One rank's ties to the others: the store and the group, kept from refit to refit. peers: ranks that it sends to or receives
    from."""

    def __init__(self, rank: int, names: Sequence[str], backend: Backend, wire: str = "collective") -> None:
        self.rank, self.names, self.backend, self._wire = rank, list(names), backend, wire
        self.peers: set[int] = set()
        self.store: Store | None = None
        self.group: Group | None = None
        self.broken = False
        """Whether a pair of the group has failed while others went on, so that it must not be used again."""

    def connect(self, host: str, port: int, deadline: float) -> None:
        """Reach the store. Raises WireError, DeadlineError."""
        if self.store is None:
            self.store = Store(host, port, deadline, self._wire)

    def join(self, session: str, deadline: float) -> Group:
        """Meet all ranks for refit `session`; make a new group if not all hold the same one. All ranks raise the same error."""
        assert self.store is not None
        try:
            held = self.group.name if self.group is not None and not self.broken else ""
            words = self.store.meet(f"{session}/ready", self.rank, self.names, held.encode(), deadline)
            if not held or len(set(words)) > 1:
                self.drop()
                self.group = self._new_group(session, deadline)
        except RefitError:
            self.close()
            raise
        assert self.group is not None
        return self.group

    def _new_group(self, session: str, deadline: float) -> Group:
        assert self.store is not None
        key, group = f"{session}/joined", None
        try:
            group = Group(session, self.store, self.rank, self.names, self.backend, deadline)
            group.connect(self.peers, deadline)
        except RefitError as error:
            if group is not None:
                group.close()
            raise self.store.stop(key, error, deadline + CONNECT_S) from None
        try:
            self.store.meet(key, self.rank, self.names, b"", deadline)
        except RefitError:
            group.close()
            raise
        return group

    def drop(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.close()
        self.group, self.broken = None, False

    def close(self) -> None:
        """Leave the group and the store."""
        self.drop()
        self.store = None


class CollectiveSender(Sender):
    """A trainer rank's half. `begin` says where to meet, `transfer` meets and sends while the engines' update call runs."""

    sends = True

    def __init__(self, rank: int, share: _Share, backend: Backend) -> None:
        self._share, self._backend = share, backend
        self._link = Link(rank, rank_names(share.trainers, share.engines), backend)
        self._packer = Packer(Outgoing(*(unpack(c) for c in share.pieces)), share.trainers, share.bucket_bytes)
        self._link.peers = self._packer.peers
        # The port is held from now on, by rank 0 alone.
        self._host = Host(open_store()) if rank == 0 else None
        self._tensors: list[torch.Tensor] = []
        if self._host is not None:
            deadline = time.monotonic() + CONNECT_S
            store = Store(*self._host.address, deadline)
            store.put(_message_key(self._part().message()), b"", deadline)
            for target in range(share.engines) if share.tables else ():
                store.put(_table_key(share.forwarding, target), share.tables.get(target, b""), deadline)
            share.tables = {}

    def _part(self) -> _Part:
        host, port = self._host.address if self._host is not None else ("", 0)
        share = self._share
        return _Part(self._backend, share.trainers, share.engines, share.bucket_bytes, share.forwarding, host, port)

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Remember the live tensors; nothing is copied. Returns this rank's part of the message.

        Raises WireError for tensors that are not contiguous.
        """
        self._tensors = list(tensors)
        self._packer.look(self._tensors)
        return msgspec.msgpack.encode(self._part())

    def transfer(self, session: str, info: CollectiveInfo, deadline: float) -> dict[int, int]:
        """Meet the engines and send. deadline: time.monotonic seconds. Returns payload bytes by engine rank.

        An engine that is lost while bytes travel over gloo leaves the others theirs; with NCCL all fail.
        Raises what stopped the meeting (on every rank the same), WireError or DeadlineError for bytes that did not travel.
        """
        self._link.connect(info.host, info.port, deadline)
        if self._host is not None:
            assert self._link.store is not None
            self._host.forget(self._link.store, session, len(self._link.names), deadline)
        group = self._link.join(session, deadline)
        try:
            sent = self._packer.run(group, self._tensors, deadline)
        except BaseException:
            self._link.drop()
            raise
        if self._packer.lost:
            # The group stays until the next one: closing it now could cut off what the other engines have still to read.
            self._link.broken = True
            raise WireError.of([p for error in self._packer.lost.values() for p in error.problems])
        return sent

    def refuse(self, session: str, error: RefitError, deadline: float, ranks: Sequence[int] = ()) -> None:
        """Tell all that wait for refit `session` to begin that it will not: an engine refused it. Too late, it does nothing."""
        assert self._host is not None
        self._host.refuse(session, error, deadline)

    def close(self) -> None:
        """Leave the group and give the port back. Safe to call twice."""
        self._link.close()
        self._host = None


class CollectiveReader(Reader):
    """An engine rank's half, for one refit. Link, rounds and staging are kept for the next."""

    meets = True
    ordered = True

    def __init__(self, link: Link, unpacker: Unpacker, session: str) -> None:
        self._link, self._unpacker, self._session = link, unpacker, session
        self.whole, self.steps = unpacker.whole, unpacker.steps
        # Staging never moves, so a writer that bound its addresses once need not do it again.
        self.token = unpacker.token
        self._done = False

    @property
    def received(self) -> Mapping[int, int]:  # type: ignore[override]
        """Payload bytes by trainer rank, counted as they came."""
        return self._unpacker.received

    @property
    def forwarded(self) -> Mapping[int, int]:  # type: ignore[override]
        """Payload bytes by engine rank of this site, which handed them on."""
        return self._unpacker.forwarded

    def start(self, deadline: float) -> None:
        """Meet all ranks. Raises on all ranks alike, before the first write."""
        group = self._link.join(self._session, deadline)
        self._unpacker.begin(group, deadline)

    def memory(self, buffer: int) -> torch.Tensor:
        """Staging that source `buffer` of `whole` or of a step lies in, once it is filled."""
        return self._unpacker.memory(buffer)

    def fetch(self, plan: Plan) -> None:
        """Wait for all that a step reads."""
        for buffer in np.unique(plan.source).tolist():
            self.memory(buffer)

    def confirm(self) -> None:
        """Wait until others have what this rank hands on. Raises WireError when rounds were left, DeadlineError."""
        if not self._unpacker.done:
            raise WireError("the writers left rounds unread", where="wire collective")
        self._unpacker.finish()
        self._done = True

    def close(self) -> None:
        """Leave the group unless everything came: what is still under way must reach nobody."""
        if not self._done:
            self._link.close()


class _Kept:
    """What an engine rank keeps between refits."""

    def __init__(self, info: CollectiveInfo, link: Link, plan: Plan, unpacker: Unpacker) -> None:
        self.info, self.link, self.plan, self.unpacker = info, link, plan, unpacker

    def close(self) -> None:
        self.link.close()


def shares(plan: Plan, sites: Sites, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]:
    """Cut the travel of the whole plan for the trainer's ranks. bucket_bytes: payload of a round and of a batch."""
    ranks, engines = len(sites.trainers), len(sites.engines)
    found, shared = travels(plan, sites, bucket_bytes)
    tables = {rank: pack_table(mine, rank, plan.digest(rank)) for rank, mine in shared.items()}
    forwarding = hashlib.sha256(b"".join(tables.values())).hexdigest()[:16] if tables else ""
    return [
        msgspec.msgpack.encode(
            _Share(ranks, engines, bucket_bytes, _pieces(found, plan, rank), forwarding, tables if rank == 0 else {})
        )
        for rank in range(ranks)
    ]


def _pieces(found: Sequence[Travel], plan: Plan, rank: int) -> list[Column]:
    """The columns of `Outgoing` for one trainer rank."""
    first = int(np.searchsorted([b.rank for b in plan.sources], rank))
    depth = plan.extent.shape[1]
    parts: list[tuple[Int, ...]] = [(*(np.zeros(0, np.int64),) * 6, *(np.zeros((0, depth), np.int64),) * 2)]
    for target, travel, rows in sent_by(found, rank):
        p = travel.plan
        where = (np.full(len(rows), target, np.int64), np.array(travel.numbers, np.int64)[travel.number[rows]], travel.run[rows])
        parts.append(
            (*where, p.nbytes[rows], p.source[rows] - first, p.source_offset[rows], p.extent[rows], p.source_strides[rows])
        )
    columns = [np.concatenate(c) for c in zip(*parts, strict=True)]
    order = np.lexsort((columns[0], columns[1]))  # stable: the pieces of a message, and a target's runs, stay in their order
    return [pack(c[order]) for c in columns]


def _message_key(told: CollectiveInfo) -> str:
    """Stands in the store while `told` is what the trainer says: a message that says anything else names no key."""
    return f"message/{hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()}"


def _table_key(forwarding: str, target: int) -> str:
    return f"forward/{forwarding}/{target}"


def open_sender(rank: int, share: bytes, tensors: Sequence[torch.Tensor]) -> CollectiveSender:
    """Make this rank's half. Raises WireError (no address to listen on), ConfigError (tensors on several kinds of device)."""
    kinds = {t.device.type for t in tensors}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        got = ", ".join(sorted(kinds))
        raise ConfigError(
            "the trainer's tensors lie on several kinds of device", where=f"trainer rank {rank}", got=got, wanted="cpu or cuda"
        )
    return CollectiveSender(rank, msgspec.msgpack.decode(share, type=_Share), "nccl" if kinds == {"cuda"} else "gloo")


def info(parts: Sequence[bytes]) -> CollectiveInfo:
    """The message for `update_weights`. Raises ConfigError when trainer ranks hold their weights on different kinds of device."""
    decoded = [msgspec.msgpack.decode(p, type=_Part) for p in parts]
    backends = sorted({p.backend for p in decoded})
    if len(backends) > 1:
        raise ConfigError(
            "some trainer ranks hold their weights on a GPU and some do not", where="wire collective", got=", ".join(backends)
        )
    return decoded[0].message()


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> CollectiveReader:
    """Check the message, reach the store, and lay out the rounds. Raises ConfigError, WireError, DeadlineError."""
    told = update.collective
    if told is None:
        raise ConfigError(
            "wire collective needs the field collective", where="update_weights", do="pass what the sender's wire returned"
        )
    ranks = {b.rank for b in plan.targets}
    if len(ranks) != 1 or not 0 <= (rank := ranks.pop()) < told.engines:
        got = f"targets of engine ranks {sorted({b.rank for b in plan.targets})} of {told.engines}"
        raise ConfigError("this rank's number does not fit the message", where="wire collective", got=got, do="prepare again")
    sources = 1 + max((b.rank for b in plan.sources), default=-1)
    problems = _problems(told, sources)
    if problems:
        raise ConfigError.of(problems)
    deadline = time.monotonic() + min(CONNECT_S, update.deadline_s)
    held: _Kept | None = kept.get("collective")
    if held is not None and held.info == told and held.plan is plan:
        held.link.connect(told.host, told.port, deadline)
        return CollectiveReader(held.link, held.unpacker, update.session)
    known = held is not None and held.info == told
    link = (
        held.link
        if held is not None and known
        else Link(told.trainers + rank, rank_names(told.trainers, told.engines), told.backend)
    )
    device = torch.device("cuda", torch.cuda.current_device()) if told.backend == "nccl" else torch.device("cpu")
    try:
        link.connect(told.host, told.port, deadline)
        assert link.store is not None
        link.store.take(_message_key(told), deadline)
        unpacker = Unpacker(_travel(link, told, plan, rank, deadline), device)
    except BaseException:
        if not known:
            link.close()
        raise
    link.peers = unpacker.travel.peers
    if held is not None and not known:
        held.close()
    kept["collective"] = _Kept(told, link, plan, unpacker)
    return CollectiveReader(link, unpacker, update.session)


def _travel(link: Link, told: CollectiveInfo, plan: Plan, rank: int, deadline: float) -> Travel:
    """The travel of engine rank `rank`: as the trainer's table says if it has one, else found alone."""
    assert link.store is not None
    raw = link.store.take(_table_key(told.forwarding, rank), deadline) if told.forwarding else b""
    if not raw:
        return travel_alone(rounds(plan, told.bucket_bytes), told.trainers)
    return read_table(raw, plan, rank, told.trainers, told.engines, told.bucket_bytes)


def _problems(told: CollectiveInfo, sources: int) -> list[Problem]:
    problems = []
    where = "wire collective"
    if told.backend == "nccl" and not torch.cuda.is_available():
        problems.append(Problem("the trainer sends from GPUs and this engine has none", where, "cpu", "cuda"))
    if sources > told.trainers:
        problems.append(
            Problem(
                "the plan reads from more trainer ranks than take part", where, str(sources), str(told.trainers), "prepare again"
            )
        )
    if told.bucket_bytes < 8:
        problems.append(Problem("a bucket must hold an element", where, str(told.bucket_bytes), "at least 8 bytes"))
    return problems
