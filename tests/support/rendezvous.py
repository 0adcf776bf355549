"""Wire `collective` in one process: one thread a rank, over transports that are as strict as a collective can be."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from unittest import mock

import numpy as np
import torch

from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires.collective_move import OPERATIONS, Buffers, Packer, Unpacker
from vllm_refit_ext.wires.outgoing import Outgoing, outgoing, sent_by
from vllm_refit_ext.wires.staging import ALIGN, rounds


class Rendezvous:
    """Transports that behave like the strictest of collectives: a rank's batches run one after another, and an operation ends
    when both its ends have reached it. Whatever could make ranks wait for each other, does."""

    def __init__(self) -> None:
        self.ready = threading.Condition()
        self.offers: dict[tuple[int, int, int], torch.Tensor] = {}
        self.taken: set[tuple[int, int, int]] = set()
        self.bytes: dict[tuple[int, int], int] = defaultdict(int)
        self.largest = 0

    def rank(self, number: int) -> _End:
        return _End(self, number)


class _End:
    device = torch.device("cpu")
    independent = False

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rendezvous, self.rank = rendezvous, rank
        self.queue: list[_Batch] = []

    def post(self, sends, receives):
        assert 0 < len(sends) + len(receives) <= OPERATIONS
        batch = _Batch(self, list(sends), list(receives))
        self.queue.append(batch)
        return batch


class _Batch:
    def __init__(self, end, sends, receives) -> None:
        self.end, self.sends, self.receives = end, sends, receives

    def wait(self, deadline: float) -> None:
        while self in self.end.queue:
            self.end.queue[0].run(deadline)

    def run(self, deadline: float) -> None:
        rendezvous, me = self.end.rendezvous, self.end.rank
        with rendezvous.ready:
            keys = [(me, p.peer, p.tag) for p in self.sends]
            for key, p in zip(keys, self.sends, strict=True):
                assert key not in rendezvous.offers
                rendezvous.offers[key] = p.data
                rendezvous.bytes[key[:2]] += p.data.nbytes
            rendezvous.ready.notify_all()
            for p in self.receives:
                key = (p.peer, me, p.tag)
                self._until(lambda key=key: key in rendezvous.offers, deadline, key)
                assert rendezvous.offers[key].nbytes == p.data.nbytes
                p.data.copy_(rendezvous.offers.pop(key))
                rendezvous.taken.add(key)
                rendezvous.ready.notify_all()
            for key in keys:
                self._until(lambda key=key: key in rendezvous.taken, deadline, key)
        self.end.queue.pop(0)

    def _until(self, condition, deadline: float, key) -> None:
        if not self.end.rendezvous.ready.wait_for(condition, deadline - time.monotonic()):
            raise WireError("stuck", where=str(key))


def by_rank(plan: Plan, sources: list[torch.Tensor]) -> tuple[Plan, list[torch.Tensor]]:
    """The plan with source buffers in the order of their ranks, as senders have them, and with a name of its own for each target
    buffer. sources: the tensors of the source buffers."""
    order = sorted(range(len(plan.sources)), key=lambda i: plan.sources[i].rank)
    place = {i: k for k, i in enumerate(order)}
    columns = {c: getattr(plan, c) for c in Plan.COLUMNS}
    columns["source"] = np.array([place[i] for i in plan.source.tolist()], np.int64)
    targets = [Buffer(f"{i}", b.rank, b.dtype, b.shape, b.layout) for i, b in enumerate(plan.targets)]
    return Plan(plan.manifest, [plan.sources[i] for i in order], targets, **columns), [sources[i] for i in order]


def own_plan(plan: Plan, rank: int) -> Plan:
    """The plan as engine rank `rank` makes it, with its own buffers alone."""
    mine = plan.for_target(rank)
    own = [i for i, b in enumerate(plan.targets) if b.rank == rank]
    place = np.full(len(plan.targets), -1, np.int64)
    place[own] = np.arange(len(own))
    columns = {c: getattr(mine, c) for c in Plan.COLUMNS} | {"target": place[mine.target]}
    return Plan(plan.manifest, plan.sources, [plan.targets[i] for i in own], **columns)


def run_transfer(
    plan: Plan,
    hosts: Hosts,
    sources: list[torch.Tensor],
    targets: dict[str, torch.Tensor],
    bucket: int,
    operations: int = OPERATIONS,
) -> dict[tuple[int, int], int]:
    """Send and write everything with one thread a rank. Returns bytes by (sending, receiving) group rank.

    plan: the joint one, its sources by rank. sources: their tensors. targets: tensors by the name of the target buffer.
    operations: most messages of a batch; with one, every message waits for the one before it.
    """
    with mock.patch("vllm_refit_ext.wires.collective_move.OPERATIONS", operations):
        return _run_transfer(plan, hosts, sources, targets, bucket)


def _run_transfer(
    plan: Plan, hosts: Hosts, sources: list[torch.Tensor], targets: dict[str, torch.Tensor], bucket: int
) -> dict[tuple[int, int], int]:
    trainers, engines = len(hosts.trainers), len(hosts.engines)
    rendezvous = Rendezvous()
    failures: list[BaseException] = []
    first = np.searchsorted([b.rank for b in plan.sources], np.arange(trainers + 1))
    cuts = [rounds(plan.for_target(t), bucket) for t in range(engines)]
    parts = [outgoing(sent_by(cuts, rank), plan, rank) for rank in range(trainers)]
    packers = [Packer(Outgoing.read(p), trainers, bucket) for p in parts]
    readers = [Unpacker(Buffers(rounds(own_plan(plan, t), bucket), torch.device("cpu"))) for t in range(engines)]
    peers = [*(p.peers for p in packers), *(r.buffers.peers for r in readers)]
    assert all(rank in peers[other] for rank, mine in enumerate(peers) for other in mine), "both ends connect"
    deadline = time.monotonic() + 20

    def send(rank: int) -> None:
        packers[rank].look(sources[first[rank] : first[rank + 1]])
        sent = packers[rank].run(rendezvous.rank(rank), deadline)
        assert sent == {t: n for t in range(engines) if (n := rendezvous.bytes.get((rank, trainers + t), 0))}

    def receive(rank: int) -> None:
        reader = readers[rank]
        reader.begin(rendezvous.rank(trainers + rank), deadline)
        for step in reader.steps:
            InPlaceWriter(step, targets).write(reader)
        reader.confirm()
        for peer, nbytes in reader.received.items():
            assert rendezvous.bytes[peer, trainers + rank] == nbytes
        assert sum(reader.received.values()) == int(plan.for_target(rank).nbytes.sum())

    def guarded(work, rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:  # noqa: BLE001 - raised in the test
            failures.append(error)

    for packer in packers:
        assert packer.staging_bytes <= 2 * (max(bucket, 4) + ALIGN * (OPERATIONS + 1))
    threads = [threading.Thread(target=guarded, args=(send, r), daemon=True) for r in range(trainers)]
    threads += [threading.Thread(target=guarded, args=(receive, r), daemon=True) for r in range(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if failures:
        raise failures[0]
    assert not any(t.is_alive() for t in threads)
    return dict(rendezvous.bytes)
