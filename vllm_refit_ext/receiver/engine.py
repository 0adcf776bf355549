"""What a refit needs of the engine rank that it runs in. `engine.rank.EngineRank` is vLLM's; nothing else of the
receiver knows an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from vllm_refit_ext.core.coded import Coding
from vllm_refit_ext.core.layouts import Stored
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.receiver.routes.table import Routes


class StoredParam(msgspec.Struct):
    """One live MXFP8 parameter. `shape` is canonical, [N, K] or [E, N, K]; `stored` one matrix as the engine holds it, padding
    included.

    `values`: the live tensor, its memory in the layout's order. `scales`: every tensor that holds its scales; kernels may have a
    second one, which graphs or eager steps read.
    """

    coding: Coding
    shape: tuple[int, ...]
    stored: Stored
    values: torch.Tensor
    scales: list[torch.Tensor]

    @property
    def count(self) -> int:
        """Matrices of the stack."""
        return self.shape[0] if len(self.shape) == 3 else 1


class Derived(Protocol):
    """Tensors that the engine makes from its weights."""

    @property
    def extra_bytes(self) -> int:
        """Bytes of memory beyond the model that they take, at most."""

    def refresh(self) -> None:
        """Make them from the weights as they are now, in their old memory."""


class Engine(Protocol):
    """One engine rank.

    `model`: the module that serves. `rank`, `world_size`: within one engine replica (tensor x pipeline parallel). `replica`: the
    data parallel index. `serial`: number of this engine among those of this process. `exchange`: see `agree`. `recorded`: see
    `recording`.
    """

    model: nn.Module
    device: torch.device
    rank: int
    world_size: int
    replica: int
    serial: int
    exchange: Any
    recorded: Any

    @property
    def name(self) -> str:
        """The engine and its version, for replies."""

    @property
    def dtype(self) -> str:
        """The dtype that the engine computes in."""

    @property
    def pipelined(self) -> bool:
        """Whether other ranks hold other layers."""

    @property
    def speaks(self) -> bool:
        """Whether this rank raises an error that all ranks agreed on."""

    @property
    def has_mxfp8(self) -> bool:
        """Whether some module holds MXFP8."""

    def record(self, entries: Mapping[str, tuple[Sequence[int], str]], rank: int) -> Routes:
        """Where the model's own loader puts each tensor: name -> (shape, dtype name). Raises RouteError."""

    def renamed(self, name: str) -> str:
        """The engine's name of a checkpoint tensor that nobody offers, empty where it has none."""

    def look(self, created: Iterable[Buffer], live: Mapping[str, torch.Tensor]) -> tuple[dict[str, StoredParam], dict[str, str]]:
        """The MXFP8 parameters by name, and the parameters that can't be written in place, with the reason. created: parameters
        as the model made them; live: as they are now."""

    def second_scales(self, slots: Iterable[tuple[nn.Module, str]]) -> list[Callable[[], int]]:
        """For each (module, attribute) whose kernel refers to scales by itself, what gives their address."""

    def created(self, module: str) -> tuple[int, int] | None:
        """(bytes, elements) of a module's tensors as the model made them; None where there is no such module."""

    def derived(self, written: Iterable[torch.Tensor]) -> Derived:
        """What is derived from the weights. written: every tensor that a refit fills."""

    def anchor(self) -> None:
        """Remember tensors beside the parameters, and put back those that a reload has replaced."""

    def reload(self, tensors: Iterator[tuple[str, torch.Tensor]], names: Collection[str], written: Mapping[str, int]) -> None:
        """Load `names` through the engine's own reload, in place. written: parameter -> elements that it must write."""

    def recover(self) -> None:
        """Put back what an unfinished reload has taken away."""

    def mark_torn(self, reason: str) -> None:
        """Generate nothing until the next commit."""

    def commit(self) -> None:
        """The weights are new: take the mark off, and let caches of older weights go."""
