"""What a trainer rank offers, and what it knows once a plan stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import ConfigError, ManifestError, Problem, WireError
from vllm_refit_ext.core.hosts import this_host
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import PrepareReply
from vllm_refit_ext.core.part import names_in
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.plan_wire import PackedPlan
from vllm_refit_ext.core.table import PackedPlacements, pack_placements, unpack_placements
from vllm_refit_ext.sender.look import Look, misfits
from vllm_refit_ext.sender.prequantize import Prequantised
from vllm_refit_ext.sender.source import Source
from vllm_refit_ext.sender.verify import Check
from vllm_refit_ext.wires import Sender


class Description(msgspec.Struct):
    """What a rank tells rank 0 about itself."""

    tensors: dict[str, TensorSpec]
    aliases: dict[str, str]
    placements: PackedPlacements
    host: str


class RankPart(msgspec.Struct):
    """What rank 0 tells a rank about the plan. plan: the moves out of that rank. total: bytes of the whole plan."""

    manifest: Manifest
    plan: PackedPlan
    wire: bytes
    total: int


class EngineRanks(msgspec.Struct):
    """One engine's ranks in the plan, known on trainer rank 0. first: the plan's number of its rank 0. replies: in rank order, of
    its first data parallel replica. replicas: how many hold these same ranks."""

    first: int
    replies: list[PrepareReply]
    replicas: int = 1


class Offered:
    """This rank's memory as it is offered: its source, with some of it quantised."""

    def __init__(self, source: Source, rank: int) -> None:
        """rank: of this process among the trainer's. Raises ConfigError where the source's parts do not fit each other."""
        self.source = source
        self.placements = source.placements.as_rank(rank)
        self.specs = dict(source.specs)
        self._prequantised: Prequantised | None = None
        self.addresses: list[int] = []
        """Of what `current` returned. The same list while nothing has moved, where the source keeps one."""
        buffers = self.placements.buffers
        if len(buffers) != len(source.tensors):
            raise ConfigError(
                "a source has one tensor for each buffer", where="placements", got=len(source.tensors), wanted=len(buffers)
            )
        self._look = Look(buffers)
        problems = misfits(source.tensors, buffers)
        problems += [
            Problem("a placement's tensor has no entry in specs", f"tensor {self.placements.names[i]!r}")
            for i in sorted(set(self.placements.tensor.tolist()))
            if self.placements.names[i] not in self.specs
        ]
        if problems:
            raise ConfigError.of(problems, f"the source of trainer rank {rank} has {len(problems)} problem(s)")

    def quantise(self, names: Collection[str]) -> None:
        """Offer codes and scales in place of these tensors."""
        self._prequantised = Prequantised(self.specs, self.placements, self.source.tensors, names)
        self.specs, self.placements = self._prequantised.specs, self._prequantised.placements
        addresses = self._look(self.source.tensors)
        if addresses is not None and all(addresses):  # else the refit that finds them in place makes the table
            self._prequantised.bind(self.source.tensors, addresses)

    @property
    def quantised_bytes(self) -> int:
        """Memory of codes, scales and what quantises into them."""
        return self._prequantised.nbytes if self._prequantised is not None else 0

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The memory of the buffers of `placements`, in their order, as `current` left it."""
        return self.source.tensors if self._prequantised is None else self._prequantised.tensors

    def release(self) -> int:
        """Give back codes and scales until `current` makes them anew. Returns bytes."""
        return self._prequantised.release() if self._prequantised is not None else 0

    def describe(self) -> bytes:
        """The message for rank 0."""
        aliases = dict(self.source.aliases)
        return msgspec.msgpack.encode(Description(self.specs, aliases, pack_placements(self.placements), this_host()))

    def look(self) -> Sequence[torch.Tensor]:
        """The source's tensors of now, and their `addresses`. Raises WireError naming every tensor that no longer fits."""
        self.source.refresh()
        live = self.source.tensors
        addresses = getattr(self.source, "addresses", None) or self._look(live)
        if addresses is None or (0 in addresses and any(not at and t.numel() for at, t in zip(addresses, live, strict=True))):
            problems = misfits(live, self.placements.buffers[: len(live)]) or [Problem("a tensor has no memory", "the source")]
            raise WireError.of(problems, f"{len(problems)} tensor(s) of the trainer are not what the plan was made for")
        self.addresses = addresses
        return live

    def current(self, seconds: dict[str, float]) -> Sequence[torch.Tensor]:
        """What the trainer holds now, in the order of the buffers of `placements`: contiguous, of their shapes and dtypes. Adds
        the time of looking and of quantising to `seconds`.

        Raises WireError naming every tensor that no longer fits.
        """
        begin = time.perf_counter()
        live = self.look()
        seconds["look"] = time.perf_counter() - begin
        if self._prequantised is None:
            return live
        begin = time.perf_counter()
        filled = self._prequantised.fill(live, self.addresses)
        self.addresses = self._prequantised.addresses
        seconds["quantise"] = time.perf_counter() - begin
        return filled


