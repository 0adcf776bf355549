"""A ring of staging buffers between one trainer rank and the engine ranks, and the words by which they take turns.

The buffers are device memory that is exported once, or shared memory on a CPU. The words lie in a file of shared memory: for
every engine rank how many messages are ready and how many it has done with. A trainer rank fills a buffer when what it held is
done with; an engine rank reads message i when i + 1 are ready. `ipc_lanes` says which message lies where. All waits have a
deadline, and each side sees when the other is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from vllm_refit_ext.core.errors import DeadlineError, WireError
from vllm_refit_ext.core.messages import RingInfo
from vllm_refit_ext.core.sites import not_shared, this_site
from vllm_refit_ext.wires import cuda_ipc
from vllm_refit_ext.wires.ipc_lanes import RING
from vllm_refit_ext.wires.shm import FOLDER, ShmPublisher

WORDS = 256
"""Byte offset of the words; the header of `wires.shm` stands before them."""
ALIGN = 256
_WORD = struct.Struct("<Q")
_SPIN_S = 1e-3
"""A bucket takes a fraction of a millisecond, less than a sleep that one asks for: so long the wait only looks."""
_POLL_S = 50e-6
_LOOK_S = 0.05


class Stoppable(Protocol):
    """Something that may end a wait for another side."""

    @property
    def stopped(self) -> bool: ...


class Words:
    """The words of one trainer rank, mapped by both sides."""

    def __init__(self, path: Path, engines: int, site: str = "") -> None:
        """Map them. site: of the trainer rank. Raises WireError when the file is gone or too short."""
        self._path, self.engines = path, engines
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise WireError(
                "the words of a ring can't be opened",
                where=str(path.name),
                got=error.strerror or error,
                do=not_shared(site),
            ) from None
        size = os.fstat(self._fd).st_size
        if size < words_bytes(engines) or os.fstat(self._fd).st_uid not in (os.geteuid(), 0):
            os.close(self._fd)
            raise WireError(
                "these are not the words of a ring", where=str(path.name), got=f"{size} bytes", wanted=words_bytes(engines)
            )
        self.memory = mmap.mmap(self._fd, size)

    def _at(self, engine: int, which: int) -> int:
        return WORDS + (2 + 2 * engine + which) * _WORD.size

    def read(self, engine: int, which: int) -> int:
        """Messages ready (which 0) or done (1) for an engine rank."""
        return int(_WORD.unpack_from(self.memory, self._at(engine, which))[0])

    def write(self, engine: int, which: int, value: int) -> None:
        """Set it."""
        _WORD.pack_into(self.memory, self._at(engine, which), value)

    def clear(self, nonce: int) -> None:
        """Begin a refit."""
        self.memory[WORDS : words_bytes(self.engines)] = bytes(words_bytes(self.engines) - WORDS)
        _WORD.pack_into(self.memory, WORDS, nonce)

    @property
    def nonce(self) -> int:
        """Of the refit that the ring is in."""
        return int(_WORD.unpack_from(self.memory, WORDS)[0])

    def stop(self) -> None:
        """Tell the other side that this one has given up."""
        _WORD.pack_into(self.memory, WORDS + _WORD.size, 1)

    @property
    def stopped(self) -> bool:
        """Whether a side gave up."""
        return bool(_WORD.unpack_from(self.memory, WORDS + _WORD.size)[0])

    def owner_is_gone(self) -> bool:
        """Whether the trainer rank has ended: it holds a lock as long as it lives."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def wait(self, engine: int, which: int, least: int, deadline: float, where: str, others: Sequence[Stoppable] = ()) -> None:
        """Wait until a word is at least `least`. Raises WireError when a side is gone or gave up, DeadlineError."""
        begun = time.monotonic()
        look = begun + _LOOK_S
        while self.read(engine, which) < least:
            now = time.monotonic()
            if any(side.stopped for side in (self, *others)):
                raise WireError("the other side gave up this refit", where=where, do="see its error; refit once more")
            if now > look:
                if which == 0 and self.owner_is_gone():
                    raise WireError("the trainer rank has ended", where=where, do="restart it, prepare and refit")
                look = now + _LOOK_S
            if now > deadline:
                what = "bytes of the trainer did not come" if which == 0 else "an engine rank did not read on"
                raise DeadlineError(
                    what, where=where, got=f"{self.read(engine, which)} messages", wanted=f"{least} before the deadline"
                )
            if now > begun + _SPIN_S:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Unmap."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        with contextlib.suppress(OSError):
            os.close(self._fd)


