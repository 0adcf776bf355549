"""Wire `ipc`: engine ranks map the trainer's own parameters by CUDA IPC and read them where they lie. Nothing is staged.

For trainer and engine on the GPUs of one host. Each trainer rank exports every allocation that its parameters lie in: plain
handles, with the place of each buffer, in messages of our own. An engine rank opens what its plan reads, with its own device
current, so memory of another GPU comes over NVLink by the same code. Handles are sent again only when the trainer's memory has
moved. Mappings are closed at the end of a refit, because an open one keeps the trainer's memory from being freed; a trainer
that stays resident says so, and they stay.

Every rank exports a word of memory beside its parameters. `begin` writes a new nonce there and sends it too; an engine that opens
memory which is no longer the trainer's, or that the trainer has begun to change, reads another nonce and refuses.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, WireError
from vllm_refit_ext.core.hosts import Hosts, apart, check_near, not_shared, this_host
from vllm_refit_ext.core.messages import IpcInfo, IpcRank, UpdateInfo
from vllm_refit_ext.core.placement import Int
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import Column, pack, unpack
from vllm_refit_ext.wires import Reader, Sender, cuda_ipc
from vllm_refit_ext.wires.boxes import addresses_of

WHERE = "wire ipc"


class Export(msgspec.Struct, frozen=True):
    """What a rank exports: one handle an allocation, its size and its address in that process, and for each buffer its
    allocation (-1: not used) and its offset there."""

    handles: bytes
    bases: Column
    sizes: Column
    allocation: Column
    offset: Column
    flag: tuple[int, int]


class IpcSender(Sender):
    """A trainer rank's half. `resident`: mappings may stay open between refits, because this memory is never freed."""

    def __init__(self, rank: int, used: Int) -> None:
        """used: int64 numbers of this rank's buffers that a plan reads."""
        self.rank, self.resident = rank, False
        self._used, self.used = used, used.tolist()
        self._known: list[int] | None = None
        self._addresses: list[int] = []
        self._freed: object = None
        self._export: Export | None = None
        self._flag: torch.Tensor | None = None
        self._epoch = ""
        self._sent = False

    def export(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make handles for where the tensors lie, unless those there are still good. Raises WireError where memory can't be
        exported."""
        known, freed = self.addresses, _segments_freed(self._flag)
        if self._export is not None and freed == self._freed and known is not None and known is self._known:
            return
        addresses = addresses_of(tensors, self.used, f"{WHERE}, trainer rank {self.rank}", known)
        self._known = known
        if self._export is not None and addresses == self._addresses and (freed == self._freed or self._same_handles()):
            self._freed = freed
            return
        device = _device([tensors[i] for i in self.used], self.rank)
        with torch.cuda.device(device):
            if self._flag is None or self._flag.device != device:
                self._flag = torch.zeros(2, dtype=torch.int64, device=device)
            self._export, self._addresses = self._make(len(tensors), addresses), addresses
        self._epoch, self._sent, self._freed = secrets.token_hex(8), False, _segments_freed(self._flag)

    def _same_handles(self) -> bool:
        """Whether the allocations are the ones that were exported: memory that was freed and allocated anew may lie where it
        lay."""
        assert self._export is not None
        try:
            return b"".join(map(cuda_ipc.export, unpack(self._export.bases).tolist())) == self._export.handles
        except WireError:
            return False

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Wait for the device, then mark the memory as this refit's. Raises WireError where memory can't be exported."""
        if not len(self._used):
            return msgspec.msgpack.encode(IpcRank(rank=self.rank))
        self.export(tensors)
        assert self._flag is not None
        device, nonce = self._flag.device, secrets.randbits(62) | 1
        with torch.cuda.device(device):
            self._flag[0] = nonce
            # Parameters may have been written on any stream.
            torch.cuda.synchronize(device)
        part = IpcRank(
            rank=self.rank,
            process=cuda_ipc.process(),
            device=cuda_ipc.device_uuid(device.index),
            epoch=self._epoch,
            nonce=nonce,
            export=None if self._sent else msgspec.msgpack.encode(self._export),
            resident=self.resident,
            host=this_host(),
        )
        self._sent = True
        return msgspec.msgpack.encode(part)

    def forget(self) -> None:
        """Send the handles again: the last refit failed, and may not have reached every engine rank."""
        self._sent = False

    def end(self) -> None:
        """Readers that still map the memory find out by the nonce."""
        if self._flag is not None:
            self._flag.zero_()
            torch.cuda.synchronize(self._flag.device)

    def _make(self, count: int, addresses: list[int]) -> Export:
        assert self._flag is not None
        bases: dict[int, int] = {}
        sizes: list[int] = []
        allocation, offset = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        known: list[tuple[int, int]] = []
        places = []
        for address in (*addresses, self._flag.data_ptr()):
            # Neighbours mostly table an allocation, which saves a call of the driver for each.
            base, size = known[-1] if known and known[-1][0] <= address < sum(known[-1]) else cuda_ipc.allocation_of(address)
            known[:] = [(base, size)]
            if base not in bases:
                bases[base] = len(bases)
                sizes.append(size)
            places.append((bases[base], address - base))
        flag = places.pop()
        allocation[self._used] = [p[0] for p in places]
        offset[self._used] = [p[1] for p in places]
        handles = b"".join(cuda_ipc.export(base) for base in bases)
        return Export(
            handles, pack(np.array(list(bases), np.int64)), pack(np.array(sizes, np.int64)), pack(allocation), pack(offset), flag
        )

    def close(self) -> None:
        """Drop the flag; readers that still map it find that out by its nonce."""
        self.end()
        self._flag, self._export, self._known, self._addresses = None, None, None, []


def _segments_freed(flag: torch.Tensor | None) -> object:
    """How many allocations torch has given back to the driver so far on the device of `flag`."""
    stats: Any = torch.cuda.memory_stats_as_nested_dict(flag.device) if flag is not None else {}
    return stats.get("segment", {}).get("all", {}).get("freed")


def _device(tensors: Sequence[torch.Tensor], rank: int) -> torch.device:
    """The one GPU that a rank's tensors lie on. Raises WireError where there is none."""
    devices = {t.device for t in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        got = ", ".join(sorted(map(str, devices)))
        do = "move the parameters to the rank's GPU before the refit, or use the wire shm"
        raise WireError("the trainer's parameters are not on one GPU", where=f"trainer rank {rank}", got=got, do=do)
    device: torch.device = devices.pop()
    return device


class RankMaps:
    """One trainer rank's memory as an engine rank maps it."""

    def __init__(self, epoch: str, process: str, export: Export, device: torch.device) -> None:
        self.epoch, self.process, self.device = epoch, process, device
        self.handles = [
            export.handles[i : i + cuda_ipc.HANDLE_BYTES] for i in range(0, len(export.handles), cuda_ipc.HANDLE_BYTES)
        ]
        self.sizes, self.allocation, self.offset = unpack(export.sizes), unpack(export.allocation), unpack(export.offset)
        self.bases, self.flag = unpack(export.bases), export.flag
        self._open: dict[int, int] = {}
        self._placed: tuple[Int, Int] | None = None

    def base(self, allocation: int) -> int:
        """The address of an allocation here. Raises WireError when it can't be opened or is not as large as was said."""
        own = self.process == cuda_ipc.process()
        if allocation in self._open:
            return self._open[allocation]
        address = int(self.bases[allocation]) if own else cuda_ipc.open_handle(self.handles[allocation], self.device)
        self._open[allocation] = address
        first, size = cuda_ipc.allocation_of(address)
        if first != address or size < int(self.sizes[allocation]):
            got, wanted = f"{size} bytes from {first:#x}", f"{int(self.sizes[allocation])} from {address:#x}"
            raise WireError("an allocation of the trainer is not what it said", where=WHERE, got=got, wanted=wanted)
        return address

    def places(self, numbers: Int, nbytes: Int) -> Int:
        """Addresses here of buffers of this rank, int64 [n]. Raises WireError for one that was not exported or does not fit."""
        if self._placed is not None and self._placed[0] is numbers:
            return self._placed[1]
        if numbers.max() >= len(self.allocation) or (self.allocation[numbers] < 0).any():
            raise WireError("it exported other buffers than the plan reads", where=WHERE, do="prepare again")
        allocation, offset = self.allocation[numbers], self.offset[numbers]
        if (offset < 0).any() or (offset + nbytes > self.sizes[allocation]).any():
            raise WireError("a buffer reaches outside its allocation", where=WHERE, do="prepare again")
        used, which = np.unique(allocation, return_inverse=True)
        found = np.array([self.base(i) for i in used.tolist()], np.int64)[which] + offset
        self._placed = numbers, found
        return found

    def close(self) -> None:
        """Unmap everything."""
        opened, self._open, self._placed = self._open, {}, None
        for address in opened.values() if self.process != cuda_ipc.process() else ():
            cuda_ipc.close_handle(address, self.device)


class Maps:
    """All ranks' memory, kept between refits."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMaps] = {}
        self._plan: Plan | None = None
        self._layout: dict[int, tuple[Int, Int, Int]] = {}

    def layout_of(self, plan: Plan) -> dict[int, tuple[Int, Int, Int]]:
        """By trainer rank: the source buffers of it that `plan` reads, their numbers among its own buffers, and their bytes;
        int64 [n]."""
        if plan is not self._plan:
            owner = np.array([b.rank for b in plan.sources], np.int64)
            used = np.unique(plan.source)
            ranks = np.unique(owner[used]).tolist()
            nbytes = np.array([b.nbytes for b in plan.sources], np.int64)
            mine = {r: used[owner[used] == r] for r in ranks}
            self._layout = {r: (own, own - int(np.argmax(owner == r)), nbytes[own]) for r, own in mine.items()}
            self._plan = plan
        return self._layout

    def close(self) -> None:
        """Unmap everything and forget the handles."""
        for rank in self.ranks.values():
            rank.close()
        self.ranks = {}


class IpcReader(Reader):
    """An engine rank's half, for one refit. `token` changes with any address."""

    def __init__(self, info: IpcInfo, plan: Plan, maps: Maps, device: torch.device) -> None:
        """Open and check everything that the plan reads. Raises WireError with every problem; what was opened is closed then."""
        self._device, self._maps = device, maps
        self._buffers, self.whole, self.steps = plan.sources, plan, [plan]
        self._ranks = {r.rank: r for r in info.ranks}
        if len(self._ranks) < len(info.ranks):
            raise WireError("one trainer rank is named twice", where=WHERE, got=[r.rank for r in info.ranks])
        self._maps_of = dict(maps.ranks)
        layout = maps.layout_of(plan)
        self._used_ranks = sorted(layout)
        self._address = np.zeros(len(self._buffers), np.int64)
        problems: list[Problem] = []
        for rank in self._used_ranks:
            try:
                self._open_rank(rank, *layout[rank])
            except WireError as error:
                problems += [msgspec.structs.replace(p, where=f"trainer rank {rank} · {p.where}") for p in error.problems]
        if problems:
            for rank in self._used_ranks:  # what was kept stays, but for mappings of memory that may be freed
                known, sent = self._maps_of.get(rank), self._ranks.get(rank)
                if known is not None and (known is not maps.ranks.get(rank) or sent is None or not sent.resident):
                    known.close()
            raise WireError.of(problems, f"wire ipc: {len(problems)} problem(s), nothing was written")
        for rank, known in maps.ranks.items():
            if known is not self._maps_of[rank]:
                known.close()
        maps.ranks = self._maps_of
        self.token = self._address.tobytes()

    def _open_rank(self, rank: int, used: Int, local: Int, nbytes: Int) -> None:
        sent = self._ranks.get(rank)
        if sent is None or not sent.epoch:
            raise WireError("it said nothing of its memory", where=WHERE, do="call begin on every trainer rank")
        known = self._maps_of.get(rank)
        if known is None or known.epoch != sent.epoch:
            if sent.export is None:
                raise WireError(
                    "its handles are not known here",
                    where=WHERE,
                    got=f"epoch {sent.epoch}",
                    do="refit again; handles are sent after a failure",
                )
            known = self._maps_of[rank] = RankMaps(sent.epoch, sent.process, _export(sent.export), self._device)
        if sent.device not in _visible():
            do = "let trainer and engine see the same GPUs (CUDA_VISIBLE_DEVICES), or use the wire shm"
            if apart(sent.host, this_host()):
                do = not_shared(sent.host)
            raise WireError(
                "its GPU is not visible to this engine", where=WHERE, got=sent.device, wanted=", ".join(_visible()), do=do
            )
        if sent.process == cuda_ipc.process() and sent.device != cuda_ipc.device_uuid(self._device.index):
            do = "give the engine a process of its own"
            raise WireError("trainer and engine are one process on two GPUs", where=WHERE, got=sent.device, do=do)
        self._address[used] = known.places(local, nbytes)
        self._check_nonce(rank)

    def _check_nonce(self, rank: int) -> None:
        known, sent = self._maps_of[rank], self._ranks[rank]
        got = cuda_ipc.read_word(known.base(known.flag[0]) + known.flag[1])
        if got != sent.nonce:
            do = "refit once more; hold the weights still until the refit returns"
            raise WireError(
                "the trainer's memory is not that of this refit", where=WHERE, got=f"nonce {got}", wanted=sent.nonce, do=do
            )

    def address(self, buffer: int) -> int:
        """The device address of source buffer `buffer`."""
        return int(self._address[buffer])

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of source buffer `buffer`; memory of another GPU is copied here first."""
        address, nbytes = int(self._address[buffer]), self._buffers[buffer].nbytes
        if self._ranks[self._buffers[buffer].rank].device == cuda_ipc.device_uuid(self._device.index):
            return cuda_ipc.as_tensor(address, nbytes, self._device)
        local = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        cuda_ipc.copy(local.data_ptr(), address, nbytes)
        return local

    def confirm(self) -> None:
        """Raise WireError when a trainer rank has begun another refit or dropped its memory meanwhile."""
        for rank in self._used_ranks:
            self._check_nonce(rank)

    def close(self) -> None:
        """Unmap the memory of ranks that may free it."""
        for rank in self._used_ranks:
            if not self._ranks[rank].resident:
                self._maps_of[rank].close()


@functools.cache
def _visible() -> list[str]:
    return [cuda_ipc.device_uuid(i) for i in range(torch.cuda.device_count())]


def _export(raw: bytes) -> Export:
    try:
        export = msgspec.msgpack.decode(raw, type=Export)
        bases, sizes, allocation, offset = (unpack(c) for c in (export.bases, export.sizes, export.allocation, export.offset))
        count = len(bases) if bases.ndim == 1 else -1
        fits = sizes.shape == (count,) and allocation.shape == offset.shape and allocation.ndim == 1
        if not fits or len(export.handles) != count * cuda_ipc.HANDLE_BYTES or (allocation >= count).any():
            raise ValueError("its columns do not fit each other")
        if not 0 <= export.flag[0] < count or not 0 <= export.flag[1] <= sizes[export.flag[0]] - 8:
            raise ValueError("its flag lies outside")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("its handles can't be read", where=WHERE, got=error) from None
    return export


class _SendTable(msgspec.Struct):
    """Numbers of this rank's buffers that the plan reads."""

    used: Column


def send_tables(plan: Plan, hosts: Hosts, bucket_bytes: int = 0) -> list[bytes]:
    """Which of its buffers each rank must export. There are no buckets. Raises ConfigError where an engine rank needs bytes of
    another host."""
    check_near("ipc", plan.edges(), hosts)
    return [msgspec.msgpack.encode(_SendTable(pack(read))) for read in plan.read_buffers(len(hosts.trainers))]


def open_sender(rank: int, table: bytes, tensors: Sequence[torch.Tensor]) -> IpcSender:
    """This rank's half. tensors: of which those that lie on a GPU are exported now, so that the first refit need not; parameters
    that are elsewhere at present are exported by the refit that finds them there."""
    sender = IpcSender(rank, unpack(msgspec.msgpack.decode(table, type=_SendTable).used))
    if tensors and len(sender.used) and all(tensors[i].device.type == "cuda" and tensors[i].data_ptr() for i in sender.used):
        sender.export(tensors)
    return sender


def info(parts: Sequence[bytes]) -> IpcInfo:
    """The message for `update_weights`."""
    return IpcInfo(ranks=[msgspec.msgpack.decode(p, type=IpcRank) for p in parts])


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> IpcReader:
    """Map and check what this rank's plan reads. Raises WireError, ConfigError."""
    if update.ipc is None:
        raise ConfigError("wire ipc needs the field ipc", where="update_weights", do="pass what the sender made")
    if not torch.cuda.is_available():
        raise ConfigError("wire ipc needs a GPU", where="update_weights", do="use the wire shm")
    maps = kept.setdefault("ipc", Maps())
    return IpcReader(update.ipc, plan, maps, torch.device("cuda", torch.cuda.current_device()))
