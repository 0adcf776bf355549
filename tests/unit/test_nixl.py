"""Wire `nixl`: what is read, what is false, what is gone. Rows of descriptors need no NIXL; the rest runs over UCX on a CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ring_ranks import crossed
from tests.support.wire_refit import refit
from vllm_refit_ext.core.errors import ConfigError, WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import NixlInfo, NixlRank, UpdateInfo
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import nixl, nixl_agent, release

needs_nixl = pytest.mark.skipif(not nixl_agent.installed(), reason="NIXL is not installed here: `make test-nixl` has it")


def update_of(sent_info: NixlInfo, deadline_s: float = 20.0) -> UpdateInfo:
    return UpdateInfo(wire="nixl", version="v", session="s", deadline_s=deadline_s, nixl=sent_info)


# -- without NIXL ------------------------------------------------------------------------------------------------------------


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        for module in (name, f"{name}._api"):
            monkeypatch.setitem(sys.modules, module, None)
    nixl_agent.library.cache_clear()
    try:
        plan, tensors, _ = crossed(1, 1)
        with pytest.raises(ConfigError, match=r"needs the package nixl.*pip install 'vllm-refit\[nixl\]'"):
            nixl.open_sender(0, nixl.send_tables(plan, Hosts("a", "a"))[0], tensors)
        with pytest.raises(ConfigError, match="needs the package nixl"):
            nixl.open_reader(update_of(NixlInfo(ranks=[NixlRank(rank=0)], bucket_bytes=512)), plan, {})
    finally:
        nixl_agent.library.cache_clear()


@given(st.data())
def test_rows_are_the_elements_of_their_boxes(data: st.DataObject) -> None:
    """Against indexing: what the rows copy, in any order, is what the boxes hold; and runs that follow each other are one."""
    depth = data.draw(st.integers(1, 4))
    sides = st.integers(1, 4)
    whole = [data.draw(sides) for _ in range(depth)]
    memory = np.arange(int(np.prod(whole)) * 2, dtype=np.int64)
    boxes, local, wanted, at = [], [], [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        lo = [data.draw(st.integers(0, n - 1)) for n in whole]
        extent = [data.draw(st.integers(1, n - a)) for n, a in zip(whole, lo, strict=True)]
        order = data.draw(st.permutations(range(depth)))
        view = memory[: len(memory) // 2].reshape([whole[d] for d in order]).transpose(np.argsort(order))
        box = view[tuple(slice(a, a + e) for a, e in zip(lo, extent, strict=True))]
        boxes.append((int(box.flat[0]) * 8, extent, [s if e > 1 else 0 for s, e in zip(box.strides, extent, strict=True)]))
        wanted.append(box.reshape(-1))
        local.append(at)
        at += box.size * 8
    far, near = nixl_agent.rows_of(
        np.array([b[0] for b in boxes]),
        np.array(local),
        np.array([b[1] for b in boxes]),
        np.array([b[2] for b in boxes]),
        np.full(len(boxes), 8),
    )
    got = np.full(at // 8, -1)
    for (address, run, stride, count), here in zip(far.tolist(), near.tolist(), strict=True):
        for i in range(count):
            first, into = (address + i * stride) // 8, (here + i * run) // 8
            got[into : into + run // 8] = memory[first : first + run // 8]
    assert np.array_equal(got, np.concatenate(wanted))
    single = far[:, 3] == 1
    follows = (far[:-1, 0] + far[:-1, 1] == far[1:, 0]) & (near[:-1] + far[:-1, 1] == near[1:])
    assert not (follows & single[:-1] & single[1:]).any()


def test_a_cut_matrix_is_one_row_of_descriptors() -> None:
    far, near = nixl_agent.rows_of(*(np.array([v]) for v in (1000, 0, [64, 8], [256, 4], 4)))
    assert far.tolist() == [[1000, 32, 256, 64]]
    assert near.tolist() == [0]


def test_buffers_whose_pages_touch_are_registered_at_once() -> None:
    cpu = torch.device("cpu")
    found = nixl_agent.ranges_of([3 * 4096 + 8, 9 * 4096, 100, 4096 + 5], [4096, 8, 50, 4096], cpu)
    assert found.rows.tolist() == [[0, 5 * 4096, 0], [9 * 4096, 4096, 0]]
    assert nixl_agent.ranges_of([], [], cpu).rows.shape == (0, 3)


# -- with NIXL ---------------------------------------------------------------------------------------------------------------


class Both:
    """Trainer ranks and an engine rank of this process."""

    def __init__(self, trainers: int = 2, bucket: int = 512, engine: int = 0) -> None:
        plan, self.tensors, self.whole = crossed(trainers, 2)
        self.plan, self.engine, self.kept = plan.for_target(engine), engine, dict[str, Any]()
        self.senders = [
            nixl.open_sender(r, share, self.tensors[r * 3 : r * 3 + 3])
            for r, share in enumerate(nixl.send_tables(plan, Hosts("a" * trainers, "aa"), bucket))
        ]

    def begin(self) -> NixlInfo:
        return nixl.info([s.begin(self.tensors[r * 3 : r * 3 + 3]) for r, s in enumerate(self.senders)])

    def read(self, sent_info: NixlInfo, before_confirm: Any = None) -> None:
        targets = {b.name: torch.zeros(b.shape) for b in self.plan.targets}
        reader = nixl.open_reader(update_of(sent_info), self.plan, self.kept)
        try:
            reader.start(time.monotonic() + 20.0)
            for step in reader.steps:
                reader.fetch(step)
                InPlaceWriter(step, targets).write(reader)
            if before_confirm is not None:
                before_confirm()
            reader.confirm()
        finally:
            reader.close()
        whole = [torch.cat(self.tensors[i::3]) for i in range(3)]
        first = self.engine * 8
        assert all(torch.equal(targets[f"t{i}.{self.engine}"], t[:, first : first + 8]) for i, t in enumerate(whole))

    def close(self) -> None:
        release(self.kept)  # readers first: a source that closes before them leaves them broken connections
        for sender in self.senders:
            sender.close()


@pytest.fixture
def both() -> Any:
    found = Both()
    yield found
    found.close()


@needs_nixl
@pytest.mark.parametrize("bucket", [8, 100, 512, 1 << 20])
def test_reads_are_exact(bucket: int) -> None:
    found = Both(2, bucket, 1)
    try:
        for _ in range(3):
            for tensor in found.tensors:
                tensor.normal_()
            found.read(found.begin())
    finally:
        found.close()


@needs_nixl
def test_what_is_registered_and_prepared_stays(both: Both) -> None:
    for sender in both.senders:
        sender.resident = True
    both.read(both.begin())
    peer = both.kept["nixl"].peers[0]
    reads = peer.reads
    for sender in both.senders:
        sender.rest()
    sent_info = both.begin()
    assert all(r.export is None for r in sent_info.ranks), "nothing moved, so nothing is sent again"
    both.read(sent_info)
    assert both.kept["nixl"].peers[0].reads is reads
    both.tensors[0] = both.tensors[0].clone()
    sent_info = both.begin()
    assert [r.export is None for r in sent_info.ranks] == [False, True]
    both.read(sent_info)


@needs_nixl
def test_memory_that_may_be_freed_is_given_back(both: Both) -> None:
    both.read(both.begin())
    for sender in both.senders:
        sender.rest()
        assert not sender._agent._regions
    sent_info = both.begin()
    assert all(r.export is not None for r in sent_info.ranks)
    both.read(sent_info)


@needs_nixl
def test_parts_take_turns(both: Both) -> None:
    """A partial refit has a plan of its own; the memory of the trainer is known to both."""
    whole, part = both.plan, both.plan.select(both.plan.tensor == 1)
    for sender in both.senders:
        sender.resident = True
    both.read(both.begin())
    both.plan = part
    targets = {b.name: torch.zeros(b.shape) for b in part.targets}
    reader = nixl.open_reader(update_of(both.begin()), part, both.kept)
    for step in reader.steps:
        InPlaceWriter(step, targets).write(reader)
    reader.confirm()
    assert torch.equal(targets["t1.0"], torch.cat(both.tensors[1::3])[:, :8])
    both.plan = whole
    both.read(both.begin())


@needs_nixl
def test_weights_that_change_are_found(both: Both) -> None:
    with pytest.raises(WireError, match=r"from trainer rank 0.*not that of this refit"):
        both.read(both.begin(), both.begin)
    sent_info = both.begin()
    both.senders[1].end()
    with pytest.raises(WireError, match=r"trainer rank 1"):
        both.read(sent_info)
    for sender in both.senders:
        sender.forget()
    both.read(both.begin())


@needs_nixl
def test_false_messages_are_problems(both: Both) -> None:
    sent_info = both.begin()
    first = sent_info.ranks[0]
    assert first.export is not None
    export = msgspec.msgpack.decode(first.export, type=nixl.Export)

    def other(**fields: Any) -> NixlRank:
        return msgspec.structs.replace(first, export=msgspec.msgpack.encode(msgspec.structs.replace(export, **fields)))

    moved = nixl.pack(nixl.unpack(export.address) + (1 << 40))
    for bad, match in (
        (NixlRank(rank=0), "said nothing of its memory"),
        (msgspec.structs.replace(first, export=None), "not known here"),
        (msgspec.structs.replace(first, export=b"\x80"), "can't be read"),
        (other(metadata=b"garbage"), "metadata can't be read"),
        (other(metadata=export.metadata[:50]), "metadata can't be read"),
        (other(agent="another"), "metadata is of another agent"),
        (other(address=moved), "its memory can't be read"),
        (other(address=nixl.pack(nixl.unpack(export.address)[:1])), "does not fit the plan"),
        (other(address=nixl.pack(-nixl.unpack(export.address))), "does not fit the plan"),
        (other(word=1 << 61), "its memory can't be read"),
        (other(word=0), "can't be read"),
        (msgspec.structs.replace(first, nonce=first.nonce ^ 2), "not that of this refit"),
    ):
        with pytest.raises(WireError, match=match):
            both.read(NixlInfo(ranks=[bad, sent_info.ranks[1]], bucket_bytes=sent_info.bucket_bytes))
    with pytest.raises(WireError, match="named twice"):
        both.read(NixlInfo(ranks=[first, first], bucket_bytes=sent_info.bucket_bytes))
    with pytest.raises(ConfigError, match="bucket is too small"):
        both.read(NixlInfo(ranks=sent_info.ranks, bucket_bytes=1))
    for sender in both.senders:
        sender.forget()
    both.read(both.begin())


@needs_nixl
def test_one_refit_in_the_words_of_every_wire() -> None:
    plan, tensors, whole = crossed(1, 1)
    sender = nixl.open_sender(0, nixl.send_tables(plan, Hosts("a", "a"))[0], tensors)
    kept: dict[str, Any] = {}
    try:
        targets = refit("nixl", sender, plan, tensors, kept, "s")
        assert all(torch.equal(targets[f"t{i}.0"], t) for i, t in enumerate(whole))
    finally:
        release(kept)
        sender.close()


TRAINER = """
import sys
from tests.support.ring_ranks import crossed
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.wires import nixl
plan, tensors, _ = crossed(1, 1)
sender = nixl.open_sender(0, nixl.send_tables(plan, Hosts("a", "a"), 512)[0], tensors)
print(sender.begin(tensors).hex(), flush=True)
sys.stdin.read()
sender.close()
"""
READER = """
import os, signal, sys, time
from tests.unit.test_nixl import update_of
from tests.support.ring_ranks import crossed
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.wires import nixl, nixl_agent, release
nixl_agent.PATIENCE_S = float(sys.argv[3])
plan, kept = crossed(1, 1)[0], {}
reader = nixl.open_reader(update_of(nixl.info([bytes.fromhex(sys.argv[1])])), plan, kept)
os.kill(int(sys.argv[2]), int(sys.argv[4]))
time.sleep(0.5)
reader.start(time.monotonic() + 3)
begin = time.monotonic()
try:
    for step in reader.steps:
        reader.fetch(step)
    print("read everything")
