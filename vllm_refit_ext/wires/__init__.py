"""Wires: how the bytes of a plan are moved. One module a wire, both halves in it.

A wire module has four functions, and the rest of the project knows no more of it:

    send_tables(plan, hosts, bucket_bytes) -> list of bytes
        rank 0 of the trainer, once: what each trainer rank must know to open its half
    open_sender(rank, table, tensors) -> Sender
        each trainer rank, once
    info(parts) -> message
        rank 0, every refit: the field of `UpdateInfo` named like the wire, from all `begin`s
    open_reader(update, plan, kept) -> Reader
        each engine rank, every refit; `kept` is a dict that the wire may keep things in

Everything that can be wrong is found in `open_reader`, before the first write. `Reader` and `Sender` declare all that the two
halves have; what a wire has no use for, it leaves as it stands there.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from vllm_refit_ext.core.errors import ConfigError, RefitError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import Message, UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires.boxes import Memory

ONE_SIDED = ("shm", "ipc", "nixl")
"""Wires by which one side reads while the other does something else, so that versions can be published and handed on."""
NAMES = ("shm", "ipc", "nixl", "ring", "collective")
BUCKET_BYTES = 512 << 20
"""Most payload of a message on a wire that stages, unless the caller says otherwise. One takes a quarter of a millisecond on a
GPU and 1.4 ms over NVLink, long against what a message costs beside its bytes (docs/how-it-works.md).
"""


class Sender(abc.ABC):
    """A trainer rank's half. resident: engines may keep this memory mapped between refits. sends: whether `transfer` has anything
    to do, so that all trainer ranks work while the engines' calls run. copied: bytes that `begin` copies, so that the weights may
    change behind it; 0 where engines read the weights themselves. staging_bytes: memory beside the weights on their device. only:
    numbers of the buffers that the next `begin` has to make readable, for a partial refit; None for all. addresses: of the
    tensors that the next `begin` is given, which are contiguous, where the caller has looked at them already.
    """

    resident = False
    sends = False
    copied = 0
    staging_bytes = 0
    only: Collection[int] | None = None
    addresses: list[int] | None = None

    @abc.abstractmethod
    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Make the current weights readable. Returns what rank 0 passes to `info`. tensors: live, in the order of the buffers."""

    def more(self, tensors: Mapping[int, torch.Tensor]) -> None:  # noqa: B027
        """Make these buffers readable beside what `begin` did, to the same readers. Nothing to do where they read the weights
        themselves."""

    def transfer(self, session: str, info: Any, deadline: float) -> dict[int, int]:
        """Send. info: what `info` made. deadline: time.monotonic seconds. Returns bytes by engine rank. Raises RefitError."""
        return {}

    def refuse(self, session: str, error: RefitError, deadline: float, ranks: Sequence[int] = ()) -> None:  # noqa: B027
        """On rank 0: the call for `session` of the engine with these `ranks` has failed; nobody need wait for them. None: for
        nobody. Never raises, and does nothing to another session."""

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what `begin` copied equals `tensors`; False where nothing was copied."""
        return False

    def end(self) -> None:  # noqa: B027
        """Take back what `begin` made readable: a reader that has not confirmed finds out, and so does one that comes later."""

    def rest(self) -> None:  # noqa: B027
        """The refit has ended, well or not: give back what no engine may use until the next `begin`."""

    def forget(self) -> None:  # noqa: B027
        """Tell the engines everything again: the last refit failed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the wire holds. Safe to call twice."""


class Reader(Memory):
    """An engine rank's half, for one refit. `memory` serves the sources of `whole` and of `steps`.

    whole: the moves for the engine's reload, in the order in which their bytes come. steps: after the reload, a plan for each
    group of moves in place that are there together. two_sided: whether `start` waits for the other side, so that the ranks of the
    engine must agree after it. received: bytes by trainer rank, as they came; None where all is read that the plan names.
    forwarded: bytes by the name of the replica that they were read from; they are not in `received`."""

    whole: Plan
    steps: Iterable[Plan]
    two_sided = False
    received: Mapping[int, int] | None = None
    forwarded: Mapping[str, int] = MappingProxyType({})

    def start(self, deadline: float) -> None:
        """Begin, before the first write. deadline: time.monotonic seconds, of all waits of this refit. Where it is `two_sided`,
        it raises the same RefitError on all ranks of both sides; elsewhere it waits for nobody and raises nothing."""

    def fetch(self, plan: Plan) -> None:
        """Wait for all that a step reads, so that what fails to come fails before it is written."""

    @abc.abstractmethod
    def confirm(self) -> None:
        """Raise WireError when what was read changed meanwhile. Called before the commit."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what is not kept for the next refit. What was not confirmed is given up."""


class Wire(Protocol):
    """What a wire module offers."""

    def send_tables(self, plan: Plan, hosts: Hosts, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]: ...

    def open_sender(self, rank: int, table: bytes, tensors: Sequence[torch.Tensor]) -> Sender: ...

    def info(self, parts: Sequence[bytes]) -> Message: ...

    def open_reader(self, update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> Reader: ...


def wire(name: str) -> Wire:
    """The module of wire `name`. Raises ConfigError for an unknown one."""
    if name not in NAMES:
        raise ConfigError("unknown wire", got=name, wanted=" or ".join(NAMES))
    module: Any = importlib.import_module(f"vllm_refit_ext.wires.{name}")
    return module  # type: ignore[no-any-return]


def release(kept: Mapping[str, Any]) -> None:
    """Close everything that wires kept between refits."""
    for part in kept.values():
        part.close()
