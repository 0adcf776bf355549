"""A trainer rank's half of wire `nixl`: it registers its parameters and tells engines where they lie."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.hosts import this_host
from vllm_refit_ext.core.messages import NixlRank
from vllm_refit_ext.core.table import Column, pack
from vllm_refit_ext.wires import Sender
from vllm_refit_ext.wires.boxes import addresses_of
from vllm_refit_ext.wires.nixl_agent import Agent, kind_of, ranges_of

WHERE = "wire nixl"


class Export(msgspec.Struct, frozen=True):
    """A rank's registered memory. agent, metadata: as NIXL knows it. memory: its kind, on `device` of that process. address: of
    each of its buffers there, -1: not used. word: address of the nonce, in host memory."""

    agent: str
    metadata: bytes
    memory: Literal["DRAM", "VRAM"]
    device: int
    address: Column
    word: int


class SendTable(msgspec.Struct):
    """Numbers of this rank's buffers that a plan reads."""

    used: Column
    bucket_bytes: int


class Part(msgspec.Struct):
    rank: NixlRank
    bucket_bytes: int


class NixlSender(Sender):
    """A trainer rank's half."""

    def __init__(self, rank: int, used: Int, bucket_bytes: int) -> None:
        """used: int64 numbers of this rank's buffers that a plan reads. Raises ConfigError without NIXL."""
        self.rank, self._used, self._bucket_bytes = rank, used.tolist(), bucket_bytes
        self._agent = Agent(f"trainer-{rank}", f"{WHERE}, trainer rank {rank}") if self._used else None
        self._word = torch.zeros(1, dtype=torch.int64)
        self._addresses: list[int] = []
        self._export: bytes | None = None
        self._epoch, self._sent = "", False

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Wait for the device, register what is not registered, then mark the memory as this refit's. Raises WireError."""
        if self._agent is None:
            return msgspec.msgpack.encode(Part(NixlRank(rank=self.rank), self._bucket_bytes))
        addresses = addresses_of(tensors, self._used, f"{WHERE}, trainer rank {self.rank}", self.addresses)
        device = tensors[self._used[0]].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # parameters may have been written on any stream
        if self._export is None or addresses != self._addresses:
            self._register(tensors, addresses)
        nonce = secrets.randbits(62) | 1
        self._word[0] = nonce
        export = None if self._sent else self._export
        part = NixlRank(rank=self.rank, epoch=self._epoch, nonce=nonce, export=export, host=this_host())
        self._sent = True
        return msgspec.msgpack.encode(Part(part, self._bucket_bytes))

    def _register(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        assert self._agent is not None
        mine = [tensors[i] for i in self._used]
        devices = {t.device for t in mine}
        if len(devices) != 1:
            got = ", ".join(sorted(map(str, devices)))
            raise WireError("the parameters are not on one device", where=f"{WHERE}, trainer rank {self.rank}", got=got)
        device: torch.device = devices.pop()
        self._unregister()
        memory = kind_of(device)
        self._agent.register(ranges_of(addresses, [t.numel() * t.element_size() for t in mine], device))
        self._agent.register(ranges_of([self._word.data_ptr()], [8], self._word.device))
        where = np.full(len(tensors), -1, np.int64)
        where[self._used] = addresses
        export = Export(self._agent.name, self._agent.metadata, memory, device.index or 0, pack(where), self._word.data_ptr())
        self._export, self._addresses = msgspec.msgpack.encode(export), addresses
        self._epoch, self._sent = secrets.token_hex(8), False

    def _unregister(self) -> None:
        self._export = None
        if self._agent is not None:
            self._agent.deregister()

    def rest(self) -> None:
        if not self.resident:
            self._unregister()

    def end(self) -> None:
        self._word.zero_()
        self.rest()

    def forget(self) -> None:
        self._sent = False

    def close(self) -> None:
        self._word.zero_()
        self._export = None
        if self._agent is not None:
            self._agent.close()
