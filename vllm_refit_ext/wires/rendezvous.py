"""Rendezvous in a store: all ranks of a refit, trainers and engines, go on together or stop together with the same problems.

Trainer rank 0 hosts the store on a port that it holds from the start. In a rendezvous every rank writes its word; the last to
come sets the verdict "go", a rank whose deadline passes sets "stop" with the names of the missing, and whoever knows a reason to
stop sets "stop" with it. Setting is atomic and the first decides for all, so no rank goes on alone. Nothing here is a collective:
a rank that never comes leaves nothing behind that the next rendezvous could mistake for its own."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError, WireError, class_of
from vllm_refit_ext.core.messages import decoded

T = TypeVar("T")

CONNECT_S = 10.0
"""Seconds within which a store on a reachable host must answer."""
PART_BYTES = 4 << 20
"""torch's store refuses values of more than 8 MiB."""
MOST_BYTES = 1 << 30
"""The largest value that is read. The offer of a model of 1T parameters is a tenth of it."""
SLACK_S = 2.0
"""Seconds beyond a deadline in which a rank may still learn the verdict, so that all tell the same story."""
VERDICT = "the verdict in the trainer's store"
GOING = "going"
"""The rendezvous that nobody joins: it can only be stopped, by a rank that gives up a refit which is under way."""
STEPS = ("ready", "joined", GOING)
"""The rendezvous of a refit, as keys behind its session's name."""


class Verdict(msgspec.Struct, frozen=True):
    """How a rendezvous ended. words: what the ranks said, in rank order, when all may go on; else the problems and their
    class."""

    words: list[bytes] = []
    problems: list[Problem] = []
    kind: str = "WireError"


class Store:
    """A connection to the store of one refit sender. No call waits beyond its deadline, even if the host is stopped."""

    def __init__(self, host: str, port: int, deadline: float, wire: str = "collective") -> None:
        """deadline: in time.monotonic() seconds, as everywhere in this module. wire: named in errors.

        Raises WireError, DeadlineError.
        """
        self.host, self.port, self.wire = host, port, wire
        self.lost = False
        """Whether a call found it gone, or not answering."""
        self._store: Any = None
        try:
            self._store = run_until(
                deadline, "the trainer's store did not answer", self._where, lambda: _connect(host, port, deadline), ends=True
            )
        except (DistError, RuntimeError, OSError) as error:
            do = "see whether trainer rank 0 is alive and its host and port can be reached from here"
            raise WireError("the trainer's store can't be reached", where=self._where, got=_line(error), do=do) from None

    @property
    def _where(self) -> str:
        return f"wire {self.wire}, store at {self.host}:{self.port}"

    @property
    def raw(self) -> Any:
        """torch's store."""
        return self._store

    def call(self, work: Callable[[Any], T], deadline: float) -> T:
        """`work(store)`. Raises WireError when the store is gone, DeadlineError when it does not answer."""
        try:
            return run_until(deadline, "the trainer's store did not answer", self._where, lambda: work(self._store))
        except DeadlineError:
            self.lost = True
            raise
        except (DistError, RuntimeError) as error:
            self.lost = True
            raise WireError(
                "the trainer's store is gone", where=self._where, got=_line(error), do="trainer rank 0 hosts it: start it again"
            ) from None

    def put(self, key: str, value: bytes, deadline: float) -> None:
        """Leave `value`, of any length, for `take`."""

        def work(store: Any) -> None:
            put_parts(store, key, value)
            store.check([key])  # a set is not acknowledged, so another connection may look before it is done

        self.call(work, deadline)

    def take(self, key: str, deadline: float) -> bytes:
        """What was `put` under `key`; it stays there. Raises WireError when nothing was."""

        def work(store: Any) -> bytes | None:
            return take_parts(store, key) if store.check([key]) else None

        found = self.call(work, deadline)
        if found is None:
            do = "prepare again on every rank"
            raise WireError("the trainer's store lacks what its message names", where=self._where, got=f"no {key}", do=do)
        return found

    def rendezvous(self, key: str, rank: int, names: Sequence[str], word: bytes, deadline: float) -> list[bytes]:
        """Rendezvous of all ranks under `key`, new every time. names: of all ranks, for errors. Returns all words by rank.

        Raises on every rank the same error: what a rank stopped it with, or DeadlineError naming who did not come.
        """
        size = len(names)
        mine = [f"{key}/word/{r}" for r in range(size)]

        def take_part(store: Any) -> Verdict:
            store.set(mine[rank], word)
            if store.add(f"{key}/count", 1) == size:
                _decide(store, key, Verdict(words=store.multi_get(mine)))
            elif not _wait(store, f"{key}/verdict", deadline):
                missing = [names[r] for r in range(size) if not store.check([mine[r]])]
                do = "see whether that process is dead, stopped or slow; the next refit starts afresh"
                late = [
                    Problem("it did not come to the refit", ", ".join(missing), "nothing", "its word before the deadline", do)
                ]
                _decide(store, key, Verdict(problems=late, kind="DeadlineError"))
            return _verdict(store.get(f"{key}/verdict"), size)

        verdict = self.call(take_part, deadline + SLACK_S)
        if verdict.problems:
            raise _error(verdict)
        return verdict.words

    def stop(self, key: str, error: RefitError, deadline: float) -> RefitError:
        """End rendezvous `key` with `error` for everyone, unless it is decided. Returns the error that all ranks raise."""
        mine = Verdict(problems=error.problems, kind=type(error).__name__)
        verdict = self.call(lambda store: _decide(store, key, mine), deadline)
        return _error(verdict) if verdict.problems else error

    def stopped(self, key: str, deadline: float) -> RefitError | None:
        """What rendezvous `key` was ended with, or None. Never waits for the other ranks."""
        raw = self.call(lambda store: store.get(f"{key}/verdict") if store.check([f"{key}/verdict"]) else b"", deadline)
        return _error(_verdict(raw)) if raw else None

    def forget(self, key: str, size: int, deadline: float) -> None:
        """Remove what rendezvous `key` of `size` ranks left."""
        keys = [f"{key}/count", f"{key}/verdict", *(f"{key}/word/{r}" for r in range(size))]
        self.call(lambda store: [store.delete_key(k) for k in keys], deadline)


