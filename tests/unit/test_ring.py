"""The ring of wire `ring`: what is late, what is false, what is left behind. One process plays both sides."""

from __future__ import annotations

import os
import platform
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
from tests.support.rendezvous import by_rank
from tests.support.ring_ranks import Ranks, crossed
from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError, WireError
from vllm_refit_ext.core.hosts import HOST_ID, Hosts
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import cuda_ipc, ipc, ring, ring_send, shm
from vllm_refit_ext.wires.staging import ALIGN

WAIT_S = 20.0


def update_of(report: Any) -> UpdateInfo:
    return UpdateInfo(wire="ring", version="v", session="s", ring=report)


def info_of(ranks: Ranks) -> Any:
    return ring.info([s.begin(t) for s, t in zip(ranks.senders, ranks.tensors, strict=True)])


@pytest.fixture
def ranks():
    """One trainer rank and two engine ranks, several rounds each."""
    plan, tensors, whole = crossed(1, 2)
    found = Ranks(plan, Hosts("a", "aa"), 512, tensors)
    found.whole = whole
    yield found
    found.close()


def holds(ranks: Ranks, targets: dict[str, torch.Tensor], engine: int) -> bool:
    return all(torch.equal(targets[f"t{i}.{engine}"], t[:, engine * 8 : engine * 8 + 8]) for i, t in enumerate(ranks.whole))


def test_a_rank_of_an_earlier_refit_gives_up_nothing_of_this_one(ranks):
    """A reader that stalled past its refit goes on in the next one: it reads nothing, frees nothing, stops nothing."""
    targets = {b.name: torch.zeros(b.shape) for b in ranks.plan.targets}
    report = info_of(ranks)
    late = ring.open_reader(update_of(report), ranks.plans[0], {})
    late.start(time.monotonic() + WAIT_S)

    def send() -> None:
        with pytest.raises(RefitError):
            ranks.senders[0].transfer("s", report, time.monotonic() + 1)

    sender = threading.Thread(target=send)
    sender.start()
    late.memory(0)
    sender.join()
    words = ranks.senders[0]._ring.words
    info_of(ranks)
    epoch = words.epoch
    for message in list(late._here):
        late._give_up(message)
    assert words.read(0, ring.DONE, epoch) == 0
    with pytest.raises(WireError, match="gave up"):
        late.memory(int(late.steps[-1].source.max()))
    with pytest.raises(WireError):
        late.confirm()
    late.close()
    assert not words.given_up(0, epoch)
    assert not words.stopped(epoch)
    ranks.refit(targets)
    assert holds(ranks, targets, 0)
    assert holds(ranks, targets, 1)


def test_a_late_reader_frees_nothing_while_the_next_refit_runs(ranks):
    """The case that lost two buckets: the late rank frees its slots in the middle of the next refit."""
    report = info_of(ranks)
    late = ring.open_reader(update_of(report), ranks.plans[0], {})
    pack = ranks.senders[0]._gather.pack

    def disturbed(number: int, into: torch.Tensor) -> None:
        for count in range(1, 50):
            late._rings[0].words.write(0, ring.DONE, late._epochs[0], count)
        late._rings[0].words.write(0, ring.STOP, late._epochs[0])
        pack(number, into)

    ranks.senders[0]._gather.pack = disturbed
    targets = {b.name: torch.zeros(b.shape) for b in ranks.plan.targets}
    ranks.refit(targets, pause=0.005)
    assert holds(ranks, targets, 0)


