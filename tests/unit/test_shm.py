"""Wire `shm`: publish in one process, pull in another, and every way in which a segment can be wrong."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.wires import shared_file, shm

BUFFERS = [
    Buffer("a", 0, "float32", (3, 5)),
    Buffer("b", 0, "bfloat16", (7,)),
    Buffer("unused", 0, "float32", (1000,)),
    Buffer("c", 3, "uint8", (11,)),
]
USED = np.array([0, 1, 3, 0])


@pytest.fixture
def published():
    offsets, sizes = shm.segment_offsets(BUFFERS, USED)
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), None, torch.arange(11, dtype=torch.uint8)]
    publishers = [
        shm.ShmPublisher(rank, {i: int(offsets[i]) for i in range(4) if offsets[i] >= 0 and BUFFERS[i].rank == rank}, nbytes)
        for rank, nbytes in sizes.items()
    ]
    segments = [p.publish(dict(enumerate(tensors))) for p in publishers]
    yield tensors, publishers, segments, offsets
    for p in publishers:
        p.close()


def test_pull_is_exact(published):
    tensors, publishers, segments, offsets = published
    reader = shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)
    for i in (0, 1, 3):
        assert torch.equal(reader.memory(i).view(tensors[i].dtype).view(tensors[i].shape), tensors[i])
    reader.confirm()
    assert publishers[0].nbytes < 1024, "an unused buffer takes no room"


def test_refilled_segment_is_found(published):
    tensors, publishers, segments, offsets = published
    reader = shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)
    publishers[0].publish(dict(enumerate(tensors)))
    with pytest.raises(WireError, match="refilled"):
        reader.confirm()
    with pytest.raises(WireError, match="refilled"):
        shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)


def test_unfinished_segment_is_refused(published):
    _, publishers, segments, offsets = published
    publishers[0]._write_header(shm.FILLING, segments[0].nonce)
    with pytest.raises(WireError, match="not finished filling"):
        shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)


def test_problems_are_listed_together(published):
    _, _, segments, offsets = published
    bad = [msgspec.structs.replace(segments[0], name="../../etc/passwd"), msgspec.structs.replace(segments[1], nbytes=1 << 20)]
    with pytest.raises(WireError) as error:
        shm.ShmReader(shm.shm_info(bad, offsets), BUFFERS, USED)
    assert "not a name of shared memory" in str(error.value)
    assert "too short" in str(error.value)


def test_missing_rank_and_bad_offsets(published):
    _, _, segments, offsets = published
    with pytest.raises(WireError, match="no segment was named"):
        shm.ShmReader(shm.shm_info(segments[:1], offsets), BUFFERS, USED)
    wrong = offsets.copy()
    wrong[0] = 1 << 40
    with pytest.raises(WireError, match="does not lie inside"):
        shm.ShmReader(shm.shm_info(segments, wrong), BUFFERS, USED)
    with pytest.raises(WireError, match="do not fit the prepared sources"):
        shm.ShmReader(shm.shm_info(segments, offsets[:2]), BUFFERS, USED)


def test_closed_segment_is_gone_but_mapped_bytes_stay(published):
    tensors, publishers, segments, offsets = published
    reader = shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)
    for p in publishers:
        p.close()
    assert torch.equal(reader.memory(3), tensors[3])
    with pytest.raises(WireError, match="can't be opened"):
        shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)


def test_killed_owner_leaves_nothing_for_long():
    code = (
        "import torch, time; from vllm_refit_ext.wires import shared_file, shm\n"
        "p = shm.ShmPublisher(5, {0: 256}, 512); print(p.name, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    assert (shared_file.FOLDER / name).exists()
    assert name not in shared_file.remove_leftovers(), "a live owner's segment stays"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert name in shared_file.remove_leftovers()
    assert not (shared_file.FOLDER / name).exists()


def test_too_little_room_is_an_error_not_a_signal():
    free = os.statvfs(shared_file.FOLDER)
    with pytest.raises(WireError, match="too small"):
        shm.ShmPublisher(6, {}, free.f_blocks * free.f_frsize * 4)
    assert not list(shared_file.FOLDER.glob(f"refit-*-{os.getpid()}-*-r6"))


def test_no_memory_is_unmapped_under_a_view(published):
    """Both sides close everything, twice, while tensors look at the memory."""
    tensors, publishers, segments, offsets = published
    kept: dict = {}
    reader = shm.ShmReader(shm.shm_info(segments, offsets), BUFFERS, USED)
    views = [reader.memory(3), publishers[1]._file.bytes]
    kept = dict(reader.maps)
    reader.close()
    for file in [*kept.values(), *kept.values()]:
        file.close()
    for p in [*publishers, *publishers]:
        p.close()
    assert torch.equal(views[0], tensors[3])
    assert int(views[1].sum()) > 0


def test_a_segment_has_its_name_only_when_it_is_locked(monkeypatch):
    """Another job cleans up at every moment in which the segment could be without its lock."""
    lock = shared_file.fcntl.flock

    def clean(fd, how):
        if how == shared_file.fcntl.LOCK_EX:
            shared_file.remove_leftovers()
        lock(fd, how)

    monkeypatch.setattr(shared_file.fcntl, "flock", clean)
    publisher = shm.ShmPublisher(0, {0: 256}, 512)
    segment = publisher.publish({0: torch.ones(7)})
    assert (shared_file.FOLDER / segment.name).exists()
    assert not list(shared_file.FOLDER.glob(f"{segment.name}?*"))
    publisher.close()


def test_an_owner_that_died_before_it_named_its_file_leaves_nothing_for_long():
    path = shared_file.FOLDER / f"refit-{os.geteuid()}-{os.getpid()}-{'0' * 16}-r4.new"
    path.touch()
    assert path.name not in shared_file.remove_leftovers(), "it may be about to get its lock"
    os.utime(path, (0, 0))
    assert path.name in shared_file.remove_leftovers()


def test_names_of_a_peer_are_checked(published, tmp_path):
    """Paths, names of other ranks, links, folders, files of another user: refused by name, and nothing is opened."""
    _, _, segments, offsets = published
    good = segments[0].name
    link = shared_file.FOLDER / f"refit-{os.geteuid()}-1-{'a' * 16}-r0"
    link.symlink_to(shared_file.FOLDER / good)
    folder = shared_file.FOLDER / f"refit-{os.geteuid()}-1-{'b' * 16}-r0"
    folder.mkdir()
    names = [
        f"../shm/{good}",
        f"/dev/shm/{good}",
        segments[1].name,
        good + "\0",
        good + "\n",
        "\ud800",
        "",
        link.name,
        folder.name,
    ]
    gc.collect()  # what other tests left open would be closed in between
    before = len(os.listdir("/proc/self/fd"))
    try:
        for name in names:
            bad = [msgspec.structs.replace(segments[0], name=name), segments[1]]
            with pytest.raises(WireError):
                shm.ShmReader(shm.shm_info(bad, offsets), BUFFERS, USED)
    finally:
        link.unlink()
        folder.rmdir()
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_offsets_than_the_trainer_filled_are_refused():
    """They stay inside the segment, and would read other elements."""
    plan_buffers = [Buffer("a", 0, "float32", (4,)), Buffer("b", 0, "float32", (4,))]
    offsets, sizes = shm.segment_offsets(plan_buffers, np.array([0, 1]))
    publisher = shm.ShmPublisher(0, dict(enumerate(offsets.tolist())), sizes[0], shm.seal_of(offsets))
    segment = publisher.publish({0: torch.zeros(4), 1: torch.ones(4)})
    shm.ShmReader(shm.shm_info([segment], offsets), plan_buffers, np.array([0, 1]))
    for wrong in (offsets[::-1].copy(), offsets + 8, np.array([offsets[0]] * 2)):
        with pytest.raises(WireError, match="other places than the trainer filled"):
            shm.ShmReader(shm.shm_info([segment], wrong), plan_buffers, np.array([0]))
    with pytest.raises(WireError, match="two segments"):
        shm.ShmReader(shm.shm_info([segment, segment], offsets), plan_buffers, np.array([0]))
    publisher.close()
