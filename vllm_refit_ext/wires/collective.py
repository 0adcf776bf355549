"""Wire `collective`: shard to shard over torch.distributed, NCCL between GPUs and gloo between CPUs, with the same code.

For trainer and engines on different GPUs or hosts. Every trainer rank packs exactly the bytes that the plan takes from it and
sends them to the engine rank that needs them. Nothing is gathered and nothing is broadcast; all parameters are sent this way.

A refit goes through these steps, each with the refit's deadline:

1. Engine ranks check everything they can, agree inside their engine, then join the trainer's ranks in a rendezvous in the store.
2. If some rank has no group, or another one than the rest, all drop theirs and build a new one; a second rendezvous follows. So a
   rank that was restarted, or that failed in the last refit, is taken in again without a restart of the others.
3. Rounds are transferred while earlier ones are written (`staging`, `collective_move`).

Before the rendezvous no byte is sent and no weight is written. After any failure a rank drops its group.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import CollectiveInfo, UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import Column
from vllm_refit_ext.wires import BUCKET_BYTES, Sender
from vllm_refit_ext.wires.collective_group import Backend, Link
from vllm_refit_ext.wires.collective_move import Buffers, Packer, Unpacker
from vllm_refit_ext.wires.outgoing import Outgoing, outgoing, sent_by
from vllm_refit_ext.wires.rendezvous import CONNECT_S, Store, StoreServer, open_store
from vllm_refit_ext.wires.staging import rounds


class _SendTable(msgspec.Struct):
    """What a trainer rank must know: the sizes of both sides, and its pieces as in `Outgoing`, one column each."""

    trainers: int
    engines: int
    bucket_bytes: int
    pieces: list[Column]


class _Part(msgspec.Struct):
    """What a trainer rank sends to rank 0: its backend, and from rank 0 the message."""

    backend: Backend
    message: CollectiveInfo | None


def rank_names(trainers: int, engines: int) -> list[str]:
    """Names of all ranks of the group: trainer ranks, then engine ranks in the plan's numbers."""
    return [*(f"trainer rank {r}" for r in range(trainers)), *(f"engine rank {r}" for r in range(engines))]


class CollectiveSender(Sender):
    """A trainer rank's half. `begin` says where the store is; `transfer` joins the rendezvous and sends while the engines' update
    call runs."""

    sends = True

    def __init__(self, rank: int, table: _SendTable, backend: Backend) -> None:
        self._backend = backend
        self._link = Link(rank, rank_names(table.trainers, table.engines), backend)
        self._packer = Packer(Outgoing.read(table.pieces), table.trainers, table.bucket_bytes)
        self._link.peers = self._packer.peers
        self.staging_bytes = self._packer.staging_bytes
        # Rank 0 alone serves the store, and keeps its port from now on.
        self._server = StoreServer(open_store()) if rank == 0 else None
        self._message: CollectiveInfo | None = None
        if self._server is not None:
            sizes = {"trainers": table.trainers, "engines": table.engines, "bucket_bytes": table.bucket_bytes}
            host, port = self._server.address
            self._message = CollectiveInfo(host=host, port=port, backend=backend, **sizes)
            deadline = time.monotonic() + CONNECT_S
            store = Store(*self._server.address, deadline)
            store.put(_message_key(self._message), b"", deadline)

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Remember the live tensors; nothing is copied. Returns this rank's part of the message.

        Raises WireError for tensors that are not contiguous.
        """
        self._packer.look(tensors, self.addresses)
        return msgspec.msgpack.encode(_Part(self._backend, self._message))

    def transfer(self, session: str, info: CollectiveInfo, deadline: float) -> dict[int, int]:
        """Rendezvous with the engines, and send. deadline: time.monotonic seconds. Returns payload bytes by engine rank.

        An engine that is lost in the middle of a transfer over gloo leaves the others theirs; with NCCL all fail. Raises what
        stopped the rendezvous (on every rank the same), WireError or DeadlineError for bytes that were not transferred.
        """
        self._link.connect(info.host, info.port, deadline)
        if self._server is not None:
            assert self._link.store is not None
            self._server.forget(self._link.store, session, len(self._link.names), deadline)
        group = self._link.join(session, deadline)
        try:
            sent = self._packer.run(group, deadline)
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
        assert self._server is not None
        self._server.refuse(session, error, deadline)

    def close(self) -> None:
        """Leave the group and give the port back. Safe to call twice."""
        self._link.close()
        self._server = None


class CollectiveReader(Unpacker):
    """An engine rank's half, for one refit. Link, rounds and staging are kept for the next."""

    two_sided = True

    def __init__(self, link: Link, buffers: Buffers, session: str) -> None:
        super().__init__(buffers)
        self._link, self._session = link, session

    def start(self, deadline: float) -> None:
        """Rendezvous of all ranks. Raises the same error on all of them, before the first write."""
        self.begin(self._link.join(self._session, deadline), deadline)

    def close(self) -> None:
        """Leave the group unless everything came: what is still under way must reach nobody."""
        if not self._done:
            self._link.close()


