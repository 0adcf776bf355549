"""Wire `ipc` without a GPU: what is sent, kept, found stale and closed. CUDA's calls are stood in for by memory of this
process."""

from __future__ import annotations

import contextlib
import ctypes

import msgspec
import numpy as np
import pytest
import torch

from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import IpcRank, UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.wires import cuda_ipc, ipc

GPU = "GPU-0"


class Device:
    """Allocations of a stand-in device: the storages of CPU tensors. `opened` are mappings that are open now."""

    def __init__(self) -> None:
        self.exports = 0
        self.opened: list[int] = []
        self.gone: set[bytes] = set()

    def allocation_of(self, address):
        return address, 64

    def export(self, base):
        self.exports += 1
        return base.to_bytes(8, "little") * 8

    def open_handle(self, handle, device):
        if handle in self.gone:
            raise WireError("memory of the trainer can't be opened", where="wire ipc")
        base = int.from_bytes(handle[:8], "little")
        self.opened.append(base)
        return base

    def close_handle(self, address, device):
        self.opened.remove(address)

    def read_word(self, address):
        return ctypes.c_uint64.from_address(address).value


@pytest.fixture
def device(monkeypatch):
    stand_in = Device()
    for name in ("allocation_of", "export", "open_handle", "close_handle", "read_word"):
        monkeypatch.setattr(cuda_ipc, name, getattr(stand_in, name))
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda index: GPU)
    monkeypatch.setattr(ipc, "_visible", lambda: [GPU])
    monkeypatch.setattr(ipc, "_device", lambda tensors, rank: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda d: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d=None: None)
    monkeypatch.setattr(cuda_ipc, "process", lambda: "engine")
    return stand_in


@pytest.fixture
def plan():
    names = ["a", "b"]
    manifest = Manifest({n: TensorSpec((4, 8), "bfloat16") for n in names})
    rows = [Placement(n, i, (0, 0), (4, 8), 0, (16, 2)) for i, n in enumerate(names)]
    sources = Placements.from_rows([Buffer(n, i, "bfloat16", (4, 8)) for i, n in enumerate(names)], rows)
    targets = Placements.from_rows([Buffer(n, 0, "bfloat16", (4, 8)) for n in names], rows)
    return build_plan(manifest, sources, targets)


def tensors():
    return [torch.randn(4, 8).bfloat16() for _ in range(2)]


def senders(plan):
    shares = ipc.send_tables(plan, Hosts.single(2, 1))
    return [ipc.open_sender(rank, share, []) for rank, share in enumerate(shares)]


def begin(both, held, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "process", lambda: "trainer")
    report = ipc.info([s.begin([t]) for s, t in zip(both, held, strict=True)])
    monkeypatch.setattr(cuda_ipc, "process", lambda: "engine")
    return report


def reader(report, plan, maps):
    return ipc.IpcReader(report, plan, maps, torch.device("cpu"))


def test_handles_are_sent_once_and_again_when_memory_moves(device, plan, monkeypatch):
    """The second refit sends no handles; a moved tensor of one rank sends that rank's alone; a failure sends them all."""
    both, held, maps = senders(plan), tensors(), ipc.Maps()
    for s in both:
        s.resident = True
    first = begin(both, held, monkeypatch)
    assert all(r.export for r in first.ranks)
    one = reader(first, plan, maps)
    assert [one.address(i) for i in range(2)] == [t.data_ptr() for t in held]
    one.confirm()
    one.close()
    second = begin(both, held, monkeypatch)
    assert not any(r.export for r in second.ranks)
    two = reader(second, plan, maps)
    assert two.token == one.token
    two.close()
    kept = held[1]
    held[1] = kept.clone()
    third = begin(both, held, monkeypatch)
    assert [bool(r.export) for r in third.ranks] == [False, True]
    three = reader(third, plan, maps)
    assert three.address(1) == held[1].data_ptr()
    assert three.token != two.token
    for s in both:
        s.forget()
    assert all(r.export for r in begin(both, held, monkeypatch).ranks)


def test_mappings_close_unless_the_trainer_stays(device, plan, monkeypatch):
    """Nothing stays open after a refit; a resident trainer's mappings do, until the engine lets go."""
    both, held, maps = senders(plan), tensors(), ipc.Maps()
    reader(begin(both, held, monkeypatch), plan, maps).close()
    assert device.opened == []
    for s in both:
        s.resident = True
    reader(begin(both, held, monkeypatch), plan, maps).close()
    assert len(device.opened) == 4
    maps.close()
    assert device.opened == []


def test_both_halves_leave_nothing_behind(device, plan, monkeypatch):
    """Twenty trainers, resident or not, to an engine rank that keeps what it kept: no mapping stays but the last one's."""
    held, maps = tensors(), ipc.Maps()
    for number in range(20):
        both = senders(plan)
        for s in both:
            s.resident = number % 2 == 1
        one = reader(begin(both, held, monkeypatch), plan, maps)
        one.confirm()
        one.close()
        for s in both:
            s.close()
            s.close()
        assert len(device.opened) == 4 * (number % 2)
    maps.close()
    assert device.opened == []


