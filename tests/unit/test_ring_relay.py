"""Relaying over the strictest of transports: every plan arrives on every choice of hosts, in the memory that was promised, and
no two ranks wait for each other.

Rings and words are the real ones in shared memory. A rank's messages run one after another and only while it waits for them,
and one ends when both its ends have reached it: whatever could make ranks wait for each other, does.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.geometry import sources_and_targets
from tests.support.rendezvous import Rendezvous
from vllm_refit_ext.core.errors import ConfigError, WireError
from vllm_refit_ext.core.hosts import HOST_ID, Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import pack, unpack
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import ring, ring_send, shm
from vllm_refit_ext.wires.ring_relay import AHEAD
from vllm_refit_ext.wires.staging import ALIGN

WAIT_S = 30.0
BUCKETS = (24, 100, 1 << 20)


class StrictGroup:
    """`collective_group.Group` for one rank, over a rendezvous."""

    backend = "gloo"

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._end = rendezvous.rank(rank)

    def post(self, sends: Any, receives: Any) -> Any:
        batch = self._end.post(sends, receives)
        batch.ended = lambda: False
        assert len(self._end.queue) <= AHEAD + 1
        return batch


class StrictCommunicator:
    """`ring_relay.Communicator` of threads, whose rendezvous the test gives."""

    rendezvous: Rendezvous
    stopped = False
    address = ("", 0)

    def __init__(self, rank: int, ranks: int, backend: str, peers: set[int]) -> None:
        self.rank, self.peers = rank, peers

    def start(self, session: str, info: Any, deadline: float) -> StrictGroup | None:
        return StrictGroup(self.rendezvous, self.rank) if info.relays is not None else None

    def fail(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        return


class Ranks:
    """All ranks of a refit, as threads."""

    def __init__(self, plan: Plan, hosts: Hosts, bucket: int, sources: list[torch.Tensor]) -> None:
        self.plan, self.hosts, self.sources = plan, hosts, sources
        first = np.searchsorted([b.rank for b in plan.sources], np.arange(len(hosts.trainers) + 1))
        self.tensors = [sources[first[r] : first[r + 1]] for r in range(len(hosts.trainers))]
        shares = ring.send_tables(plan, hosts, bucket)
        self.senders = [ring.open_sender(r, share, self.tensors[r]) for r, share in enumerate(shares)]
        peers = [s._communicator.peers if s._communicator is not None else set() for s in self.senders]
        assert all(rank in peers[other] for rank, mine in enumerate(peers) for other in mine), "both ends connect"
        self.kept: list[dict[str, Any]] = [{} for _ in hosts.engines]
        self.plans = [own(plan, e) for e in range(len(hosts.engines))]

    def refit(self, targets: dict[str, torch.Tensor], pause: float = 0.0) -> list[dict[int, int]]:
        """One refit; what each engine rank received, by trainer rank. pause: most seconds that a reader dawdles at a step."""
        report = ring.info([s.begin(t) for s, t in zip(self.senders, self.tensors, strict=True)])
        update = UpdateInfo(wire="ring", version="v", session="s", ring=report)
        end, failures = time.monotonic() + WAIT_S, []
        received: list[dict[int, int]] = [{} for _ in self.plans]

        def read(rank: int) -> None:
            if not len(self.plans[rank]):
                return
            reader = ring.open_reader(update, self.plans[rank], self.kept[rank])
            reader.start(end)
            try:
                for step in reader.steps:
                    time.sleep(random.random() * pause)
                    for buffer in np.unique(step.source).tolist():
                        reader.memory(buffer)
                    InPlaceWriter(step, targets).write(reader)
                reader.confirm()
            finally:
                reader.close()
            received[rank] = reader.received

        def guarded(work: Any, *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised in the test
                failures.append(error)
                for sender in self.senders:
                    sender._ring.words.stop(sender._ring.info.epoch)

        jobs = [(s.transfer, "s", report, end) for s in self.senders] + [(read, e) for e in range(len(self.plans))]
        threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S + 5)
        if failures:
            raise failures[0]
        assert not any(t.is_alive() for t in threads)
        return received

    def close(self) -> None:
        for kept in self.kept:
            for held in kept.values():
                held.close()
        for sender in self.senders:
            sender.close()


def own(plan: Plan, rank: int) -> Plan:
    """The plan as engine rank `rank` makes it, with its own buffers alone."""
    share = plan.for_target(rank)
    mine = [i for i, b in enumerate(plan.targets) if b.rank == rank]
    place = np.full(len(plan.targets), -1, np.int64)
    place[mine] = np.arange(len(mine))
    columns = {c: getattr(share, c) for c in Plan.COLUMNS} | {"target": place[share.target]}
    return Plan(plan.manifest, plan.sources, [plan.targets[i] for i in mine], **columns)


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setattr(ring_send, "Communicator", StrictCommunicator)


def ordered(case: Any) -> tuple[Plan, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The plan with its sources sorted by rank, as senders number them; source tensors; targets by name."""
    plan = build_plan(case.manifest, case.sources, case.targets)
    order = sorted(range(len(plan.sources)), key=lambda i: plan.sources[i].rank)
    place = {i: k for k, i in enumerate(order)}
    columns = {c: getattr(plan, c) for c in Plan.COLUMNS} | {
        "source": np.array([place[i] for i in plan.source.tolist()], np.int64)
    }
    names = [str(i) for i in range(len(plan.targets))]
    targets = [Buffer(n, b.rank, b.dtype, b.shape, b.layout) for n, b in zip(names, plan.targets, strict=True)]
    plan = Plan(plan.manifest, [plan.sources[i] for i in order], targets, **columns)
    sources = [torch.from_numpy(case.source.contents[i].copy()) for i in order]
    return plan, sources, {n: torch.zeros(b.shape) for n, b in zip(names, plan.targets, strict=True)}


