"""NIXL's agent as the wire `nixl` uses it: memory is registered by ranges, a peer's memory is READ by prepared lists, and every
wait ends.

NIXL is an optional extra and is imported at the first use. It has no time-out of its own (a READ from a process that was stopped
stays under way for ever), so `Reads.wait` has two: the caller's deadline, and a floor of bytes a second for each READ.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.errors import ConfigError, DeadlineError, WireError
from vllm_refit_ext.wires import cuda_ipc

PAGE = 4096
PATIENCE_S, FLOOR = 10.0, 16 << 20
"""A READ of n bytes that takes longer than PATIENCE_S + n / FLOOR seconds is given up: its peer was stopped, or the path to it is
broken. Loopback TCP, the slowest path measured, runs at 0.7 GB/s."""
INSTALL = "install it (`pip install 'vllm-refit[nixl]'`) on the trainer's and on the engine's side, or use another wire"


@functools.cache
def library() -> Any:
    """NIXL's Python API: the build for torch's CUDA, else whichever is installed. Raises ConfigError where there is none."""
    major = (torch.version.cuda or "").partition(".")[0]
    known = ("nixl_rocm",) if torch.version.hip else (f"nixl_cu{major}", "nixl_cu13", "nixl_cu12")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in dict.fromkeys((*known, "nixl")):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{name}._api")
    raise ConfigError("the wire nixl needs the package nixl", where="wire nixl", got="not installed", wanted=known[0], do=INSTALL)


def installed() -> bool:
    """Whether NIXL can be imported here."""
    try:
        return library() is not None
    except ConfigError:
        return False


@functools.cache
def _failures() -> tuple[type[Exception], ...]:
    """What NIXL raises: its errors have no common base."""
    bound = importlib.import_module(library().__name__.replace("_api", "_bindings"))
    found = [getattr(bound, name) for name in dir(bound) if name.startswith("nixl") and name.endswith("Error")]
    return (*(f for f in found if isinstance(f, type)), RuntimeError, ValueError)


@contextlib.contextmanager
def failing(what: str, where: str, do: str = "") -> Iterator[None]:
    """Raise what NIXL raises as WireError."""
    try:
        yield
    except _failures() as error:
        raise WireError(what, where=where, got=f"{type(error).__name__}: {error}", do=do) from None


def kind_of(device: torch.device) -> Literal["DRAM", "VRAM"]:
    """What NIXL calls the memory of `device`."""
    return "VRAM" if device.type == "cuda" else "DRAM"


class Ranges(msgspec.Struct):
    """Memory to register. rows: int64 [n, 3], address, bytes and device."""

    rows: Int
    memory: Literal["DRAM", "VRAM"]


class Agent:
    """This process's agent. Not safe for threads."""

    def __init__(self, name: str, where: str) -> None:
        """name: of its owner, to which a number is added that no other agent has. where: how errors name it."""
        self.name, self.where = f"{name}-{secrets.token_hex(8)}", where
        api = library()
        with failing("NIXL could not start its backend UCX", where, "see NIXL's log; NIXL_LOG_LEVEL=DEBUG says more"):
            self.api: Any = api.nixl_agent(self.name, api.nixl_agent_config(backends=["UCX"]))
        self._regions: list[Any] = []
        self._peers: dict[str, None] = {}
        # A reader that ends without this leaves its peer with broken connections, which stall the next readers.
        self._end = weakref.finalize(self, _end, self.api, self._regions, self._peers)

    def register(self, ranges: Ranges) -> None:
        """Make these ranges readable, or able to be read into. Raises WireError."""
        do = "see docs/wires.md, wire nixl: what can be registered"
        with failing("memory could not be registered", self.where, do):
            self._regions.append(self.api.register_memory(ranges.rows.astype(np.uint64), ranges.memory))

    def deregister(self) -> None:
        """Give back all that was registered. Raises WireError."""
        with failing("memory could not be deregistered", self.where):
            while self._regions:
                self.api.deregister_memory(self._regions.pop())

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read what is registered now."""
        with failing("NIXL has no metadata", self.where):
            return bytes(self.api.get_agent_metadata())

    def add(self, name: str, metadata: bytes, where: str) -> None:
        """Know a peer that says it is `name`. Raises WireError where the metadata is of another, or can't be read."""
        with failing("its NIXL metadata can't be read", where, "check that both sides have the same version of nixl"):
            self.remove(name)
            got = self.api.add_remote_agent(metadata)
        found = got.decode(errors="replace") if isinstance(got, bytes) else str(got)
        self._peers[found] = None
        if found != name:
            self.remove(found)
            raise WireError("its NIXL metadata is of another agent", where=where, got=ascii(found)[:80], wanted=name)

    def remove(self, name: str) -> None:
        """Disconnect from a peer. Does nothing for one that is not known."""
        if name in self._peers:
            del self._peers[name]
            with contextlib.suppress(*_failures()):
                self.api.remove_remote_agent(name)

    def close(self) -> None:
        """Leave all peers and give back all memory. Safe to call twice."""
        self._end()


