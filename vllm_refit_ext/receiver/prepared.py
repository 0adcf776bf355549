"""What `prepare` makes on one engine rank and `update` executes: targets, plan, digest, writers.

Everything that depends on the manifest alone is done here, once; a refit runs what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.coded import DEQUANTISED
from vllm_refit_ext.core.errors import ManifestError, PlanError, Problem
from vllm_refit_ext.core.hosts import distances, this_host
from vllm_refit_ext.core.manifest import Manifest, parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.messages import PrepareReply
from vllm_refit_ext.core.part import names_in, part_of
from vllm_refit_ext.core.placement import Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import pack_placements
from vllm_refit_ext.receiver.engine import Derived, Engine
from vllm_refit_ext.receiver.fp8 import parse_fp8_config
from vllm_refit_ext.receiver.keep import patterns_of
from vllm_refit_ext.receiver.kernel_moves import KernelMoves, kernel_moves
from vllm_refit_ext.receiver.kernel_writer import KernelWriter
from vllm_refit_ext.receiver.metrics import Clock
from vllm_refit_ext.receiver.peak import reload_bytes
from vllm_refit_ext.receiver.stored_digests import StoredDigests
from vllm_refit_ext.receiver.targets import Targets, build_targets, record
from vllm_refit_ext.receiver.writers import InPlaceWriter, Reload, ReloadWriter

PARTS_KEPT = 8
"""Partial refits whose moves and writers are kept, by their patterns."""


class Piece(msgspec.Struct, frozen=True):
    """plan: the moves of one refit. reloaded: engine parameter -> elements that its reload must write."""

    plan: Plan
    reloaded: dict[str, int]


class Prepared(msgspec.Struct):
    """One rank's part of a plan, proved complete, with what executes it.

    extra_bytes: peak memory beyond the model. certain_bytes: what of it a reload surely needs. signature: of the live tensors; a
    refit refuses when they are others by then.
    """

    view: Engine
    manifest: Manifest
    targets: Targets
    plan: Plan
    digest: str
    in_place: InPlaceWriter | KernelWriter
    reload: ReloadWriter
    signature: tuple[Any, ...]
    derived: Derived
    extra_bytes: int
    certain_bytes: int
    parts: dict[tuple[str, ...], Piece] = {}
    in_place_of: dict[Plan, InPlaceWriter | KernelWriter] = {}
    reload_of: dict[Plan, ReloadWriter] = {}
    """Writers of plans that a reader with staging keeps from refit to refit."""
    digests: StoredDigests | None = None
    """What `verify` launches, once it was asked for."""

    def piece(self, patterns: Sequence[str]) -> Piece:
        """What a refit of these patterns does, all where there are none; made once for each. Raises ManifestError for patterns
        that match nothing, and SessionError for a module that takes the engine's reload and is named in part."""
        key = tuple(patterns)
        if key not in self.parts:
            names = names_in(self.manifest, key) if key else set(self.manifest.tensors)
            plan = part_of(self.plan, names) if key else self.plan
            if len(self.parts) >= PARTS_KEPT:
                dropped = self.parts.pop(next(iter(self.parts)))
                self.in_place_of.pop(dropped.plan, None)
                self.reload_of.pop(dropped.plan, None)
            reloaded = self.targets.reloaded_by(names) if key else self.targets.reloaded
            self.parts[key] = Piece(plan, reloaded)
        return self.parts[key]

    def launches(self) -> int:
        """Kernels of all tables that have been built for this plan."""
        return sum(w.launches for w in (self.in_place, *self.in_place_of.values()) if isinstance(w, KernelWriter))

    def in_place_writer(self, plan: Plan) -> InPlaceWriter | KernelWriter:
        """The writer of the moves of `plan` that go straight into live memory; made once for each plan."""
        if plan is self.plan:
            return self.in_place
        if plan not in self.in_place_of:
            self.in_place_of[plan] = writer_for(plan, self.targets, self.view)
        return self.in_place_of[plan]

    def reload_writer(self, plan: Plan, reload: Reload) -> ReloadWriter:
        """The writer of the moves of `plan` that take the engine's reload; made once for each plan."""
        if plan is self.plan:
            return self.reload
        if plan not in self.reload_of:
            self.reload_of[plan] = ReloadWriter(plan, reload, self.view.device)
        return self.reload_of[plan]