@given(sources_and_targets(), st.sampled_from(BUCKETS), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_every_geometry_arrives_on_any_hosts(case, bucket, count, chance):
    plan, sources, targets = ordered(case)
    trainers = 1 + max(b.rank for b in plan.sources)
    at = [chance.choice("abcd"[:count]) for _ in range(trainers)]
    hosts = Hosts(at, [chance.choice(at) for _ in range(case.target_ranks)])
    StrictCommunicator.rendezvous = rendezvous = Rendezvous()
    ranks = Ranks(plan, hosts, bucket, sources)
    try:
        check_memory(ranks, bucket)
        for scale in (2.0, 1.0):
            rendezvous.bytes.clear()
            rendezvous.taken.clear()
            for source, (_, i) in zip(sources, sorted((b.rank, i) for i, b in enumerate(case.source.buffers)), strict=True):
                source.copy_(torch.from_numpy(case.source.contents[i]) * scale)
            received = ranks.refit(targets)
    finally:
        ranks.close()
    case.check_targets([targets[str(i)].numpy().view(np.uint8).reshape(-1) for i in range(len(plan.targets))])
    edges = {(e.source, e.target): e.nbytes for e in plan.edges()}
    assert {(s, e): n for e, found in enumerate(received) for s, n in found.items()} == edges
    far = {edge: n for edge, n in edges.items() if at[edge[0]] != hosts.engines[edge[1]]}
    assert sum(rendezvous.bytes.values()) == sum(far.values()), "what is sent between trainer ranks is what lies elsewhere"
    relays = ranks.senders[0]._table.relays
    assert (relays is None) == (not far)
    if relays is not None:
        for source, engine, relay in unpack(relays).tolist():
            assert at[relay] == hosts.engines[engine]
            assert rendezvous.bytes[source, relay]


def check_memory(ranks: Ranks, bucket: int) -> None:
    """A ring has two buckets for each engine rank of its own host and nothing for others; what is sent has two buffers."""
    for rank, sender in enumerate(ranks.senders):
        share = sender._table
        readers = [e for e, n in enumerate(share.slots) if n]
        assert all(ranks.hosts.engines[e] == ranks.hosts.trainers[rank] for e in readers)
        most = 2 * (bucket + ALIGN * (len(ranks.senders) + 1)) * len(readers)
        leaves = any(
            ranks.hosts.trainers[e.source] != ranks.hosts.engines[e.target] for e in ranks.plan.edges() if e.source == rank
        )
        assert bool(sender._outbox) == leaves
        assert sender.staging_bytes == sender._ring.nbytes + sum(t.nbytes for t in sender._outbox)
        assert sender._ring.nbytes <= max(most, ALIGN)
        assert sum(t.nbytes for t in sender._outbox) <= 2 * bucket


def crossed(trainers: int, engines: int, rows: int = 64) -> tuple[Plan, list[torch.Tensor], list[torch.Tensor]]:
    """Every trainer rank holds some rows and every engine rank needs some columns, so all pairs exchange something."""
    manifest = Manifest({f"t{i}": TensorSpec((rows, 16), "float32") for i in range(3)})
    whole = [torch.randn(rows, 16) for _ in manifest.tensors]
    cut, columns = rows // trainers, 16 // engines
    sources = Placements.from_rows(
        [Buffer(n, r, "float32", (cut, 16)) for r in range(trainers) for n in manifest.tensors],
        [
            Placement(n, r * 3 + i, (r * cut, 0), ((r + 1) * cut, 16), 0, (64, 4))
            for r in range(trainers)
            for i, n in enumerate(manifest.tensors)
        ],
        list(manifest.tensors),
    )
    targets = Placements.from_rows(
        [Buffer(f"{n}.{e}", e, "float32", (rows, columns)) for e in range(engines) for n in manifest.tensors],
        [
            Placement(n, e * 3 + i, (0, e * columns), (rows, (e + 1) * columns), 0, (columns * 4, 4))
            for e in range(engines)
            for i, n in enumerate(manifest.tensors)
        ],
    )
    tensors = [t[r * cut : (r + 1) * cut].clone() for r in range(trainers) for t in whole]
    return build_plan(manifest, sources, targets), tensors, whole


@pytest.mark.parametrize("bucket", [8, 1024])
@pytest.mark.parametrize(("trainers", "engines"), [("aabb", "abab"), ("abcd", "dcba"), ("abbb", "aaab")])
def test_readers_that_dawdle_hold_up_nobody_for_ever(bucket, trainers, engines):
    plan, tensors, whole = crossed(4, 4, 16)
    targets = {b.name: torch.zeros(b.shape) for b in plan.targets}
    StrictCommunicator.rendezvous = Rendezvous()
    ranks = Ranks(plan, Hosts(trainers, engines), bucket, tensors)
    try:
        ranks.refit(targets, pause=0.004 if bucket > 8 else 0.001)
    finally:
        ranks.close()
    for i, t in enumerate(whole):
        for e in range(4):
            assert torch.equal(targets[f"t{i}.{e}"], t[:, e * 4 : (e + 1) * 4])


def test_one_host_has_neither_group_nor_outbox(monkeypatch):
    def forbidden(*_: Any) -> None:
        raise AssertionError("nothing is to meet on one host")

    monkeypatch.setattr(ring_send, "Communicator", forbidden)
    plan, tensors, whole = crossed(2, 2)
    targets = {b.name: torch.zeros(b.shape) for b in plan.targets}
    ranks = Ranks(plan, Hosts("aa", "aa"), 128, tensors)
    try:
        ranks.refit(targets)
        assert all(not s._outbox for s in ranks.senders)
    finally:
        ranks.close()
    assert torch.equal(targets["t1.1"], whole[1][:, 8:])


def test_no_trainer_rank_beside_an_engine_rank_is_found_before_anything_is_opened():
    plan, _, _ = crossed(2, 2)
    with pytest.raises(ConfigError, match=r"engine rank 1 on 'b': no trainer rank") as caught:
        ring.send_tables(plan, Hosts("aa", "ab"), 128)
    assert HOST_ID in str(caught.value)


def test_messages_that_do_not_fit_are_refused():
    plan, tensors, _ = crossed(2, 2)
    StrictCommunicator.rendezvous = Rendezvous()
    ranks = Ranks(plan, Hosts("ab", "ab"), 1024, tensors)
    report = ring.info([s.begin(t) for s, t in zip(ranks.senders, ranks.tensors, strict=True)])
    try:
        for change, kind, text in (
            ({"relays": pack(np.zeros((2, 2), np.int64))}, ConfigError, "relays can't be read"),
            ({"relays": msgspec.structs.replace(report.relays, kind="<f8")}, ConfigError, "relays can't be read"),
            ({"relays": None}, ConfigError, "other buffers than the plan needs"),
            ({"rings": report.rings[:1]}, WireError, "no ring was named"),
            ({"bucket_bytes": 64}, ConfigError, "other buffers than the plan needs"),
        ):
            update = UpdateInfo(wire="ring", version="v", session="s", ring=msgspec.structs.replace(report, **change))
            with pytest.raises(kind, match=text):
                ring.open_reader(update, ranks.plans[1], {})
    finally:
        ranks.close()


def test_a_ring_of_another_host_says_where_both_are(monkeypatch):
    monkeypatch.setenv(HOST_ID, "there")
    plan, tensors, _ = crossed(1, 1)
    ranks = Ranks(plan, Hosts("a", "a"), 128, tensors)
    report = ring.info([ranks.senders[0].begin(tensors)])
    ranks.close()
    monkeypatch.setenv(HOST_ID, "here")
    update = UpdateInfo(wire="ring", version="v", session="s", ring=report)
    with pytest.raises(WireError, match=r"'there'.*'here'.*VLLM_REFIT_HOSTID"):
        ring.open_reader(update, ranks.plans[0], {})


def test_direct_wires_say_where_both_are_too(monkeypatch):
    monkeypatch.setenv(HOST_ID, "there")
    plan, tensors, _ = crossed(1, 1)
    sender = shm.open_sender(0, shm.send_tables(plan, Hosts("a", "a"))[0], tensors)
    report = shm.info([sender.begin(tensors)])
    sender.close()
    monkeypatch.setenv(HOST_ID, "here")
    with pytest.raises(WireError, match=r"'there'.*'here'.*VLLM_REFIT_HOSTID"):
        shm.open_reader(UpdateInfo(wire="shm", version="v", session="s", shm=report), plan, {})
    monkeypatch.setenv(HOST_ID, "there")
    with pytest.raises(WireError, match="has not ended"):
        shm.open_reader(UpdateInfo(wire="shm", version="v", session="s", shm=report), plan, {})