def _end(api: Any, regions: list[Any], peers: dict[str, None]) -> None:
    for peer in peers:
        with contextlib.suppress(*_failures()):
            api.remove_remote_agent(peer)
    for region in regions:
        with contextlib.suppress(*_failures()):
            api.deregister_memory(region)
    peers.clear()
    regions.clear()


class Read:
    """A READ from one peer, prepared: it may be posted any number of times, one after the other."""

    def __init__(self, agent: Agent, peer: str, remote: Int, local: Int, here: torch.device, memory: str, where: str) -> None:
        """remote, local: int64 [n, 5]: address, bytes, device, stride in bytes and count of each row; row i of both has the same
        bytes and count. here: device of the local side. memory: kind of the remote side. Raises WireError where a row lies
        outside of what the peer has registered."""
        self.nbytes, self.peer, self.where = int((local[:, 1] * local[:, 4]).sum()), peer, where
        self._agent, api = agent, agent.api
        indices = np.arange(int(local[:, 4].sum()), dtype=np.int32)
        do = "refit once more; its memory was registered anew"
        self._parts: list[Any] = []
        with failing("its memory can't be read", where, do):
            self._parts.append(api.prep_xfer_dlist("NIXL_INIT_AGENT", local.astype(np.uint64), kind_of(here)))
            self._parts.append(api.prep_xfer_dlist(peer, remote.astype(np.uint64), memory))
            self._handle: Any = api.make_prepped_xfer("READ", self._parts[0], indices, self._parts[1], indices)
        self.active, self._end = False, 0.0

    def post(self) -> None:
        """Begin. Raises WireError."""
        self._end = time.monotonic() + PATIENCE_S + self.nbytes / FLOOR
        self.active = True
        self._look(self._agent.api.transfer)

    def _look(self, call: Any) -> None:
        with failing("a READ failed", self.where, "see the error of that rank; refit once more"):
            state = call(self._handle)
        if state == "ERR":
            raise WireError("a READ failed", where=self.where, got="state ERR", do="see the error of that rank; refit once more")
        self.active = state == "PROC"

    def wait(self, deadline: float) -> None:
        """Until all is here. deadline: time.monotonic seconds. Raises WireError, DeadlineError; the READ stays `active` then."""
        pause = 0.0
        while self.active:
            self._look(self._agent.api.check_xfer_state)
            now = time.monotonic()
            if self.active and now > min(deadline, self._end):
                got = f"{self.nbytes} bytes that were asked for did not come"
                if now > deadline:
                    raise DeadlineError("a READ has not ended by the deadline", where=self.where, got=got)
                do = "check that the process runs, and the network to it (`vllm-refit doctor` times a READ)"
                raise WireError(f"a READ came to no end at {FLOOR >> 20} MB/s", where=self.where, got=got, do=do)
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)

    def close(self) -> bool:
        """Abort it where it is under way, and let go of it. Whether that was possible; where it was not, bytes may still come."""
        try:
            self._handle.release()
            for part in self._parts:
                part.release()
        except _failures():
            return False
        return True