class _Kept:
    """What an engine rank keeps between refits."""

    def __init__(self, info: CollectiveInfo, link: Link, plan: Plan, buffers: Buffers) -> None:
        self.info, self.link, self.plan, self.buffers = info, link, plan, buffers

    def close(self) -> None:
        self.link.close()


def send_tables(plan: Plan, hosts: Hosts, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]:
    """Cut the whole plan into rounds, and these into what each trainer rank sends. bucket_bytes: payload of a round and of a
    batch."""
    ranks, engines = len(hosts.trainers), len(hosts.engines)
    cuts = [rounds(plan.for_target(target), bucket_bytes) for target in range(engines)]
    columns = [outgoing(sent_by(cuts, rank), plan, rank) for rank in range(ranks)]
    return [msgspec.msgpack.encode(_SendTable(ranks, engines, bucket_bytes, pieces)) for pieces in columns]


def _message_key(message: CollectiveInfo) -> str:
    """Stands in the store while `message` is what the trainer says: a message that says anything else names no key."""
    return f"message/{hashlib.sha256(msgspec.msgpack.encode(message)).hexdigest()}"


def open_sender(rank: int, table: bytes, tensors: Sequence[torch.Tensor]) -> CollectiveSender:
    """Make this rank's half. Raises WireError (no address to listen on), ConfigError (tensors on several kinds of device)."""
    kinds = {t.device.type for t in tensors}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        got = ", ".join(sorted(kinds))
        raise ConfigError(
            "the trainer's tensors lie on several kinds of device", where=f"trainer rank {rank}", got=got, wanted="cpu or cuda"
        )
    return CollectiveSender(rank, msgspec.msgpack.decode(table, type=_SendTable), "nccl" if kinds == {"cuda"} else "gloo")


def info(parts: Sequence[bytes]) -> CollectiveInfo:
    """The message for `update_weights`. Raises ConfigError when trainer ranks hold their weights on different kinds of device."""
    decoded = [msgspec.msgpack.decode(p, type=_Part) for p in parts]
    backends = sorted({p.backend for p in decoded})
    if len(backends) > 1:
        raise ConfigError(
            "some trainer ranks hold their weights on a GPU and some do not", where="wire collective", got=", ".join(backends)
        )
    assert decoded[0].message is not None
    return decoded[0].message


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> CollectiveReader:
    """Check the message, reach the store, and lay out the rounds. Raises ConfigError, WireError, DeadlineError."""
    message = update.collective
    if message is None:
        raise ConfigError(
            "wire collective needs the field collective", where="update_weights", do="pass what the sender's wire returned"
        )
    ranks = {b.rank for b in plan.targets}
    if len(ranks) != 1 or not 0 <= (rank := ranks.pop()) < message.engines:
        got = f"targets of engine ranks {sorted({b.rank for b in plan.targets})} of {message.engines}"
        raise ConfigError("this rank's number does not fit the message", where="wire collective", got=got, do="prepare again")
    sources = 1 + max((b.rank for b in plan.sources), default=-1)
    problems = _problems(message, sources)
    if problems:
        raise ConfigError.of(problems)
    deadline = time.monotonic() + min(CONNECT_S, update.deadline_s)
    last: _Kept | None = kept.get("collective")
    if last is not None and last.info == message and last.plan is plan:
        last.link.connect(message.host, message.port, deadline)
        return CollectiveReader(last.link, last.buffers, update.session)
    known = last is not None and last.info == message
    link = (
        last.link
        if last is not None and known
        else Link(message.trainers + rank, rank_names(message.trainers, message.engines), message.backend)
    )
    device = torch.device("cuda", torch.cuda.current_device()) if message.backend == "nccl" else torch.device("cpu")
    try:
        link.connect(message.host, message.port, deadline)
        assert link.store is not None
        link.store.take(_message_key(message), deadline)
        buffers = Buffers(rounds(plan, message.bucket_bytes), device)
    except BaseException:
        if not known:
            link.close()
        raise
    link.peers = buffers.peers
    if last is not None and not known:
        last.close()
    kept["collective"] = _Kept(message, link, plan, buffers)
    return CollectiveReader(link, buffers, update.session)


def _problems(message: CollectiveInfo, sources: int) -> list[Problem]:
    problems = []
    where = "wire collective"
    if message.backend == "nccl" and not torch.cuda.is_available():
        problems.append(Problem("the trainer sends from GPUs and this engine has none", where, "cpu", "cuda"))
    if sources > message.trainers:
        problems.append(
            Problem(
                "the plan reads from more trainer ranks than take part",
                where,
                str(sources),
                str(message.trainers),
                "prepare again",
            )
        )
    if message.bucket_bytes < 8:
        problems.append(Problem("a bucket must hold an element", where, str(message.bucket_bytes), "at least 8 bytes"))
    return problems
