"""The group that bytes are sent through: torch.distributed's own object over trainer and engine ranks, NCCL or gloo.

It is neither side's default group nor a child of one, so it can be made, dropped and made again without touching the collectives
of the trainer or of vLLM. Every wait has a deadline. After any failure the group is dropped, never used again: a message that
is still under way in it can't reach the next refit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from vllm_refit_ext.core.errors import DeadlineError, RefitError, WireError
from vllm_refit_ext.wires.rendezvous import CONNECT_S, Store, local_address, run_until

Backend = Literal["gloo", "nccl"]
POLL_S = 50e-6
"""Pause between two looks at a GPU's progress. Short against the transfer of a bucket, long against the look."""
EAGER_S = 2e-3
"""For so long a GPU is looked at without a pause: most buckets are done by then."""
NEVER = timedelta(days=365)
"""The time-out given to NCCL's own watchdog, which would end the whole process. The deadlines here come first."""


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT = threading.Lock()


class P2POp(msgspec.Struct):
    """A send to or a receive from `peer`. tag: tells one pair's messages apart. data: uint8 [n], contiguous."""

    peer: int
    tag: int
    data: torch.Tensor


class Work:
    """Operations under way. `wait` returns when all are done."""

    def __init__(self, group: Group, works: list[Any], peers: list[int]) -> None:
        self._group, self._works, self._peers = group, works, peers

    def wait(self, deadline: float) -> None:
        """Wait until `deadline` (time.monotonic seconds) at most. Raises DeadlineError, WireError with the peer's name."""
        while self._works:
            problem = self._group.wait_one(self._works[-1], deadline)
            if problem:
                # References to a work keep the group's sockets open, and the peers must learn of this.
                self._works.clear()
                raise self._group.lost(self._peers, problem, deadline)
            self._works.pop()

    def ended(self) -> bool:
        """Whether all are done, as far as one can see without waiting: gloo's operations end only while they are waited for."""
        return self._group.backend == "nccl" and all(work.is_completed() for work in self._works)

    def drop(self) -> None:
        """Forget the operations."""
        self._works.clear()