def ranges_of(addresses: Sequence[int], sizes: Sequence[int], device: torch.device) -> Ranges:
    """The ranges to register for buffers: few, and none twice.

    On a GPU these are the allocations that the buffers lie in. On a CPU they are whole pages: two buffers whose pages touch make
    one range, as all pages between them are mapped.
    """
    if device.type == "cuda":
        found: dict[int, int] = {}
        base = size = 0
        for address in sorted(set(addresses)):
            if not base <= address < base + size:
                base, size = cuda_ipc.allocation_of(address)
                found[base] = size
        return Ranges(np.array([(b, n, device.index or 0) for b, n in found.items()], np.int64).reshape(-1, 3), "VRAM")
    first = np.array(addresses, np.int64) // PAGE * PAGE
    last = -(-(np.array(addresses, np.int64) + np.array(sizes, np.int64)) // PAGE) * PAGE
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order]) if len(order) else last
    new = np.flatnonzero(np.append(True, first[1:] > reach[:-1])) if len(order) else order
    ends = reach[np.append(new[1:] - 1, len(reach) - 1)] if len(order) else reach
    return Ranges(np.stack([first[new], ends - first[new], np.zeros_like(new)], axis=1), "DRAM")


def rows_of(remote: Int, local: Int, extent: Int, strides: Int, item: Int) -> tuple[Int, Int]:
    """Boxes as rows of descriptors: where each run of bytes lies in the peer, and where it goes.

    remote, local: int64 [n], the address of each box there and here, where it is row-major. extent, strides: int64 [n, D], of the
    box, elements and bytes. item: int64 [n], bytes of an element. Returns int64 [m, 4] (address, bytes of a run, stride, count)
    of the remote side and int64 [m] addresses of the local side. Runs that follow each other on both sides are one.
    """
    n, depth = extent.shape
    inner = item[:, None] * np.cumprod(np.concatenate([extent, np.ones((n, 1), np.int64)], axis=1)[:, :0:-1], axis=1)[:, ::-1]
    run, count, stride = item.copy(), np.ones(n, np.int64), np.zeros(n, np.int64)
    rest = extent.copy()
    open_ = np.ones(n, bool)  # whether the dimensions so far make one regular row
    for d in reversed(range(depth)):
        size, step = extent[:, d], strides[:, d]
        wide = open_ & (size > 1)
        dense = wide & (count == 1) & (step == run)
        rows = wide & (count == 1) & (step > run)
        longer = wide & (count > 1) & (step == stride * count)
        run = np.where(dense, run * size, run)
        stride = np.where(rows, step, stride)
        count = np.where(rows | longer, count * size, count)
        taken = dense | rows | longer
        rest[:, d] = np.where(taken, 1, rest[:, d])
        open_ &= taken | (size == 1)
    for d in range(depth):
        repeats = rest[:, d]
        if (repeats > 1).any():
            box = np.repeat(np.arange(len(repeats)), repeats)
            at = np.arange(len(box)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            remote, local = remote[box] + at * strides[box, d], local[box] + at * inner[box, d]
            run, count, stride, rest, strides, inner = (a[box] for a in (run, count, stride, rest, strides, inner))
    order = np.argsort(local, kind="stable")
    remote, local, run, count, stride = remote[order], local[order], run[order], count[order], stride[order]
    follows = np.zeros(len(run), bool)
    follows[1:] = (
        (count[1:] == 1) & (count[:-1] == 1) & (remote[:-1] + run[:-1] == remote[1:]) & (local[:-1] + run[:-1] == local[1:])
    )
    first = np.flatnonzero(~follows)
    run = np.add.reduceat(run, first) if len(first) else run
    remote, local, count, stride = remote[first], local[first], count[first], stride[first]
    return np.stack([remote, run, np.where(count > 1, stride, run), count], axis=1), local
