"""An engine of one rank without vLLM: it holds whole tensors, plans for itself and reads over the product's wires.

It stands where a test is about the sender: several engines at once, and engines that fail as told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_refit_ext.client import FunctionClient
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.manifest import TensorSpec, parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.messages import PrepareReply, Status, UpdateInfo, UpdateReport, VerifyReply, from_rpc, to_rpc
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import pack_placements
from vllm_refit_ext.wires import release, wire
from vllm_refit_ext.wires.boxes import as_bytes, source_view, sum_by_tensor, target_view


class SmallEngine(FunctionClient):
    """held: HF name -> the weights that it serves. before: run with the method's name at the start of every call."""

    def __init__(self, name: str = "", before: Callable[[str], None] = lambda method: None) -> None:
        super().__init__(self._answer)
        self.name, self.before = name, before
        self.held: dict[str, torch.Tensor] = {}
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
        self.held = {n: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for n, spec in offer.manifest.tensors.items()}
        digest = self._plan.digest(offer.first_rank)
        return to_rpc(PrepareReply(rank=0, targets=pack_placements(whole), digest=digest))

    def _refit_status(self) -> Mapping[str, Any]:
        return to_rpc(Status(rank=0, version=self.version, last=self._last, caches="reset"))

    def _update_weights(self, raw: object) -> None:
        update = from_rpc(UpdateInfo, raw, "update_weights")
        assert self._plan is not None
        try:
            reader = wire(update.wire).open_reader(update, self._plan, self._kept)
            reader.start(time.monotonic() + update.deadline_s)
            for plan in reader.steps:
                for move in range(len(plan)):
                    into = target_view(plan, move, as_bytes(self.held[plan.targets[int(plan.target[move])].name]))
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
            plan, range(len(plan)), lambda m: target_view(plan, m, as_bytes(self.held[plan.targets[int(plan.target[m])].name]))
        )
        return to_rpc(VerifyReply(rank=0, version=self.version, digests={n: f"{v:016x}" for n, v in held.items()}))

    def close(self) -> None:
        """Let go of the wire."""
        release(self._kept)


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
