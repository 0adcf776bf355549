"""Wires: how the bytes of a plan travel. One module a wire, both halves in it.

A wire module has four functions, and the rest of the project knows no more of it:

    shares(plan, sites, bucket_bytes) -> list of bytes
        rank 0 of the trainer, once: what each trainer rank must know to open its half
    open_sender(rank, share, tensors) -> Sender
        each trainer rank, once
    info(parts) -> message
        rank 0, every refit: the field of `UpdateInfo` named like the wire, from all `begin`s
    open_reader(update, plan, kept) -> Reader
        each engine rank, every refit; `kept` is a dict that the wire may keep things in

Everything that can be wrong is found in `open_reader`, before the first write.

A wire whose bytes must be sent, not only read, has more: its sender has `transfer` and `refuse` (`ActiveSender`), its reader
`start` and plans of its own (`StagedReader`), because only some bytes are there at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from vllm_refit_ext.core.errors import ConfigError, RefitError
from vllm_refit_ext.core.messages import Message, UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.sites import Sites

NAMES = ("shm", "ipc", "ipc_staged", "collective")
BUCKET_BYTES = 256 << 20
"""Most payload of a message on a wire that stages, unless the caller says otherwise. At 360 GB/s it travels in 0.7 ms, long
against the start of a batch or the turn of two processes.
"""


class Sender(Protocol):
    """A trainer rank's half."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Make the current weights readable. Returns what rank 0 passes to `info`. tensors: live, in the order of the buffers."""
        ...

    def close(self) -> None:
        """Give back what the wire holds. Safe to call twice."""
        ...


@runtime_checkable
class ResidentSender(Sender, Protocol):
    """A trainer rank's half whose memory engines map. `resident`: they may keep it mapped between refits."""

    resident: bool

    def forget(self) -> None:
        """Tell the engines everything again: the last refit failed."""
        ...


class Reader(Protocol):
    """An engine rank's half, for one refit."""

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of source buffer `buffer` of the plan, uint8 [nbytes]."""
        ...

    def confirm(self) -> None:
        """Raise WireError when what was read changed meanwhile. Called before the commit."""
        ...

    def close(self) -> None:
        """Let go of what is not kept for the next refit."""
        ...


@runtime_checkable
class ActiveSender(Sender, Protocol):
    """A trainer rank's half that works while the engines' update call runs."""

    def transfer(self, session: str, info: Any, deadline: float) -> dict[int, int]:
        """Send. info: what `info` made. deadline: time.monotonic seconds. Returns bytes by engine rank. Raises RefitError."""
        ...

    def refuse(self, session: str, error: RefitError, deadline: float, ranks: Sequence[int] = ()) -> None:
        """On rank 0: the call for `session` of the engine with these `ranks` has failed; nobody need wait for them. None: for
        nobody. Never raises, and does nothing to another session."""
        ...


@runtime_checkable
class StagedReader(Reader, Protocol):
    """An engine rank's half for bytes that come piece by piece. `memory` serves its own plans and fetches what it is asked for.

    whole: the plan's moves in the order of their travel, with staging as their source; the reload's writer runs on it. steps:
    after the reload, a plan for each group of moves in place that are there together. received: bytes by trainer rank, as they
    came.
    """

    whole: Plan
    steps: Sequence[Plan]
    received: dict[int, int]

    def start(self, deadline: float) -> None:
        """Meet the other side, after this engine's ranks have agreed and before the first write. deadline: time.monotonic
        seconds.

        Raises the same RefitError on all ranks of both sides.
        """
        ...


@runtime_checkable
class ForwardedReader(StagedReader, Protocol):
    """A staged reader some of whose bytes come from engine ranks of its site. forwarded: bytes by engine rank, in the plan's
    numbers; they are not in `received`.
    """

    forwarded: dict[int, int]


class Wire(Protocol):
    """What a wire module offers."""

    def shares(self, plan: Plan, sites: Sites, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]: ...

    def open_sender(self, rank: int, share: bytes, tensors: Sequence[torch.Tensor]) -> Sender: ...

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
    for held in kept.values():
        held.close()
