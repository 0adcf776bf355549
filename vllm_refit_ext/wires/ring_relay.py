"""The trainer ranks of several hosts among themselves, on wire `ring`: how they start and stop together, and what they send each
other.

They have a group of their own (NCCL between GPUs, gloo between CPUs), made at the first refit, kept, and made anew after a
failure. No engine rank is in it: an engine rank sees rings of its own host only.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from vllm_refit_ext.core.errors import RefitError, WireError, as_refit_error, gave_up
from vllm_refit_ext.core.messages import RingInfo
from vllm_refit_ext.wires.collective_group import POLL_S, Backend, Group, Link, P2POp, Work
from vllm_refit_ext.wires.rendezvous import CONNECT_S, GOING, StoreServer, open_store
from vllm_refit_ext.wires.ring_order import Task
from vllm_refit_ext.wires.staging import RING

WIRE = "ring"
LOOK_S = 0.25
"""Seconds between two looks into the store whether some rank gave up."""
AHEAD = 4
"""Most messages under way at a rank. With gloo nothing says that a message has come but waiting for it, so a reader may be shown
the first when the last of these is started."""


class Communicator:
    """One trainer rank's connections to those of other hosts.

    `stopped` says whether a rank, or an engine through rank 0, gave up the refit that is under way. It asks the store now and
    then, because memory of another host can't be looked at.
    """

    def __init__(self, rank: int, ranks: int, backend: Backend, peers: set[int]) -> None:
        """Rank 0 begins to serve the store. peers: ranks that it sends to or receives from. Raises WireError."""
        self._link = Link(rank, [f"trainer rank {r}" for r in range(ranks)], backend, WIRE)
        self._link.peers = peers
        self._server = StoreServer(open_store(WIRE), WIRE) if rank == 0 else None
        self._session, self._look = "", 0.0
        self._cause: RefitError | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where rank 0 serves the store; nothing on the others."""
        return self._server.address if self._server is not None else ("", 0)

    def start(self, session: str, info: RingInfo, deadline: float) -> Group | None:
        """Begin a refit. With relays there is a rendezvous of all trainer ranks; returns their group. Raises on all ranks the
        same error."""
        self._session, self._look, self._cause = session, 0.0, None
        self._link.connect(info.host, info.port, deadline)
        assert self._link.store is not None
        if self._server is not None:
            self._server.forget(self._link.store, session, len(self._link.names), deadline)
        return self._link.join(session, deadline) if info.relays is not None else None

    @property
    def stopped(self) -> bool:
        """Whether someone gave up. Raises WireError, DeadlineError when the store is gone."""
        now = time.monotonic()
        if self._cause is None and now > self._look and self._link.store is not None:
            self._cause = self._link.store.stopped(f"{self._session}/{GOING}", now + CONNECT_S)
            self._look = time.monotonic() + LOOK_S
        return self._cause is not None

    def fail(self, error: BaseException) -> BaseException:
        """Give up: stop the other ranks and leave the group. Returns the error to raise, which names the cause if it lies
        elsewhere."""
        mine = as_refit_error(error, f"wire {WIRE}")
        if self._link.store is not None:
            with contextlib.suppress(RefitError):
                first = self._link.store.stop(f"{self._session}/{GOING}", mine, time.monotonic() + CONNECT_S)
                self._cause = first if first is not mine else None
        self._link.drop()
        if self._cause is None or not isinstance(error, RefitError):
            return error
        where = f"wire {WIRE}, {self._link.names[self._link.rank]}"
        got = "; ".join(str(p) for p in self._cause.problems[:3])
        return WireError("this refit was given up", where=where, got=got, do="refit once more when its cause is gone")

    def refuse(self, session: str, error: RefitError, deadline: float) -> None:
        """On rank 0: an engine refused `session` or failed in it. Never raises."""
        assert self._server is not None
        self._server.refuse(session, error, deadline)

    def close(self) -> None:
        """Leave the group and the store. Safe to call twice."""
        self._link.close()
        self._server = None


class _Started(msgspec.Struct):
    task: Task
    work: Work | None


class Pending:
    """The messages of one trainer rank that are under way, in the order of all messages, for one refit.

    They are waited for in that order and no later message is waited for before them, as the argument in `ring_order` asks.
    """

    def __init__(self, group: Group, ready: Callable[[Task], None], stopped: Callable[[], bool], deadline: float) -> None:
        """ready: shows the reader that the message of a task lies in its place. deadline: time.monotonic seconds."""
        self._group, self._ready, self._stopped, self._deadline = group, ready, stopped, deadline
        self._started: deque[_Started] = deque()

    def send(self, task: Task, data: torch.Tensor) -> None:
        """Start to send uint8 `data`, which must stay until RING more were sent."""
        self._add(task, self._group.post([P2POp(task.peer, task.tag, data)], []))

    def receive(self, task: Task, into: torch.Tensor) -> None:
        """Start to receive into uint8 `into`."""
        self._add(task, self._group.post([], [P2POp(task.peer, task.tag, into)]))

    def packed(self, task: Task) -> None:
        """A message of this rank's own lies in its place. Its reader hears of it after those before it."""
        if any(f.task.target == task.target and f.task.count >= 0 for f in self._started):
            self._started.append(_Started(task, None))
        else:
            self._ready(task)

    def room_to_send(self) -> None:
        """Wait until one of the RING buffers is free."""
        while sum(f.task.count < 0 for f in self._started) >= RING:
            self._wait_first()

    def poll(self) -> None:
        """Tell readers what has come, without waiting."""
        while self._started and (self._started[0].work is None or self._started[0].work.ended()):
            self._wait_first()

    def drain(self) -> None:
        """Wait for everything."""
        while self._started:
            self._wait_first()

    def _add(self, task: Task, work: Work) -> None:
        self._started.append(_Started(task, work))
        while len(self._started) > AHEAD:
            self._wait_first()

    def _wait_first(self) -> None:
        first = self._started[0]
        if first.work is not None:
            # A GPU is only looked at, so that a rank elsewhere that gave up is noticed before the deadline.
            while self._group.backend == "nccl" and not first.work.ended() and time.monotonic() < self._deadline:
                if self._stopped():
                    raise WireError.of([gave_up(f"wire {WIRE}, another rank")])
                time.sleep(POLL_S)
            first.work.wait(self._deadline)
        self._started.popleft()
        if first.task.count >= 0:
            self._ready(first.task)
