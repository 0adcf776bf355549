"""A ring of staging buffers between one trainer rank and the engine ranks, and the words by which they take turns.

The buffers are device memory that is exported once, or shared memory on a CPU. The words lie in a file of shared memory: for
every engine rank how many messages are ready and how many it has done with. A trainer rank fills a buffer when what it held is
done with; an engine rank reads message i when i + 1 are ready. `ring_order` says which message lies where. All waits have a
deadline, and each side sees when the other is gone.

Every word has one writer and carries the epoch of the refit that it speaks of, so what a late rank writes or reads is never taken
for another refit's; and refits take turns in SETS sets of words, so that it overwrites nothing of those that follow. The file's
header names everything that a message says of the ring, so a message that says otherwise is refused.

A word is one aligned store of 8 bytes, without a fence, which Python does not have. In host memory a message is there before its
word because x86-64 shows stores to other cores in their order, so other machines are refused. On a GPU the owner waits
for its stream before it sets the word, and the reader launches its kernels after it has read it, on any machine.
"""

from __future__ import annotations

import hashlib
import platform
import struct
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import DeadlineError, WireError, gave_up
from vllm_refit_ext.core.hosts import this_host
from vllm_refit_ext.core.messages import RingRank
from vllm_refit_ext.wires import cuda_ipc
from vllm_refit_ext.wires.shared_file import SharedFile, create, open_file
from vllm_refit_ext.wires.staging import ALIGN, RING, padded

HEADER = struct.Struct("<8sIi16s")  # magic, protocol, rank, seal
MAGIC, PROTOCOL = b"REFITRNG", 2
WORDS = 256
"""Byte offset of the words; the header stands before them."""
READY, DONE, STOP, REFUSED = range(4)
"""An engine rank's words. Messages: ready to read, done with. STOP: it gave up. REFUSED: the ring's owner has given it up. Its
owner writes the first and the last, the engine rank the others."""
_EPOCH, _OWNER_STOP, _FIRST = 0, 1, 2
SETS = 16
_SPIN_S = 2e-3
"""A bucket takes less than this, and a pause longer than is asked for, be it none: so long the wait only looks."""
_POLL_S = 50e-6
_LOOK_S = 0.05