def test_stale_memory_is_found(device, plan, monkeypatch):
    """A message of an earlier refit, memory that is dropped while it is read, handles that were never sent: nothing is left
    open."""
    both, held, maps = senders(plan), tensors(), ipc.Maps()
    old = begin(both, held, monkeypatch)
    now = begin(both, held, monkeypatch)
    with pytest.raises(WireError, match="not that of this refit") as caught:
        reader(old, plan, maps)
    assert len(caught.value.problems) == 2
    assert device.opened == []
    with pytest.raises(WireError, match="not known here"):
        reader(now, plan, ipc.Maps())
    for s in both:
        s.forget()
    live = reader(begin(both, held, monkeypatch), plan, ipc.Maps())
    both[1].close()
    with pytest.raises(WireError, match="not that of this refit"):
        live.confirm()


def test_a_message_that_was_refused_changes_nothing_that_is_kept(device, plan, monkeypatch):
    """The next valid message finds the handles that came before; what a refused one opened is closed."""
    both, held, maps = senders(plan), tensors(), ipc.Maps()
    for s in both:
        s.resident = True
    first = begin(both, held, monkeypatch)
    reader(first, plan, maps).close()
    opened = sorted(device.opened)
    report = begin(both, held, monkeypatch)
    one = report.ranks[1]
    spoilt = msgspec.msgpack.decode(first.ranks[1].export, type=ipc.Export)
    for change in (
        {"nonce": one.nonce + 1},
        {"epoch": "other"},
        {"epoch": "other", "export": b"x"},
        {"device": "GPU-9"},
        {"rank": 0},
        {"epoch": "o", "export": msgspec.msgpack.encode(msgspec.structs.replace(spoilt, flag=(9, 0)))},
        {"epoch": "o", "export": msgspec.msgpack.encode(msgspec.structs.replace(spoilt, flag=(0, 1 << 40)))},
        {"epoch": "o", "export": msgspec.msgpack.encode(msgspec.structs.replace(spoilt, handles=b"short"))},
        {"epoch": "o", "export": msgspec.msgpack.encode(msgspec.structs.replace(spoilt, sizes=spoilt.allocation))},
    ):
        with pytest.raises(WireError):
            reader(msgspec.structs.replace(report, ranks=[report.ranks[0], msgspec.structs.replace(one, **change)]), plan, maps)
        assert sorted(device.opened) == opened
    reader(report, plan, maps).close()
    assert sorted(device.opened) == opened


def test_a_trainer_that_is_gone(device, plan, monkeypatch):
    """Its handles can't be opened: the rank is named, what had been opened is closed."""
    both, held, maps = senders(plan), tensors(), ipc.Maps()
    report = begin(both, held, monkeypatch)
    device.gone.add(held[1].data_ptr().to_bytes(8, "little") * 8)
    with pytest.raises(WireError, match="trainer rank 1"):
        reader(report, plan, maps)
    assert device.opened == []


@pytest.mark.parametrize(
    ("change", "text"),
    [({"device": "GPU-9"}, "not visible"), ({"epoch": ""}, "said nothing"), ({"export": b"x"}, "can't be read")],
)
def test_messages_that_do_not_fit(device, plan, monkeypatch, change, text):
    """Each is refused by name before anything is written."""
    report = begin(senders(plan), tensors(), monkeypatch)
    ranks: list[IpcRank] = [msgspec.structs.replace(report.ranks[0], **change), report.ranks[1]]
    with pytest.raises(WireError, match=text):
        reader(msgspec.structs.replace(report, ranks=ranks), plan, ipc.Maps())


def test_one_process_reads_its_own_memory(device, plan, monkeypatch):
    """A handle can't be opened where it was made; the addresses are good there as they are."""
    both, held = senders(plan), tensors()
    report = ipc.info([s.begin([t]) for s, t in zip(both, held, strict=True)])
    one = reader(report, plan, ipc.Maps())
    assert [one.address(i) for i in range(2)] == [t.data_ptr() for t in held]
    assert device.opened == []


def test_no_gpu_is_said(plan):
    """On a CPU the wire refuses itself."""
    update = UpdateInfo(wire="ipc", version="v", session="s", ipc=ipc.info([]))
    if not torch.cuda.is_available():
        with pytest.raises(Exception, match="needs a GPU"):
            ipc.open_reader(update, plan, {})
    assert np.unique(plan.source).tolist() == [0, 1]


def test_memory_that_was_freed_and_lies_where_it_lay_is_exported_anew(device, plan, monkeypatch):
    """The driver gave an allocation back: handles are compared, and sent again only where they are others."""
    both, held, freed, generation = senders(plan), tensors(), [0], [0]
    monkeypatch.setattr(ipc, "_segments_freed", lambda flag: freed[0])
    monkeypatch.setattr(cuda_ipc, "export", lambda base: bytes([generation[0]]) * cuda_ipc.HANDLE_BYTES)
    known = [[t.data_ptr()] for t in held]

    def exports():
        for s, addresses in zip(both, known, strict=True):
            s.addresses = addresses
        return [bool(r.export) for r in begin(both, held, monkeypatch).ranks]

    assert exports() == [True, True]
    assert exports() == [False, False]
    freed[0] = 1
    assert exports() == [False, False], "something else was freed"
    freed[0], generation[0] = 2, 1
    assert exports() == [True, True]
    assert exports() == [False, False]
