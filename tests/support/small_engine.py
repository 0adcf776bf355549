"""An engine of one rank without vLLM: it holds whole tensors, plans for itself and reads over the product's wires.

It stands where a test is about the sender: several engines at once, and engines that fail as ordered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from vllm_refit_ext.client import FunctionClient
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.manifest import TensorSpec, parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.messages import PrepareReply, Status, UpdateInfo, UpdateReport, VerifyReply, from_rpc, to_rpc
from vllm_refit_ext.core.part import names_in, part_of
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import pack_placements
from vllm_refit_ext.receiver.take import Leased, Versions, check_read, offer_of, pack_targets, reading
from vllm_refit_ext.wires import release, wire
from vllm_refit_ext.wires.boxes import as_bytes, source_view, sum_by_tensor, target_view


class SmallEngine(FunctionClient):
    """weights: HF name -> the weights that it serves. before: run with the method's name at the start of every call."""

    def __init__(self, name: str = "", before: Callable[[str], None] = lambda method: None) -> None:
        super().__init__(self._answer)
        self.name, self.before = name, before
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.calls = "", [""]
        self.failed: RefitError | None = None
        self._plan: Plan | None = None
        self._last: UpdateReport | None = None
        self._kept: dict[str, Any] = {}

    def _answer(self, method: str, args: tuple[Any, ...], timeout_s: float | None) -> list[Any]:
        self.calls.append(method)
        self.before(method)
        return [getattr(self, "_" + method)(*args)]

    def _prepare_refit_info(self, info: object, fp8_config: object) -> Mapping[str, Any]:
        offer = parse_state_dict_info(info)
        whole = whole_tensors(offer.manifest).as_rank(offer.first_rank)
        assert offer.sources is not None
        self._plan = build_plan(offer.manifest, offer.sources, whole)
        tensors = offer.manifest.tensors
        self.weights = {n: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for n, s in tensors.items()}
        digest = self._plan.digest(offer.first_rank)
        return to_rpc(PrepareReply(rank=0, targets=pack_placements(whole), digest=digest))

    def _refit_status(self) -> Mapping[str, Any]:
        return to_rpc(Status(rank=0, version=self.version, last=self._last, caches="reset"))

    def _update_weights(self, raw: object) -> None:
        update = from_rpc(UpdateInfo, raw, "update_weights")
        assert self._plan is not None
        try:
            whole = part_of(self._plan, names_in(self._plan.manifest, update.part)) if update.part else self._plan
            reader = wire(update.wire).open_reader(update, whole, self._kept)
            reader.start(time.monotonic() + update.deadline_s)
            for plan in reader.steps:
                for move in range(len(plan)):
                    into = target_view(plan, move, as_bytes(self.weights[plan.targets[int(plan.target[move])].name]))
                    into.copy_(source_view(plan, move, reader))
            reader.confirm()
            reader.close()
        except RefitError as error:
            self.failed = error
            raise
        self.version = update.version
        self._last = UpdateReport(rank=0, version=update.version, writer="small")

    def _refit_verify(self, digests: object) -> Mapping[str, Any]:
        plan = self._plan
        assert plan is not None
        held = sum_by_tensor(
            plan, range(len(plan)), lambda m: target_view(plan, m, as_bytes(self.weights[plan.targets[int(plan.target[m])].name]))
        )
        return to_rpc(VerifyReply(rank=0, version=self.version, digests={n: f"{v:016x}" for n, v in held.items()}))

    def close(self) -> None:
        """Let go of the wire."""
        release(self._kept)


class SmallTaker:
    """An engine of one rank that takes published versions by itself. before_commit: run when all is read. without: a tensor that
    it has no place for."""

    def __init__(self, registry: str, without: str = "") -> None:
        self.versions, self._without = Versions(registry), without
        self.before_commit: Callable[[], None] = lambda: None
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.prepared = "", 0
        self.revoked: list[str] = []
        self._epoch, self._offer = "", ""
        self._plan: Plan | None = None
        self._kept: dict[str, Any] = {}

    def take(self, version: str = "latest", deadline_s: float = 20.0) -> str | None:
        """The version that was taken, or None. Either all of it is held afterwards, or what was held before."""
        deadline = time.monotonic() + deadline_s
        leased = self.versions.lease(version, self._epoch, deadline)
        if leased is None:
            return None
        with reading(self.versions, leased) as check:
            update, _ = leased.update(deadline_s, "reset")
            if leased.entry.offer != self._offer:
                self._prepare(leased, deadline)
            assert self._plan is not None
            plan, fresh = self._plan, {n: torch.zeros_like(t) for n, t in self.weights.items()}
            if update.part:
                plan = part_of(plan, names_in(plan.manifest, update.part))
                fresh = {n: t.clone() for n, t in self.weights.items()}
            reader = wire(update.wire).open_reader(update, plan, self._kept)
            for move in range(len(plan)):
                into = target_view(plan, move, as_bytes(fresh[plan.targets[int(plan.target[move])].name]))
                into.copy_(source_view(plan, move, reader))
            self.before_commit()
            check()
            reader.confirm()
            reader.close()
            self.weights, self.version, self._epoch = fresh, update.version, leased.entry.epoch
        return self.version

    def _prepare(self, leased: Leased, deadline: float) -> None:
        offer = parse_state_dict_info(offer_of(leased.entry, deadline))
        assert offer.sources is not None
        whole = whole_tensors(offer.manifest)
        if self._without:
            keep = np.array([whole.names[i] != self._without for i in whole.tensor])
            whole = whole.select(keep)
        check_read(offer.manifest, [pack_targets(whole, [])], [])
        self._plan, self._offer = build_plan(offer.manifest, offer.sources, whole), leased.entry.offer
        self.weights = {n: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for n, s in offer.manifest.tensors.items()}
        self.prepared += 1

    @contextlib.contextmanager
    def leased(self) -> Iterator[SmallTaker]:
        """Hold a lease on the latest version, and do nothing with it."""
        leased = self.versions.lease("latest", "", time.monotonic() + 20.0)
        assert leased is not None
        with reading(self.versions, leased) as check:
            self.check = check
            yield self


class PlainSource:
    """The parameters of a plain torch module, whole, as a source of `RefitSender`."""

    aliases: Mapping[str, str] = {}

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        names = list(self._parameters)
        buffers = [Buffer(n, 0, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in self._parameters.items()]
        self.specs = {b.name: TensorSpec(b.shape, b.dtype) for b in buffers}
        rows = [
            Placement(n, i, (0,) * p.ndim, tuple(p.shape), 0, tuple(s * p.element_size() for s in p.contiguous().stride()))
            for i, (n, p) in enumerate(self._parameters.items())
        ]
        self.placements = Placements.from_rows(buffers, rows, names)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The live parameters."""
        return list(self._parameters.values())

    def refresh(self) -> None:
        """Nothing: `tensors` are the parameters themselves."""
