"""Wire `shm`: trainer ranks fill files in shared memory, engine ranks map them and pull what their plan names.

For trainer and engine on one host where CUDA IPC can't serve: CPUs, and GPUs in containers that forbid it. Each trainer rank owns
one segment: a 64-byte header, then the buffers that the plan reads from this rank, each at a 256-byte boundary. A segment is made
once and reused for every refit. Publishing copies each used buffer once; nothing is gathered and nothing is sent to a rank that
does not read it.

The header works as a sequence lock. Its nonce changes with every publication and the state says whether filling is complete, so a
reader that maps an old, unfinished or refilled segment finds out before it commits. A mapped segment stays readable when its
trainer dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, WireError
from vllm_refit_ext.core.messages import Segment, ShmInfo, UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.sites import Sites, not_shared, this_site
from vllm_refit_ext.core.table import Column, pack, unpack

FOLDER = Path("/dev/shm")
HEADER = struct.Struct("<8sIIQQiI24x")  # magic, protocol, state, nonce, nbytes, rank, pid
MAGIC, PROTOCOL = b"REFITSHM", 1
FILLING, COMPLETE = 0, 1
ALIGN = 256
_NAME = re.compile(r"refit-(\d+)-(\d+)-[0-9a-f]{16}-r(\d+)")


def segment_offsets(buffers: Sequence[Buffer], used: Int) -> tuple[Int, dict[int, int]]:
    """Where each used buffer lies in its rank's segment.

    used: int64 indices into `buffers`. Returns offsets int64 [buffers], -1 where not used, and the bytes of each rank's segment.
    """
    offsets = np.full(len(buffers), -1, np.int64)
    size: dict[int, int] = {}
    for i in np.unique(used):
        buffer = buffers[i]
        at = size.get(buffer.rank, HEADER.size + ALIGN - HEADER.size % ALIGN)
        offsets[i] = at
        size[buffer.rank] = -(-(at + buffer.nbytes) // ALIGN) * ALIGN
    return offsets, size


class ShmPublisher:
    """A trainer rank's segment. `publish` fills it; `close` removes it."""

    def __init__(self, rank: int, offsets: Mapping[int, int], nbytes: int) -> None:
        """offsets: byte offset in the segment of each buffer, by any key that `publish` will use. nbytes: of the segment.

        Raises WireError when shared memory has too little room; nothing is left behind then.
        """
        remove_stale_segments()
        self.rank, self.nbytes, self._offsets = rank, max(nbytes, HEADER.size), dict(offsets)
        self.name = f"refit-{os.geteuid()}-{os.getpid()}-{secrets.token_hex(8)}-r{rank}"
        path = FOLDER / self.name
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Held while this process lives: a segment whose lock is free is a leftover, whatever pid namespace its owner was in.
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Reserved now: a file that grows page by page would end the process with SIGBUS when shared memory is full.
            os.posix_fallocate(fd, 0, self.nbytes)
            self._map = mmap.mmap(fd, self.nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            free = os.statvfs(FOLDER)
            room = f"{free.f_bavail * free.f_frsize} bytes free in {FOLDER}"
            do = "give the container more shared memory, or use another wire"
            raise WireError(
                "shared memory is too small", where=f"trainer rank {rank}", got=room, wanted=f"{nbytes} bytes", do=do
            ) from None
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        # Runs at collection and at exit, so that only a killed process leaves its segment behind.
        self._remove = weakref.finalize(self, _remove, path, fd, os.getpid())

    def publish(self, tensors: Mapping[int, torch.Tensor]) -> Segment:
        """Copy each tensor to its place; keys are those of `offsets`. Any device, any strides. Returns what readers need."""
        nonce = secrets.randbits(63)
        self._write_header(FILLING, nonce)
        for key, at in self._offsets.items():
            source = tensors[key].detach()
            nbytes = source.numel() * source.element_size()
            place = self._memory[at : at + nbytes].view(source.dtype).view(source.shape)
            place.copy_(source)
        self._write_header(COMPLETE, nonce)
        return Segment(rank=self.rank, name=self.name, nbytes=self.nbytes, nonce=nonce, site=this_site())

    def _write_header(self, state: int, nonce: int) -> None:
        HEADER.pack_into(self._map, 0, MAGIC, PROTOCOL, state, nonce, self.nbytes, self.rank, os.getpid())

    def close(self) -> None:
        """Remove the segment's name. Readers that mapped it keep it until they let go. Safe to call twice."""
        self._remove()


class ShmReader:
    """An engine rank's view of all segments of one refit."""

    def __init__(self, info: ShmInfo, buffers: Sequence[Buffer], used: Int, mapped: dict[str, mmap.mmap] | None = None) -> None:
        """Map the segments that hold the buffers in `used` (int64 indices) and check every header.

        mapped: mappings kept from an earlier refit, by name. Raises WireError listing every segment that is missing, foreign,
        stale or too short; no new mapping is left open then.
        """
        self._segments = {s.rank: s for s in info.segments}
        self._buffers, self._offsets = list(buffers), unpack(info.offsets)
        self.maps: dict[str, mmap.mmap] = {}
        problems = self._problems_of_offsets(used)
        ranks = sorted({self._buffers[i].rank for i in np.unique(used)}) if not problems else []
        for rank in ranks:
            segment = self._segments[rank]
            try:
                self.maps[segment.name] = (mapped or {}).get(segment.name) or _open(segment)
                self._check(segment)
            except WireError as error:
                problems += error.problems
        if problems:
            self._memory: dict[int, torch.Tensor] = {}
            for name in set(self.maps) - set(mapped or {}):
                self.maps[name].close()
            raise WireError.of(problems, f"wire shm: {len(problems)} problem(s), nothing was written")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and nothing here writes to it
            self._memory = {r: torch.frombuffer(self.maps[self._segments[r].name], dtype=torch.uint8) for r in ranks}

    def _problems_of_offsets(self, used: Int) -> list[Problem]:
        if self._offsets.shape != (len(self._buffers),):
            got = f"{list(self._offsets.shape)} offsets"
            return [
                Problem(
                    "the offsets do not fit the prepared sources", "wire shm", got, f"[{len(self._buffers)}]", "prepare again"
                )
            ]
        problems = []
        for i in np.unique(used):
            buffer, at = self._buffers[i], int(self._offsets[i])
            where = f"trainer rank {buffer.rank}, buffer {buffer.name!r}"
            segment = self._segments.get(buffer.rank)
            if segment is None:
                problems.append(Problem("no segment was named for its rank", where))
            elif at < HEADER.size or at % 8 or at + buffer.nbytes > segment.nbytes:
                got, wanted = f"{at}..{at + buffer.nbytes}", f"within {HEADER.size}..{segment.nbytes}, at a multiple of 8"
                problems.append(Problem("it does not lie inside its segment", where, got, wanted))
        return problems

    def _check(self, segment: Segment) -> None:
        magic, protocol, state, nonce, nbytes, rank, _ = HEADER.unpack_from(self.maps[segment.name], 0)
        where = f"wire shm, segment {segment.name!r} of trainer rank {segment.rank}"
        if magic != MAGIC or protocol != PROTOCOL:
            raise WireError(
                "not a segment of this protocol", where=where, got=f"{magic!r} {protocol}", wanted=f"{MAGIC!r} {PROTOCOL}"
            )
        if (nonce, nbytes, rank) != (segment.nonce, segment.nbytes, segment.rank):
            do = "send the reply of the latest publication"
            raise WireError(
                "the segment was refilled or belongs to another publication", where=where, got=nonce, wanted=segment.nonce, do=do
            )
        if state != COMPLETE:
            raise WireError("the trainer has not finished filling it", where=where, do="call update_weights after publishing")

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of source buffer `buffer`, uint8 [nbytes], without a copy."""
        owner, at = self._buffers[buffer], int(self._offsets[buffer])
        return self._memory[owner.rank][at : at + owner.nbytes]

    def confirm(self) -> None:
        """Raise WireError when a segment was refilled since it was mapped."""
        for segment in self._segments.values():
            if segment.name in self.maps:
                self._check(segment)

    def close(self) -> None:
        """Let go of the views. The mappings stay for the next refit."""
        self._memory = {}


class _Share(msgspec.Struct):
    """Offsets of this rank's buffers in its segment (-1: not used), and the segment's size."""

    offsets: Column
    nbytes: int


class _Part(msgspec.Struct):
    """A rank's publication, with the offsets of its buffers."""

    offsets: Column
    segment: Segment | None


class _Sender:
    """The wire's trainer half, as `vllm_refit_ext.wires` describes it."""

    def __init__(self, rank: int, share: _Share) -> None:
        self._offsets = share.offsets
        used = {i: int(at) for i, at in enumerate(unpack(share.offsets)) if at >= 0}
        self._publisher = ShmPublisher(rank, used, share.nbytes) if used else None

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        segment = self._publisher.publish(dict(enumerate(tensors))) if self._publisher else None
        return msgspec.msgpack.encode(_Part(self._offsets, segment))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def shares(plan: Plan, sites: Sites, bucket_bytes: int = 0) -> list[bytes]:
    """Lay out the segments: every rank's offsets and size. There are no buckets."""
    offsets, sizes = segment_offsets(plan.sources, plan.source)
    owner = np.array([b.rank for b in plan.sources], np.int64)
    return [
        msgspec.msgpack.encode(_Share(pack(offsets[owner == rank]), sizes.get(rank, 0))) for rank in range(len(sites.trainers))
    ]


def open_sender(rank: int, share: bytes, tensors: Sequence[torch.Tensor]) -> _Sender:
    """Make this rank's segment. Raises WireError when shared memory has too little room."""
    return _Sender(rank, msgspec.msgpack.decode(share, type=_Share))


def info(parts: Sequence[bytes]) -> ShmInfo:
    """The message for `update_weights`. Sources are numbered rank by rank, as the sender concatenated them."""
    decoded = [msgspec.msgpack.decode(p, type=_Part) for p in parts]
    return shm_info([p.segment for p in decoded if p.segment is not None], np.concatenate([unpack(p.offsets) for p in decoded]))


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> ShmReader:
    """Map and check the segments that this rank's plan reads. Raises WireError, ConfigError."""
    if update.shm is None:
        raise ConfigError("wire shm needs the field shm", where="update_weights", do="pass what the publisher returned")
    reader = ShmReader(
        update.shm, plan.sources, np.unique(plan.source), {n: m for n, m in kept.items() if isinstance(m, mmap.mmap)}
    )
    for name in set(kept) - set(reader.maps):
        with contextlib.suppress(BufferError):  # a view is alive: the mapping goes when the view does
            kept.pop(name).close()
    kept.update(reader.maps)
    return reader


def shm_info(segments: Sequence[Segment], offsets: Int) -> ShmInfo:
    """The message for `update_weights` from all ranks' publications and the offsets of `segment_offsets`."""
    return ShmInfo(segments=list(segments), offsets=pack(offsets))


def remove_stale_segments() -> list[str]:
    """Remove this user's segments whose owner is gone, and return their names. A killed trainer can't do it itself."""
    gone = []
    for path in FOLDER.glob(f"refit-{os.geteuid()}-*-r*"):
        if not _NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # ended or removed by its owner meanwhile
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                gone.append(path.name)
            finally:
                os.close(fd)
    return gone


def _remove(path: Path, fd: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's segment
        path.unlink(missing_ok=True)
        os.close(fd)


def _open(segment: Segment) -> mmap.mmap:
    where = f"wire shm, segment {segment.name!r} of trainer rank {segment.rank}"
    if not _NAME.fullmatch(segment.name):
        raise WireError("not a name of a segment", where=where, wanted=_NAME.pattern)
    try:
        fd = os.open(FOLDER / segment.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        do = not_shared(segment.site)
        raise WireError("the segment can't be opened", where=where, got=error.strerror or error, do=do) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise WireError(
                "the segment belongs to another user", where=where, got=f"uid {status.st_uid}", wanted=f"uid {os.geteuid()}"
            )
        if status.st_size < segment.nbytes or segment.nbytes < HEADER.size:
            raise WireError(
                "the segment is too short", where=where, got=f"{status.st_size} bytes", wanted=f"{segment.nbytes} bytes"
            )
        return mmap.mmap(fd, segment.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(fd)
