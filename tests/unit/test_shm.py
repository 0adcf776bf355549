"""Wire `shm`: publish in one process, pull in another, and every way in which a segment can be wrong."""

from __future__ import annotations

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
from vllm_refit_ext.wires import shm

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
    assert "not a name of a segment" in str(error.value)
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
        "import torch, time; from vllm_refit_ext.wires import shm\n"
        "p = shm.ShmPublisher(5, {0: 256}, 512); print(p.name, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    assert (shm.FOLDER / name).exists()
    assert name not in shm.remove_stale_segments(), "a live owner's segment stays"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert name in shm.remove_stale_segments()
    assert not (shm.FOLDER / name).exists()


def test_too_little_room_is_an_error_not_a_signal():
    free = os.statvfs(shm.FOLDER)
    with pytest.raises(WireError, match="too small"):
        shm.ShmPublisher(6, {}, free.f_blocks * free.f_frsize * 4)
    assert not list(shm.FOLDER.glob(f"refit-*-{os.getpid()}-*-r6"))