class Prepared(msgspec.Struct):
    """What a sender knows after `prepare`. plan: of all ranks on rank 0, else the moves out of this one. half: of the wire, this
    rank's. total: bytes of the whole plan. engines: on rank 0. check: what `verify` runs, once it was asked for.
    offer: on rank 0, what engines that take a published version prepare from.
    """

    offered: Offered
    plan: Plan
    half: Sender
    total: int
    engines: list[EngineRanks]
    check: Check | None = None
    offer: bytes = b""

    def begin(self, tensors: Sequence[torch.Tensor], part: Sequence[str], addresses: list[int] | None = None) -> bytes:
        """Make this rank's weights readable, or the `part` of them that engines will read (see `core.part`). addresses: those of
        `tensors`, where somebody looked at them. Raises WireError, and ManifestError for patterns that match nothing."""
        if part:
            names = names_in(self.plan.manifest, part)
            table = self.offered.placements
            mine = np.array([name in names for name in table.names], bool)[table.tensor] if len(table) else np.zeros(0, bool)
            self.half.only = set(table.buffer[mine].tolist())
        self.half.addresses = addresses
        try:
            return self.half.begin(tensors)
        finally:
            self.half.only = self.half.addresses = None


def merge(described: Sequence[Description]) -> Manifest:
    """One manifest of all ranks. Raises ManifestError where ranks disagree. What nobody offers, the engine's replies name."""
    tensors: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    problems = []
    for rank, d in enumerate(described):
        aliases |= d.aliases
        for name, spec in d.tensors.items():
            known = tensors.setdefault(name, spec)
            if known != spec:
                what = "trainer ranks disagree on it"
                got, wanted = f"{spec.dtype} {list(spec.shape)} on rank {rank}", f"{known.dtype} {list(known.shape)}"
                problems.append(Problem(what, f"tensor {name!r}", got, wanted))
    if problems:
        raise ManifestError.of(problems, f"the trainer's ranks do not add up to a checkpoint: {len(problems)} problem(s)")
    return Manifest(tensors, {a: n for a, n in aliases.items() if a not in tensors and n in tensors})


def joined(raw: list[bytes]) -> tuple[Manifest, Placements, tuple[str, ...]]:
    """On rank 0: what all ranks offer, and the host of each."""
    described = [msgspec.msgpack.decode(r, type=Description) for r in raw]
    manifest = merge(described)
    sources = concatenate([unpack_placements(d.placements) for d in described])
    if not len(sources):
        sources = Placements.from_rows(sources.buffers, [], list(manifest.tensors))
    return manifest, sources, tuple(d.host for d in described)


def make_source(given: Source | Callable[[], Source]) -> Source:
    """The source that a sender was given, or what the function that it was given makes."""
    return given() if not hasattr(given, "refresh") else given  # type: ignore[operator,return-value]