class StoreServer:
    """Trainer rank 0's part: it serves the store, passes on refusals, and removes the keys of old refits."""

    def __init__(self, served: tuple[str, int, Any], wire: str = "collective") -> None:
        """served: what `open_store` returned, address, port and torch's store. wire: named in errors."""
        self.served, self._wire = served, wire
        self._met: list[str] = []

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        return self.served[:2]

    def refuse(self, session: str, error: RefitError, deadline: float) -> None:
        """End each rendezvous of `session` with `error`, where it is not over. Never raises."""
        with contextlib.suppress(RefitError):
            store = Store(*self.address, deadline, self._wire)
            for step in STEPS:
                store.stop(f"{session}/{step}", error, deadline)

    def forget(self, store: Store, session: str, size: int, deadline: float) -> None:
        """Begin `session` of `size` ranks: remove the keys of the refit before last, which nobody can still be reading."""
        self._met.append(session)
        if len(self._met) > 2:
            old = self._met.pop(0)
            for step in STEPS:
                store.forget(f"{old}/{step}", 0 if step == GOING else size, deadline)


def put_parts(store: Any, key: str, value: bytes) -> None:
    """Set `key` of torch's `store` to `value`, of any length. What was there before may be mixed with it until it is done."""
    parts = range(0, len(value), PART_BYTES)
    for i, at in enumerate(parts):
        store.set(f"{key}/{i}", value[at : at + PART_BYTES])
    store.set(key, str(len(parts)))


