"""One engine rank's side of a refit: prepare, receive, commit; its state and its version.

    unprepared --prepare--> ready --update--> receiving --commit--> ready
                                                 |  failed before the first write: ready, the old version serves on
                                                 '- failed after it: torn, until a full refit succeeds

All ranks of an engine agree before the first write and again before the version is set, so either every rank has the new version
or none has. Whatever is raised on one rank on the way, of whatever type, comes to such an agreement. Nothing here knows how
bytes move or where they land: a wire gives a reader, a writer executes the moves.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_refit_ext.core.errors import ConfigError, DeadlineError, PlanError, Problem, RefitError, SessionError, TornError
from vllm_refit_ext.core.messages import DEADLINE_S, PrepareReply, Status, UpdateInfo, UpdateReport, VerifyReply, from_rpc
from vllm_refit_ext.core.part import mixed
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.protocol import check_unchanged
from vllm_refit_ext.receiver import agree
from vllm_refit_ext.receiver.engine import Engine
from vllm_refit_ext.receiver.metrics import Clock, counted, explained, serve
from vllm_refit_ext.receiver.peak import asleep, free_bytes
from vllm_refit_ext.receiver.prepared import Piece, Prepared, prepare
from vllm_refit_ext.receiver.replicas import Source
from vllm_refit_ext.receiver.verify import add_digest, compare
from vllm_refit_ext.wires import Reader, wire
from vllm_refit_ext.wires.boxes import wait_for

AFTERWORD_S = 5.0
"""Seconds that ranks have at least to agree on how something ended, when the deadline is what ended it."""

PREPARE_APART_S = 300.0
"""Seconds that the first rank to prepare waits for the last one."""
Opens = Callable[[UpdateInfo, Plan, dict[str, Any]], Reader]


def nothing() -> None:
    """What is checked of a refit that holds no lease."""


class Receiver:
    """The state of one engine rank. Made on the first call; lives as long as the worker."""

    def __init__(self, view: Engine) -> None:
        self.view = view
        serve(view.replica * view.world_size + view.rank)
        self.version, self.since = "", 0.0
        self.prepared: Prepared | None = None
        self.refused: RefitError | None = None
        """Why no rank is prepared: what all ranks found in the last prepare."""
        self.torn: TornError | None = None
        self.last: UpdateReport | None = None
        self.reloaded: dict[str, int] | None = None
        """Digests of what the last refit handed to the engine's own reload, by tensor; None if none was asked to take them."""
        self._handed: dict[str, int] | None = None
        self._next, self._wrote, self._sampled = "", False, 0
        self._moved = Counter[int]()
        """Bytes by source rank of the moves that this refit has executed."""
        self._kept: dict[str, Any] = {}
        self._busy = threading.Lock()
        self._receiving = False
        self._check: Callable[[], None] = nothing
        self._opens: Opens | None = None
        self.source: Source | None = None
        """What others copy of this rank; ended before its memory is written."""
        self._piece: Piece
        self.parts: dict[str, str] = {}
        """Of which version is what, see `Status.parts`."""

    # -- prepare -------------------------------------------------------------------------------------------------------------

    def prepare(self, state_dict_info: object, fp8_config: object = None, keep: object = None) -> PrepareReply:
        """Prepare this rank, see `prepared.prepare`. Either all ranks of the engine are prepared afterwards or none is.

        Never raises for problems: they are in the reply of the rank that found them, so that every rank answers.
        """
        with self._alone("prepare_refit_info"):
            agree.begin(self.view, "prepare")
            self.prepared, self.refused = None, None
            errors: list[RefitError] = []
            prepared, reply = None, PrepareReply(rank=self.view.rank)
            with agree.collect(errors, "prepare_refit_info"):
                self.view.anchor()
                prepared, reply = prepare(self.view, state_dict_info, fp8_config, keep, self._reload)
            try:
                agree.agree(self.view, "prepare", None, agree.merged(errors), PREPARE_APART_S)
            except RefitError as error:
                self.refused = error
                # what another rank found stands in that rank's reply
                found = errors or ([error] if isinstance(error, DeadlineError) else [])
                return PrepareReply(rank=self.view.rank, problems=[p for e in found for p in e.problems], engine=reply.engine)
            self.prepared = prepared
            explained(reply)
            return reply

    # -- update --------------------------------------------------------------------------------------------------------------

    def update(self, update_info: object, check: Callable[[], None] = nothing, opens: Opens | None = None) -> UpdateReport:
        """One refit. Raises the same RefitError on every rank, or returns with the new version set on every rank.

        update_info: what the caller passed for all ranks; see `part_of`. check: called when this rank has read all; what it
        raises keeps all ranks from committing. opens: opens what is read, the wire of `update_info` by default.
        """
        with self._alone("update_weights"), counted(self.view.rank) as clock:
            agree.begin(self.view, session_of(update_info))
            self._receiving, self._check, self._opens = True, check, opens
            try:
                return clock.done(self._update(update_info, clock))
            except (KeyboardInterrupt, SystemExit) as error:
                if self._wrote:
                    self._tear(agree.as_refit_error(error, "update_weights"))
                raise
            finally:
                self._receiving = False

    def _update(self, raw: object, clock: Clock) -> UpdateReport:
        start = time.monotonic()
        errors: list[RefitError] = []
        reader: Reader | None = None
        update: UpdateInfo | None = None
        self._wrote = False
        with clock("register"), agree.collect(errors, "update_weights"):
            update = from_rpc(UpdateInfo, part_of(raw, self.view), "update_weights")
            self._next = update.version
            reader = self._open(update)
        deadline_s = update.deadline_s if update is not None else DEADLINE_S

        def left() -> float:
            return max(0.1, deadline_s - (time.monotonic() - start))

        try:
            with clock("agree"):
                agree.agree(self.view, "begin", None, agree.merged(errors), left())
            assert update is not None
            assert reader is not None
            prepared = self._prepared()
            if self.source is not None:
                with clock("leases"):
                    self.source.end()
            if reader.two_sided:
                with clock("start"):
                    # all ranks raise what kept one of them from joining the other side, with nothing written
                    with agree.collect(errors, "the wire"):
                        reader.start(start + deadline_s)
                    agree.agree(self.view, "start", None, agree.merged(errors), max(left(), AFTERWORD_S))
            with clock("write"), agree.collect(errors, "the writer"):
                if not reader.two_sided:
                    reader.start(start + deadline_s)
                self._write(prepared, reader, update, clock)
            clock.seconds["write"] -= clock.seconds.get("read", 0.0)
        finally:
            if reader is not None:
                with agree.collect(errors, "the wire"):
                    reader.close()
        self._conclude(update, prepared, errors, left, clock)
        self.last = UpdateReport(
            rank=self.view.rank,
            version=update.version,
            writer=prepared.targets.writer,
            seconds=clock.seconds,
            received={str(r): n for r, n in (self._moved if reader.received is None else reader.received).items()},
            forwarded=dict(reader.forwarded),
            moves=len(self._piece.plan),
            launches=prepared.launches(),
            kept=sorted(prepared.targets.kept),
            sampled=self._sampled,
        )
        return self.last

    def _conclude(
        self, update: UpdateInfo, prepared: Prepared, errors: list[RefitError], left: Callable[[], float], clock: Clock
    ) -> None:
        """Agree on how the writing went, and commit on all ranks or on none."""
        with clock("commit"):
            signature = prepared.signature
            if len(prepared.reload.plan):
                # The reload rebuilds some tensors; the plan was made for the old ones unless they kept their addresses.
                with agree.collect(errors, "the reload"):
                    signature = prepared.targets.signature(self.view)
            error = agree.merged(errors)
            if error is not None and self._wrote:
                error = self._tear(error)
            try:
                agree.agree(self.view, "commit", None, error, left())
            except RefitError as agreed:
                if self._any_wrote(left()):
                    # A rank failed after one had begun to write: the engine mixes versions, whatever this rank did.
                    raise self._tear(agreed) from None
                raise
            self.view.commit()
            self.since = time.time()
            self.parts = mixed(prepared.manifest, self.parts, update.part, self.version, update.version)
            prepared.signature, self.version, self.torn = signature, update.version, None
            self.reloaded, self._wrote = self._handed, False

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
        if update.part and self.torn:
            do = "run a full refit; a part can't heal weights that mix versions"
            raise SessionError("this engine is torn, and the refit is of a part", where="update_weights, part", do=do)
        if update.part and update.wire in ("ring", "collective"):
            raise ConfigError("this wire can't move a part of the weights", where="update_weights, part", got=update.wire)
        self._piece = prepared.piece(update.part)
        return (self._opens or wire(update.wire).open_reader)(update, self._piece.plan, self._kept)

    def _prepared(self) -> Prepared:
        if self.prepared is not None:
            return self.prepared
        if self.refused is not None:
            head = Problem(
                "the last prepare_refit_info found problems", "update_weights", do="mend them and call prepare_refit_info again"
            )
            raise SessionError.of([head, *self.refused.problems])
        raise SessionError(
            "update_weights was called before prepare_refit_info", where="update_weights", do="call prepare_refit_info first"
        )

    def _write(self, prepared: Prepared, reader: Reader, update: UpdateInfo, clock: Clock) -> None:
        """The engine's own reload first, as it parks all parameters; then boxes in place, a sample of them checked at once."""
        self._handed, self._sampled = {} if update.hash_reloaded else None, 0
        self._moved = Counter()
        seed = zlib.crc32(update.session.encode())
        reload = prepared.reload_writer(reader.whole, self._reload)
        if len(reload.plan):
            digests, plan = self._handed, reload.plan
            reload.note = None if digests is None else lambda move, box: add_digest(digests, plan, move, box)
            try:
                reload.write(reader)
            except RefitError as error:
                self._wrote = isinstance(error, TornError)
                raise
            except BaseException:
                self._wrote = True
                raise
            self._wrote = True
            self._moved.update(reload.plan.by_source)
        with torch.no_grad():
            writers, steps = dict[Any, None](), iter(reader.steps)
            while True:
                with clock("read"):
                    if (step := next(steps, None)) is None:
                        break
                    writer = prepared.in_place_writer(step)
                    if not len(writer.plan):
                        continue
                    reader.fetch(writer.plan)
                self._wrote = True
                writers[writer] = None
                writer.write(reader)
                self._moved.update(writer.plan.by_source)
                if update.sample:
                    self._sampled += writer.check(reader, update.sample, seed)
            prepared.derived.refresh()
            for writer in writers:
                writer.finish()
        wait_for(self.view.device)
        self._check()
        reader.confirm()

    def _any_wrote(self, left: float) -> bool:
        """Whether some rank had begun to write, or can't be asked."""
        try:
            return any(agree.agree(self.view, "wrote", b"1" if self._wrote else b"", None, max(left, AFTERWORD_S)))
        except RefitError:
            return True

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> None:
        self.view.reload(tensors, names, self._piece.reloaded)

    def _tear(self, error: RefitError) -> TornError:
        with agree.collect([], "recover"):
            self.view.recover()
        torn = error if isinstance(error, TornError) else None
        if torn is None:
            head = Problem(
                f"the refit to version {self._next!r} failed after its first write, so this engine's weights mix versions",
                "engine",
                do="run a full refit; generation is refused until one succeeds",
            )
            torn = TornError.of([head, *error.problems])
            torn.agreed = getattr(error, "agreed", False)  # type: ignore[attr-defined]
            torn.__cause__ = error
        self.torn = torn
        self.view.mark_torn(str(torn))
        return torn

    # -- the rest ------------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """State and version of this rank. Never waits."""
        error = self.torn or self.refused
        return Status(
            rank=self.view.rank,
            state="torn" if self.torn else "receiving" if self._receiving else "ready" if self.prepared else "unprepared",
            version=self.version,
            since=self.since,
            parts=self.parts,
            prepared=self.prepared.digest if self.prepared else "",
            problems=error.problems if error else [],
            last=self.last,
        )

    def abort(self) -> Status:
        """Give up what is prepared and let go of every mapping. The serving version and a torn state stay as they are."""
        with self._alone("refit_abort"):
            self.prepared, self.refused = None, None
            kept, self._kept = self._kept, {}
            if self.source is not None:
                kept["replica"], self.source = self.source, None
            errors: list[RefitError] = []
            for each in kept.values():
                with agree.collect(errors, "refit_abort"):
                    each.close()
            if error := agree.merged(errors):
                raise error
        return self.status()

    def verify(self, expected: object = None) -> VerifyReply:
        """Digests of this rank's part of the plan, compared with `expected`; see `verify.compare`."""
        with self._alone("refit_verify"):
            prepared = self._prepared()
            if self.torn:
                raise self.torn
            return compare(prepared, self.view.rank, self.version, self.reloaded, expected)

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


def session_of(update_info: object) -> str:
    """The attempt's name in what `update_weights` was given, the same on all ranks; nothing if it is not there."""
    for entry in update_info if isinstance(update_info, list) else [update_info]:
        if isinstance(entry, dict) and isinstance(entry.get("session"), str):
            return str(entry["session"])
    return ""


def part_of(update_info: object, view: Engine) -> dict[str, Any]:
    """This rank's part of `update_info`: the dict itself, or its entry in a list by global worker rank (as 0.32 allows)."""
    if isinstance(update_info, list):
        index = view.replica * view.world_size + view.rank
        if index >= len(update_info):
            wanted = f"at least {index + 1}"
            raise ConfigError("update_info has too few entries", where="update_weights", got=len(update_info), wanted=wanted)
        update_info = update_info[index]
    if not isinstance(update_info, dict) or "wire" not in update_info:
        got = ", ".join(map(str, update_info)) if isinstance(update_info, dict) else type(update_info).__name__
        raise ConfigError(
            "update_info is not a refit", where="update_weights", got=got, wanted="the key 'wire'", do="see docs/wires.md"
        )
    return update_info