except RefitError as error:
    print(type(error).__name__, error)
reader.close()
print("peers:", len(kept["nixl"].peers))
release(kept)
assert time.monotonic() - begin < 20
"""


@needs_nixl
@pytest.mark.parametrize(
    ("kind", "patience", "found"),
    [
        (signal.SIGKILL, 10.0, "WireError wire nixl, engine rank 0 from trainer rank 0"),
        (signal.SIGSTOP, 0.5, "WireError wire nixl, engine rank 0 from trainer rank 0"),
        (signal.SIGSTOP, 30.0, "DeadlineError wire nixl, engine rank 0 from trainer rank 0"),
    ],
)
def test_a_trainer_that_is_gone_is_named(kind: signal.Signals, patience: float, found: str) -> None:
    """Over TCP, where a process that is stopped gives nothing; over shared memory the kernel reads for it."""
    settings = {"env": os.environ | {"UCX_TLS": "tcp,self"}, "text": True, "stdout": subprocess.PIPE}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, **settings)
    try:
        assert trainer.stdout is not None
        sent_info = trainer.stdout.readline().strip()
        command = [sys.executable, "-c", READER, sent_info, str(trainer.pid), str(patience), str(int(kind))]
        text = subprocess.run(command, timeout=100, check=True, **settings).stdout
    finally:
        trainer.kill()
        trainer.wait()
    assert found in text, text
    assert "peers: 0" in text