def padded(slots: Iterable[int]) -> list[int]:
    """Sizes of buffers, each at a multiple of ALIGN bytes."""
    return [-(-n // ALIGN) * ALIGN for n in slots]


def words_bytes(engines: int) -> int:
    """Bytes of the header and the words."""
    return WORDS + (2 + 2 * engines) * _WORD.size


class RingOwner:
    """A trainer rank's ring. slots: for each engine rank the bytes of one of its RING buffers, 0 for one that reads elsewhere."""

    def __init__(self, rank: int, slots: list[int], device: torch.device) -> None:
        """Allocate and export. Raises WireError when there is no room."""
        self._device = device
        self._slots = padded(slots)
        self.nbytes = max(ALIGN, RING * sum(self._slots))
        start = -(-words_bytes(len(slots)) // 4096) * 4096
        on_host = device.type != "cuda"
        self._file = ShmPublisher(rank, {}, start + (self.nbytes if on_host else 0))
        self.words = Words(FOLDER / self._file.name, len(slots))
        self._address, handle = 0, b""
        if on_host:
            self.memory = torch.frombuffer(self.words.memory, dtype=torch.uint8)[start:]
        else:
            self._address = cuda_ipc.allocate(self.nbytes, device)
            handle = cuda_ipc.export(self._address)
            self.memory = cuda_ipc.as_tensor(self._address, self.nbytes, device)
        uuid = "" if on_host else cuda_ipc.device_uuid(device.index)
        self.info = RingInfo(
            rank=rank,
            name=self._file.name,
            slots=self._slots,
            start=start,
            handle=handle,
            device=uuid,
            address=self._address,
            process=cuda_ipc.PROCESS,
            site=this_site(),
        )

    def slot(self, engine: int, half: int) -> torch.Tensor:
        """Buffer `half` of an engine rank, uint8."""
        return slot_of(self.memory, self._slots, engine, half)

    def close(self) -> None:
        """Free the buffers and remove the words. Readers that still map them keep the memory until they let go."""
        self.words.stop()
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._address:
            cuda_ipc.free(self._address, self._device)
            self._address = 0
        self._file.close()


class RingReader:
    """An engine rank's mapping of one trainer rank's ring."""

    def __init__(self, info: RingInfo, device: torch.device) -> None:
        """Map it. Raises WireError where it can't be opened."""
        self.info, self._device, self._opened = info, device, 0
        self.words = Words(FOLDER / info.name, len(info.slots), info.site)
        nbytes = max(ALIGN, RING * sum(info.slots))
        if not info.handle:
            self.memory = torch.frombuffer(self.words.memory, dtype=torch.uint8)[info.start :]
        elif info.process == cuda_ipc.PROCESS:
            self.memory = cuda_ipc.as_tensor(info.address, nbytes, device)
        else:
            self._opened = cuda_ipc.open_handle(info.handle, device)
            self.memory = cuda_ipc.as_tensor(self._opened, nbytes, device)

    def slot(self, engine: int, half: int) -> torch.Tensor:
        """Buffer `half` of an engine rank, uint8."""
        return slot_of(self.memory, self.info.slots, engine, half)

    def close(self) -> None:
        """Unmap."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._opened:
            cuda_ipc.close_handle(self._opened, self._device)
            self._opened = 0
        self.words.close()


def slot_of(memory: torch.Tensor, slots: list[int], engine: int, half: int) -> torch.Tensor:
    """Buffer `half` of RING of an engine rank."""
    start = RING * sum(slots[:engine]) + half * slots[engine]
    return memory[start : start + slots[engine]]
