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

import hashlib
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, WireError
from vllm_refit_ext.core.hosts import Hosts, check_near, this_host
from vllm_refit_ext.core.messages import Segment, ShmInfo, UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import Column, pack, unpack
from vllm_refit_ext.wires import Reader, Sender
from vllm_refit_ext.wires.boxes import as_bytes
from vllm_refit_ext.wires.shared_file import SharedFile, create, open_file

HEADER = struct.Struct("<8sIIQQiI16s8x")  # magic, protocol, state, nonce, nbytes, rank, pid, seal
MAGIC, PROTOCOL = b"REFITSHM", 2
FILLING, COMPLETE = 0, 1
ALIGN = 256


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

    def __init__(self, rank: int, offsets: Mapping[int, int], nbytes: int, seal: bytes = b"") -> None:
        """offsets: byte offset in the segment of each buffer, by any key that `publish` will use. nbytes: of the segment. seal:
        see `seal_of`; without it a reader can't tell other offsets from these.

        Raises WireError when shared memory has too little room; nothing is left behind then.
        """
        self.rank, self.nbytes, self._offsets, self._seal = rank, max(nbytes, HEADER.size), dict(offsets), seal
        self._file = create(rank, self.nbytes)
        self.name = self._file.name

    def publish(self, tensors: Mapping[int, torch.Tensor]) -> Segment:
        """Copy each tensor to its place; keys are of `offsets`, what is not there stays. Any device, any strides. Returns what
        readers need."""
        nonce = secrets.randbits(63)
        self._write_header(FILLING, nonce)
        self.fill(tensors)
        self._write_header(COMPLETE, nonce)
        return Segment(rank=self.rank, name=self.name, nbytes=self.nbytes, nonce=nonce, host=this_host())

    def fill(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copy each tensor to its place, and leave the header as it is."""
        for key in self._offsets.keys() & tensors.keys():
            source, at = tensors[key].detach(), self._offsets[key]
            place = self._file.bytes[at : at + source.numel() * source.element_size()]
            place.view(source.dtype).view(source.shape).copy_(source)

    def holds(self, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether the segment's bytes are those of `tensors`."""
        return all(
            torch.equal(
                self._file.bytes[at : at + tensors[key].numel() * tensors[key].element_size()],
                as_bytes(tensors[key].detach().cpu().contiguous()),
            )
            for key, at in self._offsets.items()
        )

    def end(self) -> None:
        """Readers find out that these bytes are of no publication any more."""
        self._write_header(FILLING, 0)

    def _write_header(self, state: int, nonce: int) -> None:
        HEADER.pack_into(self._file.memory, 0, MAGIC, PROTOCOL, state, nonce, self.nbytes, self.rank, os.getpid(), self._seal)

    def close(self) -> None:
        """Remove the segment's name. Readers that mapped it keep it until they let go. Safe to call twice."""
        self._file.close()


def seal_of(offsets: Int) -> bytes:
    """What a segment's header says of where its rank's buffers lie: 16 bytes. A message that says otherwise is refused."""
    return hashlib.blake2b(np.ascontiguousarray(offsets, "<i8").tobytes(), digest_size=16).digest()


class _Maps:
    """Segments that stay mapped between refits, by name."""

    def __init__(self) -> None:
        self.files: dict[str, SharedFile] = {}

    def close(self) -> None:
        """Let go of all."""
        for file in self.files.values():
            file.close()
        self.files = {}


class ShmReader(Reader):
    """An engine rank's view of all segments of one refit."""

    def __init__(
        self, info: ShmInfo, buffers: Sequence[Buffer], used: Int, mapped: Mapping[str, SharedFile] | None = None
    ) -> None:
        """Map the segments that hold the buffers in `used` (int64 indices) and check every header.

        mapped: mappings kept from an earlier refit, by name. Raises WireError listing every segment that is missing, foreign,
        stale or too short; no new mapping is left open then.
        """
        self._segments = {s.rank: s for s in info.segments}
        self._buffers = list(buffers)
        self.maps: dict[str, SharedFile] = {}
        problems = self._problems_of_offsets(info, used)
        ranks = sorted({self._buffers[i].rank for i in np.unique(used)}) if not problems else []
        owner = np.array([b.rank for b in self._buffers], np.int64)
        for rank in ranks:
            segment = self._segments[rank]
            try:
                self.maps[segment.name] = (mapped or {}).get(segment.name) or _open(segment)
                self._check(segment, seal_of(self._offsets[owner == rank]))
            except WireError as error:
                problems += error.problems
        if problems:
            for name in set(self.maps) - set(mapped or {}):
                self.maps[name].close()
            raise WireError.of(problems, f"wire shm: {len(problems)} problem(s), nothing was written")
        self._memory = {r: self.maps[self._segments[r].name].bytes for r in ranks}

    def _problems_of_offsets(self, info: ShmInfo, used: Int) -> list[Problem]:
        if len(self._segments) < len(info.segments):
            return [Problem("two segments were named for one rank", "wire shm", str([s.rank for s in info.segments]))]
        try:
            self._offsets = unpack(info.offsets)
        except ValueError as error:
            return [Problem("the offsets can't be read", "wire shm", str(error), do="pass what the publisher returned")]
        if self._offsets.shape != (len(self._buffers),):
            got, wanted = f"{list(self._offsets.shape)} offsets", f"[{len(self._buffers)}]"
            return [Problem("the offsets do not fit the prepared sources", "wire shm", got, wanted, "prepare again")]
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

    def _check(self, segment: Segment, seal: bytes | None = None) -> None:
        magic, protocol, state, nonce, nbytes, rank, _, sealed = HEADER.unpack_from(self.maps[segment.name].memory, 0)
        where = _where(segment)
        if magic != MAGIC or protocol != PROTOCOL:
            raise WireError(
                "not a segment of this protocol", where=where, got=f"{magic!r} {protocol}", wanted=f"{MAGIC!r} {PROTOCOL}"
            )
        if (nonce, nbytes, rank) != (segment.nonce, segment.nbytes, segment.rank):
            do = "send the reply of the latest publication"
            raise WireError(
                "the segment was refilled or belongs to another publication", where=where, got=nonce, wanted=segment.nonce, do=do
            )
        if seal is not None and sealed.strip(b"\0") and sealed != seal:
            raise WireError("the message names other places than the trainer filled", where=where, do="pass what it returned")
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


class _SendTable(msgspec.Struct):
    """Offsets of this rank's buffers in its segment (-1: not used), and the segment's size."""

    offsets: Column
    nbytes: int


class _Part(msgspec.Struct):
    """A rank's publication, with the offsets of its buffers."""

    offsets: Column
    segment: Segment | None


class _Sender(Sender):
    """The wire's trainer half, as `vllm_refit_ext.wires` describes it."""

    def __init__(self, rank: int, table: _SendTable) -> None:
        self._offsets = table.offsets
        used = {i: int(at) for i, at in enumerate(unpack(table.offsets)) if at >= 0}
        self._publisher = ShmPublisher(rank, used, table.nbytes, seal_of(unpack(table.offsets))) if used else None

    @property
    def copied(self) -> int:  # type: ignore[override]
        return self._publisher.nbytes if self._publisher else 0

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._publisher is None or self._publisher.holds(dict(enumerate(tensors)))

    def end(self) -> None:
        if self._publisher is not None:
            self._publisher.end()

    def more(self, tensors: Mapping[int, torch.Tensor]) -> None:
        if self._publisher is not None:
            self._publisher.fill(tensors)

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        numbers = range(len(tensors)) if self.only is None else self.only
        segment = self._publisher.publish({i: tensors[i] for i in numbers}) if self._publisher else None
        return msgspec.msgpack.encode(_Part(self._offsets, segment))

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def send_tables(plan: Plan, hosts: Hosts, bucket_bytes: int = 0) -> list[bytes]:
    """Lay out the segments: every rank's offsets and size. There are no buckets. Raises ConfigError where an engine rank needs
    bytes of another host."""
    check_near("shm", plan.edges(), hosts)
    offsets, sizes = segment_offsets(plan.sources, plan.source)
    return [
        msgspec.msgpack.encode(_SendTable(pack(offsets[plan.source_buffers.of(rank)]), sizes.get(rank, 0)))
        for rank in range(len(hosts.trainers))
    ]


def open_sender(rank: int, table: bytes, tensors: Sequence[torch.Tensor]) -> _Sender:
    """Make this rank's segment. Raises WireError when shared memory has too little room."""
    return _Sender(rank, msgspec.msgpack.decode(table, type=_SendTable))


def info(parts: Sequence[bytes]) -> ShmInfo:
    """The message for `update_weights`. Sources are numbered rank by rank, as the sender concatenated them."""
    decoded = [msgspec.msgpack.decode(p, type=_Part) for p in parts]
    return shm_info([p.segment for p in decoded if p.segment is not None], np.concatenate([unpack(p.offsets) for p in decoded]))


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> ShmReader:
    """Map and check the segments that this rank's plan reads. Raises WireError, ConfigError."""
    if update.shm is None:
        raise ConfigError("wire shm needs the field shm", where="update_weights", do="pass what the publisher returned")
    maps: _Maps = kept.setdefault("shm", _Maps())
    reader = ShmReader(update.shm, plan.sources, np.unique(plan.source), maps.files)
    for name in set(maps.files) - set(reader.maps):
        maps.files[name].close()
    maps.files = dict(reader.maps)
    reader.whole, reader.steps = plan, [plan]
    return reader


def shm_info(segments: Sequence[Segment], offsets: Int) -> ShmInfo:
    """The message for `update_weights` from all ranks' publications and the offsets of `segment_offsets`."""
    return ShmInfo(segments=list(segments), offsets=pack(offsets))


def _where(segment: Segment) -> str:
    return f"wire shm, segment {ascii(segment.name)[:80]} of trainer rank {segment.rank}"


def _open(segment: Segment) -> SharedFile:
    if segment.nbytes < HEADER.size:
        raise WireError("the segment is too short", where=_where(segment), got=segment.nbytes, wanted=f"{HEADER.size} bytes")
    return open_file(segment.name, segment.rank, segment.nbytes, _where(segment), segment.host)