class Stream(threading.local):
    """A GPU's stream for each rank's thread: what is launched runs later and in order, a piece at every third look."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.ran = self.looks = 0

    def launch(self, work: Any) -> None:
        self.work.append(work)

    def launched(self, _: torch.device) -> Any:
        self.work.append(lambda: None)  # an event is work as well, which the GPU has yet to come to
        mine = len(self.work)

        def ended() -> bool:
            self.looks += 1
            self.run(self.ran + (self.looks % 3 == 0))
            return self.ran >= mine

        return ended

    def wait_for(self, _: torch.device) -> None:
        self.run(len(self.work))

    def run(self, until: int) -> None:
        while self.ran < min(until, len(self.work)):
            self.work[self.ran]()
            self.ran += 1


def test_launches_run_ahead_and_nothing_is_shown_or_freed_before_they_end(ranks, monkeypatch):
    """Neither side waits for its kernels, and a message is ready, and a buffer free, when they have ended."""
    stream, ahead = Stream(), []
    copy, pack = torch._foreach_copy_, ranks.senders[0]._gather.pack

    def launch(number: int, into: torch.Tensor) -> None:
        ahead.append(len(stream.work) - stream.ran)
        stream.launch(lambda: pack(number, into))

    for module in (ring, ring_send):
        monkeypatch.setattr(module, "launched", stream.launched)
    monkeypatch.setattr(ring, "wait_for", stream.wait_for)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda into, out: stream.launch(lambda: copy(into, out)))
    ranks.senders[0]._gather.pack = launch
    for factor in (1, 2):
        for t in ranks.whole:
            t.mul_(factor)
        for t, whole in zip(ranks.tensors[0], ranks.whole, strict=True):
            t.copy_(whole)
        targets = {b.name: torch.zeros(b.shape) for b in ranks.plan.targets}
        ranks.refit(targets, pause=0.002)
        assert holds(ranks, targets, 0)
        assert holds(ranks, targets, 1)
    assert max(ahead) > 0, "a message is packed while the one before it is"


def test_a_refusal_is_of_its_session(ranks):
    """A late failure of an old call stops nothing; one that comes before the transfer begins is not lost."""
    sender, targets = ranks.senders[0], {b.name: torch.zeros(b.shape) for b in ranks.plan.targets}
    pack = sender._gather.pack

    def late(number: int, into: torch.Tensor) -> None:
        sender.refuse("old", SessionError("an old call failed"), time.monotonic() + 1)
        pack(number, into)

    sender._gather.pack = late
    sender.refuse("older", SessionError("an old call failed"), time.monotonic() + 1)
    ranks.refit(targets)
    assert holds(ranks, targets, 0)
    report = info_of(ranks)
    sender.refuse("s", SessionError("engine 0 has no weights"), time.monotonic() + 1)
    begin = time.monotonic()
    with pytest.raises(SessionError, match="no weights"):
        sender.transfer("s", report, begin + WAIT_S)
    assert time.monotonic() < begin + WAIT_S, "report at once"
    assert not sender._refused.get("older"), "what is over is forgotten"
    ranks.refit(targets)


@pytest.mark.parametrize("how", ["refused", "gives up"])
def test_an_engine_that_fails_leaves_the_other_one_its_bytes(how):
    """Two trainer ranks, two engines of one rank: what one of them does is not felt by the other."""
    plan, tensors, whole = crossed(2, 2)
    ranks = Ranks(plan, Hosts("aa", "aa"), 256, tensors)
    ranks.whole = whole
    report = info_of(ranks)
    targets = {b.name: torch.zeros(b.shape) for b in ranks.plan.targets}
    failures: list[Exception] = []
    end = time.monotonic() + WAIT_S

    def send(sender: Any) -> None:
        try:
            sender.transfer("s", report, end)
        except Exception as error:  # noqa: BLE001 - looked at below
            failures.append(error)

    threads = [threading.Thread(target=send, args=(s,)) for s in ranks.senders]
    bad = ring.open_reader(update_of(report), ranks.plans[1], {}) if how == "gives up" else None
    good = ring.open_reader(update_of(report), ranks.plans[0], {})
    try:
        for thread in threads:
            thread.start()
        if bad is not None:
            bad.start(end)
            bad.memory(0)
            bad.close()
        else:
            ranks.senders[0].refuse("s", SessionError("engine 1 has no weights"), end, [1])
        good.start(end)
        for step in good.steps:
            for buffer in np.unique(step.source).tolist():
                good.memory(buffer)
            InPlaceWriter(step, targets).write(good)
        good.confirm()
        good.close()
        for thread in threads:
            thread.join(WAIT_S)
        assert time.monotonic() < end
    finally:
        ranks.close()
    assert holds(ranks, targets, 0)
    assert len(failures) == 2, "both trainer ranks say whom they left out"
    assert all("engine rank 1" in str(f) or "engine 1" in str(f) for f in failures), failures


def test_a_message_that_was_refused_changes_nothing_that_is_kept(ranks):
    targets = {b.name: torch.zeros(b.shape) for b in ranks.plan.targets}
    ranks.refit(targets)
    report, kept = info_of(ranks), ranks.kept[0]
    laid, rings = kept["ring"].laid, dict(kept["ring"].rings)
    first = report.rings[0]
    for change in (
        {"bucket_bytes": 64},
        {"bucket_bytes": report.bucket_bytes + 1},
        {"engines": 5},
        {"rings": []},
        {"rings": [first, first]},
        *(
            {"rings": [msgspec.structs.replace(first, **c)]}
            for c in (
                {"epoch": first.epoch + 1},
                {"epoch": first.epoch - 1},
                {"start": first.start + 8},
                {"slots": [first.slots[0], 0]},
                {"slots": [*first.slots, 256]},
                {"host": "elsewhere"},
                {"process": "x"},
                {"rank": 1},
                {"name": "../../tmp/x"},
            )
        ),
    ):
        with pytest.raises((WireError, ConfigError)):
            ring.open_reader(update_of(msgspec.structs.replace(report, **change)), ranks.plans[0], kept)
        assert kept["ring"].laid is laid
        assert kept["ring"].rings == rings
    ranks.refit(targets)
    assert holds(ranks, targets, 0)


def test_memory_of_something_else_is_no_ring(ranks, tmp_path):
    """A segment of wire shm, of this user and this rank, is not written to; nor is a file outside shared memory."""
    report = info_of(ranks)
    publisher = shm.ShmPublisher(0, {0: 256}, 1 << 20)
    publisher.publish({0: torch.ones(1000)})
    before = publisher._file.bytes.clone()
    outside = tmp_path / "x"
    outside.write_bytes(bytes(1 << 20))
    for name in (publisher.name, f"../../{outside}", str(outside)):
        other = msgspec.structs.replace(report.rings[0], name=name)
        with pytest.raises(WireError):
            ring.open_reader(update_of(msgspec.structs.replace(report, rings=[other])), ranks.plans[0], {})
    assert torch.equal(publisher._file.bytes, before)
    assert not any(outside.read_bytes())
    publisher.close()


def test_a_parameter_that_becomes_strided_is_not_sent_as_if_it_were_not(ranks):
    """Same memory, same shape, other strides: refused by name; back in order it is sent again."""
    sender, tensors = ranks.senders[0], list(ranks.tensors[0])
    square = torch.randn(64, 64)[:, :16]
    with pytest.raises(WireError, match=r"buffer 1.*no longer contiguous|no longer contiguous.*buffer 1"):
        sender.begin([tensors[0], square, tensors[2]])
    sender.begin(tensors)


def test_host_memory_of_a_machine_with_another_order_of_stores_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    plan, tensors, _ = crossed(1, 1)
    (share,) = ring.send_tables(plan, Hosts("a", "a"), 512)
    with pytest.raises(WireError, match=r"order of stores.*aarch64.*se the wire shm"):
        ring.open_sender(0, share, tensors)


def test_a_forked_process_has_another_name():
    """Addresses of the process that it was forked from are not its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, cuda_ipc.process().encode())
        os._exit(0)
    os.waitpid(child, 0)
    name = os.read(read, 200).decode()
    os.close(read)
    os.close(write)
    assert name
    assert name != cuda_ipc.process()
    assert cuda_ipc.process() == cuda_ipc.process()