class Words:
    """The words of one trainer rank, mapped by both sides. epoch: number of a refit of this ring, from 1."""

    def __init__(self, file: SharedFile, engines: int) -> None:
        self._gone = file.owner_is_gone
        memory = np.frombuffer(file.memory, "<u8", words_bytes(engines) // 8)[WORDS // 8 :]
        self._owner, self._engines = memory[:_FIRST], memory[_FIRST:].reshape(SETS, engines, 4)

    def read(self, engine: int, which: int, epoch: int) -> int:
        """Messages that are READY or DONE for an engine rank in refit `epoch`."""
        at, count = divmod(int(self._engines[epoch % SETS, engine, which]), 1 << 32)
        return count if at == epoch else 0

    def write(self, engine: int, which: int, epoch: int, count: int = 0) -> None:
        """Set a word of refit `epoch`."""
        self._engines[epoch % SETS, engine, which] = epoch << 32 | count

    @property
    def epoch(self) -> int:
        """Of the refit that the ring is in."""
        return int(self._owner[_EPOCH])

    def begin(self, epoch: int) -> None:
        """The owner begins a refit: no word of an earlier one counts any more."""
        self._owner[_EPOCH] = epoch

    def stop(self, epoch: int) -> None:
        """The owner has given up the refit, for all engine ranks."""
        self._owner[_OWNER_STOP] = epoch

    def stopped(self, epoch: int) -> bool:
        """Whether the owner gave up this refit, or has gone on to another."""
        return int(self._owner[_OWNER_STOP]) == epoch or self.epoch != epoch

    def given_up(self, engine: int, epoch: int) -> bool:
        """Whether an engine rank gave up this refit, or was given up by the owner."""
        return any(int(self._engines[epoch % SETS, engine, which]) >> 32 == epoch for which in (STOP, REFUSED))

    def wait(
        self, engine: int, which: int, least: int, epoch: int, deadline: float, where: str, stopped: Callable[[], bool]
    ) -> None:
        """Wait until READY or DONE is at least `least`. stopped: called at every look; whether someone else gave up. Raises
        WireError when a side is gone or gave up, DeadlineError."""
        begun = time.monotonic()
        look = begun + _LOOK_S
        while self.read(engine, which, epoch) < least:
            now = time.monotonic()
            if self.stopped(epoch) or self.given_up(engine, epoch) or stopped():
                raise WireError.of([gave_up(where)])
            if now > look:
                if which == READY and self._gone():
                    raise WireError("the trainer rank has ended", where=where, do="restart it, prepare and refit")
                look = now + _LOOK_S
            if now > deadline:
                what = "bytes of the trainer did not come" if which == READY else "an engine rank did not read on"
                got = f"{self.read(engine, which, epoch)} messages"
                raise DeadlineError(what, where=where, got=got, wanted=f"{least} before the deadline")
            if now > begun + _SPIN_S:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Let go of the memory: what is still written goes nowhere."""
        self._owner, self._engines = self._owner.copy(), self._engines.copy()


def words_bytes(engines: int) -> int:
    """Bytes of the header and the words."""
    return WORDS + (_FIRST + SETS * 4 * engines) * 8


def seal_of(info: RingRank, rest: bytes) -> bytes:
    """What a ring's header says of its message. rest: what the message says beside `info`, see `ring_send.SendTable`."""
    return hashlib.blake2b(msgspec.msgpack.encode(msgspec.structs.replace(info, epoch=0)) + rest, digest_size=16).digest()


class RingOwner:
    """A trainer rank's ring. slots: for each engine rank the bytes of one of its RING buffers, 0 for one that reads elsewhere."""

    def __init__(self, rank: int, slots: list[int], device: torch.device, rest: bytes = b"") -> None:
        """Allocate and export. rest: see `seal_of`. Raises WireError when there is no room, or no order of stores to rely on."""
        self._device = device
        self._slots = [padded(n) for n in slots]
        self.nbytes = max(ALIGN, RING * sum(self._slots))
        start = -(-words_bytes(len(slots)) // 4096) * 4096
        on_host = device.type != "cuda"
        if on_host and platform.machine() != "x86_64":
            do = "use the wire shm, or keep the trainer's weights on a GPU"
            what, where = "a ring in host memory relies on the order of stores", f"wire ring, trainer rank {rank}"
            raise WireError(what, where=where, got=platform.machine(), wanted="x86_64", do=do)
        self._file = create(rank, start + (self.nbytes if on_host else 0))
        self.words = Words(self._file, len(slots))
        self._address, handle = 0, b""
        if on_host:
            self.memory = self._file.bytes[start:]
        else:
            self._address = cuda_ipc.allocate(self.nbytes, device)
            handle = cuda_ipc.export(self._address)
            self.memory = cuda_ipc.as_tensor(self._address, self.nbytes, device)
        self.info = RingRank(
            rank=rank,
            name=self._file.name,
            slots=self._slots,
            start=start,
            handle=handle,
            device="" if on_host else cuda_ipc.device_uuid(device.index),
            address=self._address,
            process=cuda_ipc.process(),
            host=this_host(),
        )
        HEADER.pack_into(self._file.memory, 0, MAGIC, PROTOCOL, rank, seal_of(self.info, rest))

    def begin(self) -> RingRank:
        """Begin a refit, with the next epoch. Returns what readers need."""
        self.info = msgspec.structs.replace(self.info, epoch=self.info.epoch + 1)
        self.words.begin(self.info.epoch)
        return self.info

    def slot(self, engine: int, half: int) -> torch.Tensor:
        """Buffer `half` of an engine rank, uint8."""
        return slot_of(self.memory, self._slots, engine, half)

    def close(self) -> None:
        """Free the buffers and remove the words. Readers that still map them keep the memory until they let go."""
        self.words.stop(self.info.epoch)
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._address:
            cuda_ipc.free(self._address, self._device)
            self._address = 0
        self.words.close()
        self._file.close()


class RingMapping:
    """An engine rank's mapping of one trainer rank's ring. `seal`: of the message that it was opened by."""

    def __init__(self, info: RingRank, device: torch.device | None, rest: bytes) -> None:
        """Map it. device: whose kernels read the buffers; None maps the words alone. rest: see `seal_of`.

        Raises WireError where it can't be opened, or is not what the message says.
        """
        self._device, self._opened, self._slots = device, 0, info.slots
        self.seal, self.memory = seal_of(info, rest), torch.empty(0, dtype=torch.uint8)
        where = f"wire ring, ring of trainer rank {info.rank}"
        nbytes = max(ALIGN, RING * sum(info.slots))
        size = words_bytes(len(info.slots)) if info.handle else info.start + nbytes
        self._file = open_file(info.name, info.rank, size, where, info.host, write=True)
        try:
            self._check(where)
            self.words = Words(self._file, len(info.slots))
            if device is None:
                return
            if not info.handle:
                self.memory = self._file.bytes[info.start :]
            elif info.process == cuda_ipc.process():
                self.memory = cuda_ipc.as_tensor(info.address, nbytes, device)
            else:
                self._opened = cuda_ipc.open_handle(info.handle, device)
                self.memory = cuda_ipc.as_tensor(self._opened, nbytes, device)
        except BaseException:
            self._file.close()
            raise

    def _check(self, where: str) -> None:
        magic, protocol, _, seal = HEADER.unpack_from(self._file.memory, 0)
        if (magic, protocol) != (MAGIC, PROTOCOL):
            got, wanted = f"{magic!r} {protocol}", f"{MAGIC!r} {PROTOCOL}"
            raise WireError("these are not the words of a ring of this protocol", where=where, got=got, wanted=wanted)
        if seal != self.seal:
            do = "pass what the sender made; prepare again"
            raise WireError("the message does not describe the ring that the trainer made", where=where, do=do)

    def slot(self, engine: int, half: int) -> torch.Tensor:
        """Buffer `half` of an engine rank, uint8."""
        return slot_of(self.memory, self._slots, engine, half)

    def close(self) -> None:
        """Unmap. Safe to call twice."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._opened and self._device is not None:
            cuda_ipc.close_handle(self._opened, self._device)
            self._opened = 0
        self.words.close()
        self._file.close()


def slot_of(memory: torch.Tensor, slots: list[int], engine: int, half: int) -> torch.Tensor:
    """Buffer `half` of RING of an engine rank."""
    start = RING * sum(slots[:engine]) + half * slots[engine]
    return memory[start : start + slots[engine]]