def take_parts(store: Any, key: str, delete: bool = False) -> bytes:
    """What `put_parts` set, which must be there. delete: remove it. Raises WireError where it is nothing of that kind."""
    keys, value = part_keys(store, key), bytearray()
    for each in keys:
        value += store.get(each)
        if len(value) > MOST_BYTES:
            raise WireError("a value in the store is too large", where=f"key {key[:120]}", wanted=f"{MOST_BYTES} bytes at most")
    for each in (key, *keys) if delete else ():
        store.delete_key(each)
    return bytes(value)


def part_keys(store: Any, key: str) -> list[str]:
    """Where the parts of a value lie."""
    raw = bytes(store.get(key))
    if not raw.isdigit() or len(raw) > 4:
        raise WireError("a value in the store has no parts", where=f"key {key[:120]}", got=raw[:40], wanted="their number")
    return [f"{key}/{i}" for i in range(int(raw))]


def run_until(deadline: float, what: str, where: str, work: Callable[[], T], ends: bool = False) -> T:
    """`work()` in a thread, left behind when the deadline passes: neither the store's nor a group's calls can be ended.

    ends: whether it ends by itself. A process that ends waits for it then; torch's threads that connect would take it down.
    """
    box: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            box.append((True, work()))
        except Exception as error:  # noqa: BLE001 - raised by the waiting thread
            box.append((False, error))

    thread = threading.Thread(target=run, name="refit-collective", daemon=not ends)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not box:
        raise DeadlineError(
            what, where=where, wanted="before the deadline", do="see whether a process of this refit is stopped or overloaded"
        )
    good, result = box[0]
    if not good:
        raise result
    return result  # type: ignore[no-any-return]


def open_store(wire: str = "collective", port: int = 0) -> tuple[str, int, Any]:
    """Host a store: its address, its port and torch's object, which must be kept.

    The address is VLLM_REFIT_HOST, else MASTER_ADDR (trainer rank 0's host, for torch), else loopback. port: 0 lets the kernel
    choose, and the socket that got it is the one the store serves on. Raises WireError when the address is not of this host, or
    the port is taken.
    """
    host = os.environ.get("VLLM_REFIT_HOST") or os.environ.get("MASTER_ADDR") or "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A restarted trainer serves where it did before, beside what is left of its connections, which have this flag as well. A
        # port of the kernel's choice is chosen without it: it may give one twice then.
        if not port:
            listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port:
            listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        do = "set VLLM_REFIT_HOST on trainer rank 0 to an address of its host that the other ranks can reach"
        do = "choose another port, or end the process that has it" if error.errno == errno.EADDRINUSE else do
        raise WireError(
            "can't listen for the other ranks", where=f"wire {wire}", got=f"{host}: {error.strerror or error}", do=do
        ) from None
    address, port = listener.getsockname()[:2]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=CONNECT_S),
    )
    return address, port, store


def local_address(host: str, port: int) -> str:
    """The address of this host from which `host` is reached. Nothing is sent."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _connect(host: str, port: int, deadline: float) -> Any:
    left = max(0.1, min(CONNECT_S, deadline - time.monotonic()))
    # Where nobody listens torch goes on trying until its time-out, though that is known at once.
    socket.create_connection((host, port), left).close()
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left))


def _decide(store: Any, key: str, verdict: Verdict) -> Verdict:
    """Set the verdict if nobody has; the one that stands."""
    return _verdict(store.compare_set(f"{key}/verdict", "", msgspec.msgpack.encode(verdict)))


def _verdict(raw: bytes, size: int = 0) -> Verdict:
    """A verdict as it stands in the store; of `size` ranks, whose words it has where it has no problems. Raises WireError."""
    verdict = decoded(Verdict, raw, VERDICT)
    if size and not verdict.problems and len(verdict.words) != size:
        raise WireError("it has not a word of each rank", where=VERDICT, got=len(verdict.words), wanted=size)
    return verdict


def _error(verdict: Verdict) -> RefitError:
    if not verdict.problems:
        return WireError("it was decided without a problem, though somebody stopped it", where=VERDICT)
    return class_of(verdict.kind, WireError).of(verdict.problems)


def _wait(store: Any, key: str, deadline: float) -> bool:
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except DistStoreError:
        return False
    return True


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