class Group:
    """One rank's membership. `names`: of all ranks, for errors."""

    def __init__(self, name: str, store: Store, rank: int, names: Sequence[str], backend: Backend, deadline: float) -> None:
        """Collective over all ranks of `names`; `name` is new for every group. Raises DeadlineError when a rank does not come."""
        self.name, self.rank, self.names, self.backend = name, rank, list(names), backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._pending: list[Work] = []
        where = self._where = f"wire {store.wire}, {self.names[rank]}"
        prefix = PrefixStore(f"group/{name}", store.raw.clone())
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        try:
            self._group: Any = run_until(
                deadline + 1.0,
                "the group of all ranks did not come up",
                where,
                _gloo(prefix, rank, len(names), left, local_address(store.host, store.port))
                if backend == "gloo"
                else _nccl(prefix, rank, len(names), left, self.device),
            )
        except RefitError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever torch raises, it becomes one of ours
            text = str(error).strip().splitlines()
            got = text[0][:200] if text else type(error).__name__
            do = "see which rank is dead or stopped, and whether the hosts reach each other"
            kind = DeadlineError if time.monotonic() >= deadline or "imed out" in got or "timeout" in got else WireError
            raise kind("the group of all ranks did not come up", where=where, got=got, do=do) from None

    def connect(self, peers: Iterable[int], deadline: float) -> None:
        """Exchange a byte with each of `peers`, whose `peers` must name this rank. Raises DeadlineError, WireError.

        NCCL connects two ranks at their first message and may hold the caller until the other one is there. Batches with several
        such pairs could make ranks wait for each other in a circle. Here all pairs are connected in one order, so the first pair
        that is not connected yet is the next one of both its ranks.
        """
        for low, high in sorted({(min(self.rank, peer), max(self.rank, peer)) for peer in peers}):
            out, into = torch.zeros(2, 1, dtype=torch.uint8, device=self.device)
            peer = high if low == self.rank else low
            self.post([P2POp(peer, 0, out)], [P2POp(peer, 0, into)]).wait(deadline)

    def post(self, sends: Sequence[P2POp], receives: Sequence[P2POp]) -> Work:
        """Start operations as one batch and return at once. Raises WireError when a peer is gone already."""
        works: list[Any] = []
        peers = [p.peer for p in (*receives, *sends)]
        problem = ""
        try:
            with self._batch(works):
                for p in receives:
                    works.append(self._group.recv([p.data], p.peer, p.tag))
                for p in sends:
                    works.append(self._group.send([p.data], p.peer, p.tag))
        except RuntimeError as error:
            problem = str(error)
        work = Work(self, works, peers)
        self._pending = [w for w in self._pending if w._works]
        self._pending.append(work)
        if problem:
            work.drop()
            raise self.lost(peers, problem, float("inf"))
        return work

    @property
    def independent(self) -> bool:
        """Whether messages to one rank go on when those to another fail: NCCL's communicator ends as one."""
        return self.backend == "gloo"

    @contextlib.contextmanager
    def _batch(self, works: list[Any]) -> Iterator[None]:
        """NCCL runs what is issued inside as one group; gloo needs no grouping."""
        if self.backend == "gloo":
            yield
            return
        self._group._start_coalescing()
        yield
        works.clear()  # the batch has one work for all its operations
        works.append(self._group._end_coalescing())

    def wait_one(self, work: Any, deadline: float) -> str:
        """Wait for one operation; returns what went wrong, as text without a traceback that would keep the work alive."""
        left = deadline - time.monotonic()
        if self.backend == "gloo":
            try:
                work.wait(timedelta(seconds=max(0.001, left)))
            except RuntimeError as error:
                return str(error)
            return ""
        eager = time.monotonic() + EAGER_S
        while not work.is_completed():
            now = time.monotonic()
            if now > deadline:
                return "timed out"
            time.sleep(POLL_S if now > eager else 0.0)
        try:
            work.wait()  # orders the current stream after the operation
        except RuntimeError as error:
            return str(error)
        return ""

    def lost(self, peers: Sequence[int], text: str, deadline: float) -> RefitError:
        """The error for operations with `peers` that failed with `text`."""
        line = (text.strip().splitlines() or ["no reason"])[0]
        line = line.rpartition("] ")[2][:160]
        where = self._where
        whom = ", ".join(self.names[p] for p in sorted(set(peers))[:8])
        if time.monotonic() >= deadline or "imed out" in text:
            do = "see whether one of these processes, or one they wait for, is stopped or stuck"
            return DeadlineError(
                f"bytes to or from {whom} were not transferred in time",
                where=where,
                got=line,
                wanted="before the deadline",
                do=do,
            )
        do = "see which process has died; the next refit builds a new group"
        return WireError(f"a connection to {whom} broke", where=where, got=line, do=do)

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one fail at once with gloo, at their deadline with NCCL."""
        group, self._group = self._group, None
        for work in self._pending:
            work.drop()
        self._pending = []
        if group is not None:
            with contextlib.suppress(Exception):
                run_until(time.monotonic() + 10.0, "abort", "", group.abort)


class Link:
    """One rank's connections: the store and the group, kept from refit to refit. peers: ranks that it sends to or receives
    from."""

    def __init__(self, rank: int, names: Sequence[str], backend: Backend, wire: str = "collective") -> None:
        self.rank, self.names, self.backend, self._wire = rank, list(names), backend, wire
        self.peers: set[int] = set()
        self.store: Store | None = None
        self.group: Group | None = None
        self.broken = False
        """Whether a pair of the group has failed while others went on, so that it must not be used again."""

    def connect(self, host: str, port: int, deadline: float) -> None:
        """Reach the store. Raises WireError, DeadlineError."""
        if self.store is None:
            self.store = Store(host, port, deadline, self._wire)

    def join(self, session: str, deadline: float) -> Group:
        """Rendezvous of all ranks for refit `session`; a new group where not all have the same one. All ranks raise the same
        error."""
        assert self.store is not None
        try:
            mine = self.group.name if self.group is not None and not self.broken else ""
            words = self.store.rendezvous(f"{session}/ready", self.rank, self.names, mine.encode(), deadline)
            if not mine or len(set(words)) > 1:
                self.drop()
                self.group = self._new_group(session, deadline)
        except RefitError:
            self.close()
            raise
        assert self.group is not None
        return self.group

    def _new_group(self, session: str, deadline: float) -> Group:
        assert self.store is not None
        key, group = f"{session}/joined", None
        try:
            group = Group(session, self.store, self.rank, self.names, self.backend, deadline)
            group.connect(self.peers, deadline)
        except RefitError as error:
            if group is not None:
                group.close()
            raise self.store.stop(key, error, deadline + CONNECT_S) from None
        try:
            self.store.rendezvous(key, self.rank, self.names, b"", deadline)
        except RefitError:
            group.close()
            raise
        return group

    def drop(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.close()
        self.group, self.broken = None, False

    def close(self) -> None:
        """Leave the group and the store."""
        self.drop()
        self.store = None


def _gloo(store: Any, rank: int, size: int, left: timedelta, address: str) -> Callable[[], Any]:
    """What makes the group, with a call that waits for the other ranks."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = left
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options._devices = [
        ProcessGroupGloo.create_device(interface=interface) if interface else ProcessGroupGloo.create_device(hostname=address)
    ]
    return lambda: ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, left: timedelta, device: torch.device) -> Callable[[], Any]:
    """The same with NCCL. The group is made here, which waits for nobody, and connected in the call."""
    from torch.distributed import ProcessGroupNCCL

    torch.cuda.set_device(device)
    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.is_high_priority_stream = True  # a message starts beside the copies that pack and write, and not after them
    # Read while the group is made: with error handling on, NCCL's watchdog ends the process when a peer dies.
    # The environment is changed in the caller's thread and for this statement alone: a thread may be left behind by its deadline.
    with _ENVIRONMENT:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = "0"
        try:
            group = ProcessGroupNCCL(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[_HANDLING]
            else:
                os.environ[_HANDLING] = before

    def connect() -> Any:
        # NCCL connects at the first operation, in which every rank must take part, also one that has nothing to move.
        torch.cuda.set_device(device)
        work = group.allreduce([torch.zeros(1, device=device)])  # type: ignore[attr-defined]
        end = time.monotonic() + left.total_seconds()
        while not work.is_completed():
            if time.monotonic() > end:
                group.abort()
                raise TimeoutError("timed out in NCCL's first operation")
            time.sleep(POLL_S)
        return group

    return connect