@given(sources_and_targets(), st.sampled_from((24, 100, 1 << 20)))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_geometry_arrives_within_two_buckets(case, bucket):
    plan, sources = by_rank(
        build_plan(case.manifest, case.sources, case.targets), [torch.from_numpy(c) for c in case.source.contents]
    )
    hosts = Hosts.single(1 + max(b.rank for b in plan.sources), case.target_ranks)
    targets = {b.name: torch.zeros(b.shape) for b in plan.targets}
    ranks = Ranks(plan, hosts, bucket, sources)
    try:
        for sender in ranks.senders:
            readers = len({e.target for e in plan.edges() if e.source == sender.rank})
            assert sender.staging_bytes <= max(2 * (bucket + ALIGN) * readers, ALIGN)
        received = ranks.refit(targets, pause=0.001)
    finally:
        ranks.close()
    case.check_targets([targets[b.name].numpy().view(np.uint8).reshape(-1) for b in plan.targets])
    assert {(s, e): n for e, found in enumerate(received) for s, n in found.items()} == {
        (e.source, e.target): e.nbytes for e in plan.edges()
    }


@pytest.mark.parametrize("wire", [ring, shm, ipc])
def test_what_lies_on_another_host_is_refused_before_anything_is_opened(wire):
    plan, _, _ = crossed(2, 2)
    with pytest.raises(ConfigError, match=r"engine rank 1 on 'b': .*memory of its own host") as caught:
        wire.send_tables(plan, Hosts("aa", "ab"), 128)
    assert HOST_ID in str(caught.value)


@pytest.mark.parametrize("wire", ["ring", "shm"])
def test_memory_of_another_host_says_where_both_are(monkeypatch, wire):
    module = {"ring": ring, "shm": shm}[wire]
    monkeypatch.setenv(HOST_ID, "there")
    plan, tensors, _ = crossed(1, 1)
    sender = module.open_sender(0, module.send_tables(plan, Hosts("a", "a"), 128)[0], tensors)
    update = UpdateInfo(wire=wire, version="v", session="s", **{wire: module.info([sender.begin(tensors)])})
    sender.close()
    for here, text in (("here", r"'there'.*'here'.*VLLM_REFIT_HOSTID"), ("there", "has not ended")):
        monkeypatch.setenv(HOST_ID, here)
        with pytest.raises(WireError, match=text):
            module.open_reader(update, plan, {})


def test_a_message_that_lacks_a_ring_or_names_other_buckets_is_refused():
    plan, tensors, _ = crossed(2, 2)
    ranks = Ranks(plan, Hosts("aa", "aa"), 1024, tensors)
    report = info_of(ranks)
    try:
        for change, kind, text in (
            ({"rings": report.rings[:1]}, WireError, "no ring was named"),
            ({"bucket_bytes": 64}, ConfigError, "other buffers than the plan needs"),
        ):
            with pytest.raises(kind, match=text):
                ring.open_reader(update_of(msgspec.structs.replace(report, **change)), ranks.plans[1], {})
    finally:
        ranks.close()