def prepare(view: Engine, info: object, fp8_config: object, keep: object, reload: Reload) -> tuple[Prepared, PrepareReply]:
    """Read what was offered, find this rank's targets, build and prove its part of the plan.

    info, fp8_config, keep: as the RPC `prepare_refit_info` takes them. reload: the engine's own reload, see `ReloadWriter`.
    Raises a RefitError with every problem.
    """
    clock = Clock(view.rank)
    fp8, patterns = parse_fp8_config(fp8_config), patterns_of(keep)
    offer = parse_state_dict_info(info)
    manifest = offer.manifest
    coded = [name for name, spec in manifest.tensors.items() if spec.format == "mxfp8"]
    if coded and not fp8.prequantize:
        do = "pass fp8_config {'prequantize': true}"
        raise ManifestError.of([Problem("it is sent as MXFP8, which was not negotiated", f"tensor {n!r}", do=do) for n in coded])
    sources = offer.sources if offer.sources is not None else whole_tensors(manifest)
    rank = offer.first_rank + view.rank
    targets, plan, made = _plan(view, manifest, sources, rank, patterns, distances(offer.hosts, {rank: this_host()}), clock)
    derived = view.derived(targets.written())
    reloading = reload_bytes(view, targets)
    writer = writer_for(plan, targets, view, made)
    if isinstance(writer, KernelWriter) and (coded or not fp8.prequantize):  # else it only asks what to quantise
        with clock("compile"):
            writer.compile()
    prepared = Prepared(
        view,
        manifest,
        targets,
        plan,
        plan.digest(targets.rank),
        writer,
        ReloadWriter(plan, reload, view.device),
        targets.signature(view),
        derived,
        reloading.most + derived.extra_bytes + (writer.nbytes if isinstance(writer, KernelWriter) else 0),
        reloading.certain,
    )
    reply = PrepareReply(
        rank=view.rank,
        engine=view.name,
        targets=pack_placements(targets.placements),
        digest=prepared.digest,
        dropped=targets.dropped,
        reload=targets.reload,
        kept=targets.kept,
        casts=targets.casts,
        quantise=targets.quantise if fp8.prequantize else [],
        layouts=targets.layouts(),
        extra_bytes=prepared.extra_bytes,
        wire_bytes=int(plan.nbytes.sum()),
        host=this_host(),
        seconds=clock.seconds,
    )
    return prepared, reply


def _plan(
    view: Engine,
    manifest: Manifest,
    sources: Placements,
    rank: int,
    keep: tuple[str, ...],
    distance: NDArray[np.int8],
    clock: Clock,
) -> tuple[Targets, Plan, KernelMoves]:
    """Targets, plan and what a table executes of it. distance: as `build_plan` takes it, with no rows where nobody named the
    trainer's hosts.

    A tensor that the trainer cuts through a block of MXFP8 takes the reload, which the cut does not trouble.
    """
    with clock("routes"):
        recording = record(view, manifest, rank)
    refused: dict[str, str] = {}
    while True:
        with clock("targets"):
            targets = build_targets(view, manifest, rank, recording, refused, keep)
        problems = list(targets.problems)
        with clock("plan"):
            try:
                plan = build_plan(manifest, sources, targets.placements, distance if len(distance) else None)
            except PlanError as error:
                problems += error.problems
            if problems:
                raise PlanError.of(problems)
            made = kernel_moves(plan, targets.stored)
        if not made.unfit:
            return targets, plan, made
        refused |= {name: str(error) for name, error in made.unfit.items()}


def writer_for(plan: Plan, targets: Targets, view: Engine, made: KernelMoves | None = None) -> InPlaceWriter | KernelWriter:
    """Tables of kernels on a GPU and wherever MXFP8 is involved; plain copies on a CPU. made: as `KernelWriter` takes it."""
    if view.device.type == "cuda" or targets.stored or any(b.layout.startswith(DEQUANTISED) for b in plan.targets):
        return KernelWriter(plan, targets.params, targets.stored, view.device, made)
    return InPlaceWriter(plan, targets.params)
