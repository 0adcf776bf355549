"""One engine rank's side of a refit: prepare, receive, commit; its state and its version.

    unprepared --prepare--> ready --update--> receiving --commit--> ready
                                                 |  failed before the first write: ready, the old version serves on
                                                 '- failed after it: torn, until a full refit succeeds

All ranks of an engine agree before the first write and again before the version is set, so either every rank has the new version
or none has. Nothing here knows how bytes travel or where they land: a wire gives a reader, a writer executes the moves.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from vllm_refit_ext.core.coded import DEQUANTISED
from vllm_refit_ext.core.errors import ManifestError, PlanError, Problem, RefitError, SessionError, TornError
from vllm_refit_ext.core.manifest import Manifest, parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.messages import (
    DEADLINE_S,
    PrepareReply,
    Status,
    UpdateInfo,
    UpdateReport,
    VerifyReply,
    from_rpc,
    read_digests,
)
from vllm_refit_ext.core.placement import Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.protocol import check_unchanged
from vllm_refit_ext.core.sites import distances, this_site
from vllm_refit_ext.core.table import pack_placements
from vllm_refit_ext.receiver.agree import agree
from vllm_refit_ext.receiver.anchors import Anchors
from vllm_refit_ext.receiver.derived import Derived
from vllm_refit_ext.receiver.fp8 import Fp8Config, parse_fp8_config
from vllm_refit_ext.receiver.held_digests import HeldDigests
from vllm_refit_ext.receiver.keep import patterns_of
from vllm_refit_ext.receiver.kernel_moves import KernelMoves, kernel_moves
from vllm_refit_ext.receiver.kernel_writer import KernelWriter
from vllm_refit_ext.receiver.peak import free_bytes, reload_bytes
from vllm_refit_ext.receiver.reload import recover, reload_weights
from vllm_refit_ext.receiver.targets import Targets, build_targets, record
from vllm_refit_ext.receiver.versions import adapter
from vllm_refit_ext.receiver.worker_view import WorkerView
from vllm_refit_ext.receiver.writers import InPlaceWriter, ReloadWriter
from vllm_refit_ext.wires import Reader, release, wire
from vllm_refit_ext.wires.boxes import MODULUS, move_digest
from vllm_refit_ext.wires.cuda_ipc import is_mapped

AFTERWORD_S = 5.0
"""Seconds that ranks have at least to agree on how something ended, when the deadline is what ended it."""


class Prepared(msgspec.Struct):
    """What `prepare` made and `update` executes."""

    manifest: Manifest
    targets: Targets
    plan: Plan
    digest: str
    in_place: InPlaceWriter | KernelWriter
    reload: ReloadWriter
    signature: tuple[Any, ...]
    derived: Derived
    received: dict[str, int]
    extra_bytes: int
    certain_bytes: int
    in_place_of: dict[Plan, InPlaceWriter | KernelWriter] = {}
    reload_of: dict[Plan, ReloadWriter] = {}
    """Writers of plans that a staged reader keeps from refit to refit."""
    digests: HeldDigests | None = None
    """What `verify` launches, once it was asked for."""

    def launches(self) -> int:
        """Kernels of all tables that have been built for this plan."""
        return sum(w.launches for w in (self.in_place, *self.in_place_of.values()) if isinstance(w, KernelWriter))


class Receiver:
    """The state of one engine rank. Made on the first call; lives as long as the worker."""

    def __init__(self, view: WorkerView) -> None:
        self.view = view
        self.engine = f"vllm {adapter().version}"
        self.version = ""
        self.prepared: Prepared | None = None
        self.problems: list[Problem] = []
        self.torn: TornError | None = None
        self.last: UpdateReport | None = None
        self.staged: dict[str, int] = {}
        self._anchors = Anchors()
        self._wrote, self._sampled = False, 0
        self._kept: dict[str, Any] = {}
        self._busy = threading.Lock()
        self._receiving = False

    # -- prepare -------------------------------------------------------------------------------------------------------------

    def prepare(self, state_dict_info: object, fp8_config: object = None, keep: object = None) -> PrepareReply:
        """Read the manifest, find this rank's targets, build and prove its share of the plan. keep: see `receiver.keep`.

        A call that finds problems leaves the rank unprepared and answers with all of them; it never raises for them, so that
        every rank of the engine answers.
        """
        with self._alone("prepare_refit_info"):
            self.prepared, self.problems = None, []
            clock = Clock()
            try:
                return self._prepare(state_dict_info, parse_fp8_config(fp8_config), patterns_of(keep), clock)
            except RefitError as error:
                self.problems = error.problems
                return PrepareReply(rank=self.view.rank, problems=error.problems, engine=self.engine, seconds=clock.seconds)

    def _prepare(self, info: object, fp8_config: Fp8Config, keep: tuple[str, ...], clock: Clock) -> PrepareReply:
        offer = parse_state_dict_info(info)
        manifest = offer.manifest
        coded = [name for name, spec in manifest.tensors.items() if spec.format == "mxfp8"]
        if coded and not fp8_config.prequantize:
            do = "pass fp8_config {'prequantize': true}"
            raise ManifestError.of(
                [Problem("it travels as MXFP8, which was not negotiated", f"tensor {n!r}", do=do) for n in coded]
            )
        sources = offer.sources if offer.sources is not None else whole_tensors(manifest)
        self._anchors.hold(self.view.model)
        rank = offer.first_rank + self.view.rank
        targets, plan, made = self._plan(manifest, sources, rank, keep, distances(offer.sites, {rank: this_site()}), clock)
        digest = plan.digest(targets.rank)
        in_place = writer_for(plan, targets, self.view, made)
        derived = Derived(self.view, targets.written())
        reloading = reload_bytes(self.view, targets)
        self.prepared = Prepared(
            manifest,
            targets,
            plan,
            digest,
            in_place,
            ReloadWriter(plan, self._reload, self.view.device),
            targets.signature(self.view),
            derived,
            received(plan),
            reloading.most + derived.extra_bytes,
            reloading.certain,
        )
        return PrepareReply(
            rank=self.view.rank,
            engine=self.engine,
            targets=pack_placements(targets.placements),
            digest=digest,
            dropped=targets.dropped,
            reload=targets.reload,
            kept=targets.kept,
            casts=targets.casts,
            quantise=targets.quantise if fp8_config.prequantize else [],
            layouts=targets.layouts(),
            extra_bytes=self.prepared.extra_bytes,
            wire_bytes=int(plan.nbytes.sum()),
            site=this_site(),
            seconds=clock.seconds,
        )

    def _plan(
        self,
        manifest: Manifest,
        sources: Placements,
        rank: int,
        keep: tuple[str, ...],
        distance: NDArray[np.int8],
        clock: Clock,
    ) -> tuple[Targets, Plan, KernelMoves]:
        """Targets, plan and what a table executes of it. distance: as `build_plan` takes it, with no rows where nobody told the
        trainer's sites.

        A tensor that the trainer cuts through a block of MXFP8 takes the reload, which the cut does not trouble.
        """
        with clock("routes"):
            recording = record(self.view, manifest, rank)
        refused: dict[str, str] = {}
        while True:
            with clock("targets"):
                targets = build_targets(self.view, manifest, rank, recording, refused, keep)
            problems = list(targets.problems)
            with clock("plan"):
                try:
                    plan = build_plan(manifest, sources, targets.placements, distance if len(distance) else None)
                except PlanError as error:
                    problems += error.problems
                if problems:
                    raise PlanError.of(problems)
                made = kernel_moves(plan, targets.held)
            if not made.unfit:
                return targets, plan, made
            refused |= {name: str(error) for name, error in made.unfit.items()}

    # -- update --------------------------------------------------------------------------------------------------------------

    def update(self, info: object) -> UpdateReport:
        """One refit. Raises the same RefitError on every rank, or returns with the new version set on every rank."""
        with self._alone("update_weights"):
            clock = Clock()
            self._receiving = True
            try:
                return self._update(info, clock)
            finally:
                self._receiving = False

    def _update(self, raw: object, clock: Clock) -> UpdateReport:
        start = time.monotonic()
        reader: Reader | None = None
        update: UpdateInfo | None = None
        problem: RefitError | None = None
        try:
            with clock("begin"):
                update = from_rpc(UpdateInfo, raw, "update_weights")
                reader = self._open(update)
        except RefitError as error:
            problem = error
        deadline_s = update.deadline_s if update is not None else DEADLINE_S

        def left() -> float:
            return max(0.1, deadline_s - (time.monotonic() - start))

        try:
            with clock("agree"):
                agree(self.view, "begin", None, problem, left())
            assert update is not None
            assert reader is not None
            prepared = self._prepared()
            if reader.two_sided:
                with clock("meet"):
                    self._meet(reader, start + deadline_s, left)
            else:
                reader.start(start + deadline_s)
            try:
                with clock("write"):
                    self._write(prepared, reader, update.sample, zlib.crc32(update.session.encode()))
            except Exception as error:  # noqa: BLE001 - whatever a kernel or a loader raises
                problem = error if isinstance(error, RefitError) and not self._wrote else self._tear(error, update.version)
        finally:
            if reader is not None:
                reader.close()
        with clock("commit"):
            try:
                agree(self.view, "commit", None, problem, left())
            except RefitError as error:
                if self._any_wrote(left()):
                    # A rank failed after one had begun to write: the engine mixes versions, whatever this rank did.
                    torn = self._tear(error, update.version)
                    raise error if isinstance(error, TornError) else torn from None
                raise
            self._commit(update, prepared)
        report = UpdateReport(
            rank=self.view.rank,
            version=update.version,
            writer=prepared.targets.writer,
            seconds=clock.seconds,
            received=prepared.received if reader.received is None else {str(r): n for r, n in reader.received.items()},
            forwarded={str(r): n for r, n in reader.forwarded.items()},
            moves=len(prepared.plan),
            launches=prepared.launches(),
            kept=sorted(prepared.targets.kept),
            sampled=self._sampled,
        )
        self.last = report
        return report

    def _open(self, update: UpdateInfo) -> Reader:
        """Everything that can be checked before the first write."""
        prepared = self._prepared()
        if not update.version:
            raise SessionError("a refit needs a version", where="update_weights", got="an empty text", wanted="any other text")
        expected = update.digests.get(str(self.view.rank))
        if update.digests and expected != prepared.digest:
            do = "prepare again on every rank, trainers and engines"
            raise PlanError(
                "this rank holds another plan than the sender",
                where="plan digest",
                got=prepared.digest[:16],
                wanted=str(expected)[:16],
                do=do,
            )
        if sleeping := asleep(prepared.targets):
            do = 'call wake_up(tags=["weights"]) first, then refit, then wake the rest'
            raise SessionError("the engine's weights are asleep", where="update_weights", got=sleeping, do=do)
        if prepared.certain_bytes and (free := free_bytes(self.view.device)) < prepared.certain_bytes:
            do = "free memory on the engine's device, or leave more of it free (gpu_memory_utilization)"
            raise SessionError(
                "the refit needs more memory beside the weights than is free",
                where="update_weights",
                got=f"{free} bytes",
                wanted=f"{prepared.certain_bytes} bytes, for one module of vLLM's own reload",
                do=do,
            )
        if prepared.signature != prepared.targets.signature(self.view):
            do = "call prepare_refit_info again"
            raise SessionError("the engine's parameters were replaced or moved since prepare", where="update_weights", do=do)
        check_unchanged(update, "update_weights")
        return wire(update.wire).open_reader(update, prepared.plan, self._kept)

    def _prepared(self) -> Prepared:
        if self.prepared is not None:
            return self.prepared
        if self.problems:
            head = Problem(
                "the last prepare_refit_info found problems", "update_weights", do="mend them and call prepare_refit_info again"
            )
            raise SessionError.of([head, *self.problems])
        raise SessionError(
            "update_weights was called before prepare_refit_info", where="update_weights", do="call prepare_refit_info first"
        )

    def _meet(self, reader: Reader, deadline: float, left: Callable[[], float]) -> None:
        """Meet the other side, then agree here once more: all ranks raise what kept one of them from it, with nothing written."""
        problem: RefitError | None = None
        try:
            reader.start(deadline)
        except RefitError as error:
            problem = error
        agree(self.view, "meet", None, problem, max(left(), AFTERWORD_S))

    def _write(self, prepared: Prepared, reader: Reader, sample: int, seed: int) -> None:
        """The engine's own reload first, as it parks all parameters; then boxes in place, a `sample` of them checked at once."""
        self.staged, self._wrote, self._sampled = {}, False, 0
        reload = self._reload_writer(prepared, reader.whole)
        if len(reload.plan):
            reload.staged = lambda move, box: self._note_staged(reload.plan, move, box)
            try:
                reload.write(reader)
            except RefitError as error:
                self._wrote = isinstance(error, TornError)
                raise
            self._wrote = True
        with torch.no_grad():
            for plan in reader.steps:
                writer = self._in_place_writer(prepared, plan)
                if len(writer.plan):
                    reader.fetch(writer.plan)
                    self._wrote = True
                    writer.write(reader)
                    if sample:
                        self._sampled += writer.check(reader, sample, seed)
            prepared.derived.refresh()
        reader.confirm()

    def _in_place_writer(self, prepared: Prepared, plan: Plan) -> InPlaceWriter | KernelWriter:
        if plan is prepared.plan:
            return prepared.in_place
        if plan not in prepared.in_place_of:
            prepared.in_place_of[plan] = writer_for(plan, prepared.targets, self.view)
        return prepared.in_place_of[plan]

    def _reload_writer(self, prepared: Prepared, plan: Plan) -> ReloadWriter:
        if plan is prepared.plan:
            return prepared.reload
        if plan not in prepared.reload_of:
            prepared.reload_of[plan] = ReloadWriter(plan, self._reload, self.view.device)
        return prepared.reload_of[plan]

    def _any_wrote(self, left: float) -> bool:
        """Whether some rank had begun to write, or can't be asked."""
        try:
            return any(agree(self.view, "wrote", b"1" if self._wrote else b"", None, max(left, AFTERWORD_S)))
        except RefitError:
            return True

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> None:
        reload_weights(self.view, tensors, names, self._prepared().targets.reloaded)
        self._anchors.hold(self.view.model)

    def _note_staged(self, plan: Plan, move: int, box: torch.Tensor) -> None:
        name = plan.names[int(plan.tensor[move])]
        self.staged[name] = (self.staged.get(name, 0) + move_digest(plan, move, box)) % MODULUS

    def _tear(self, error: Exception, version: str) -> TornError:
        with contextlib.suppress(RefitError):
            recover(self.view)
        problems = (
            error.problems if isinstance(error, RefitError) else [Problem(f"{type(error).__name__}: {error}", "the writer")]
        )
        head = Problem(
            f"the refit to version {version!r} failed after its first write, so this engine's weights mix versions",
            f"engine rank {self.view.rank}",
            do="run a full refit; generation is refused until one succeeds",
        )
        self.torn = TornError.of([head, *(p for p in problems if p != head)])
        self.torn.__cause__ = error
        return self.torn

    def _commit(self, update: UpdateInfo, prepared: Prepared) -> None:
        # The engine's reload rebuilds some tensors; the plan was made for the old ones unless they kept their addresses.
        if len(prepared.reload.plan):
            prepared.signature = prepared.targets.signature(self.view)
        self.version, self.torn = update.version, None

    # -- the rest ------------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """State and version of this rank. Never waits."""
        state = "torn" if self.torn else "receiving" if self._receiving else "ready" if self.prepared else "unprepared"
        problems = self.torn.problems if self.torn else self.problems
        digest = self.prepared.digest if self.prepared else ""
        return Status(
            rank=self.view.rank,
            state=state,
            version=self.version,
            prepared=digest,
            problems=problems,
            last=self.last,
        )

    def abort(self) -> Status:
        """Give up what is prepared and let go of every mapping. The serving version and a torn state stay as they are."""
        with self._alone("refit_abort"):
            self.prepared, self.problems = None, []
            release(self._kept)
            self._kept = {}
        return self.status()

    def verify(self, expected: object = None) -> VerifyReply:
        """Digests of this rank's share, read back from the live parameters where their layout allows it.

        expected: by rank as text, by tensor, hexadecimal. Names that differ are listed in plan order.
        """
        wanted = read_digests(expected)
        with self._alone("refit_verify"):
            prepared = self._prepared()
            if self.torn:
                raise self.torn
            writer = prepared.in_place
            if prepared.digests is None:
                prepared.digests = HeldDigests(writer.plan, prepared.targets.params, prepared.targets.held, self.view.device)
            live = prepared.digests(writer.content).get(prepared.targets.rank, {})
            staged = dict(self.staged)
            total = {name: (live.get(name, 0) + staged.get(name, 0)) % MODULUS for name in [*live, *staged]}
            digests = {name: f"{total[name]:016x}" for name in prepared.manifest.tensors if name in total}
            want = wanted.get(str(self.view.rank), {})
            differs = [name for name in prepared.manifest.tensors if name in want and digests.get(name) != want[name]]
            missing = [name for name in want if name not in prepared.manifest.tensors]
            if missing:
                raise ManifestError("digests for tensors that are not in the manifest", where="refit_verify", got=missing[:5])
            return VerifyReply(rank=self.view.rank, version=self.version, digests=digests, staged=sorted(staged), differs=differs)

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise SessionError(
                f"{call} was called while another refit call runs on this rank", where=call, do="wait for it to return"
            )
        try:
            yield
        finally:
            self._busy.release()


class Clock:
    """Seconds by phase. A phase that is entered again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def asleep(targets: Targets) -> str:
    """The name of a weight whose memory a sleep has taken away, or nothing. All weights sleep together, so a few are looked
    at."""
    written = {**targets.params, **{name: held.values for name, held in targets.held.items()}}
    for name in list(written)[:: max(1, len(written) // 4)]:
        if written[name].device.type == "cuda" and written[name].numel() and not is_mapped(written[name].data_ptr()):
            return name
    return ""


def writer_for(plan: Plan, targets: Targets, view: WorkerView, made: KernelMoves | None = None) -> InPlaceWriter | KernelWriter:
    """Tables of kernels on a GPU and wherever MXFP8 is involved; plain copies on a CPU. made: as `KernelWriter` takes it."""
    if view.device.type == "cuda" or targets.held or any(b.layout.startswith(DEQUANTISED) for b in plan.targets):
        return KernelWriter(plan, targets.params, targets.held, view.device, made)
    return InPlaceWriter(plan, targets.params)


def received(plan: Plan) -> dict[str, int]:
    """Bytes by source rank, as text keys."""
    return {str(e.source): e.nbytes for e in plan.edges()}
