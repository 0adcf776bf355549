"""A trainer without Megatron: tensors of any cut, offered over any wire to an engine of this process, in the words of the
product.

It lets tests choose what no real trainer does (cuts, formats, missing partners) and lets benchmarks make shards of any size.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_refit_ext.client import EngineClient, raise_problems
from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, Offer, TensorSpec, pack_offer
from vllm_refit_ext.core.messages import PrepareReply, UpdateInfo, UpdateReport
from vllm_refit_ext.core.placement import Buffer, Placement, Placements, concatenate
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import unpack_placements
from vllm_refit_ext.sender.calls import Calls
from vllm_refit_ext.wires import BUCKET_BYTES, Sender, wire
from vllm_refit_ext.wires.boxes import MODULUS, Memory, as_bytes, sum_by_tensor
from vllm_refit_ext.wires.coded import ScaleMoves, sent_content

Cut = tuple[int, int]
"""(dimension, pieces) by which a tensor is cut over buffers of its own."""


class LooseSender:
    """One process that stands for all trainer ranks: rank 0 holds every buffer. `seconds`: of the last refit, by phase.

    `tensors`: HF name -> tensor, contiguous. `specs`: entries that are not plain. `cuts`: HF name -> how it is cut.
    """

    def __init__(
        self,
        engine: EngineClient,
        tensors: Mapping[str, torch.Tensor],
        *,
        specs: Mapping[str, TensorSpec] | None = None,
        cuts: Mapping[str, Cut] | None = None,
        wire_name: str = "shm",
        resident: bool = False,
        deadline_s: float = 120.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.engine, self.wire_name, self.resident, self.deadline_s = engine, wire_name, resident, deadline_s
        self.bucket_bytes = bucket_bytes
        self.manifest = Manifest(
            {
                n: (specs or {}).get(n) or TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."))
                for n, t in tensors.items()
            }
        )
        self.buffers: list[torch.Tensor] = []
        rows: list[Placement] = []
        names: list[Buffer] = []
        for name, tensor in tensors.items():
            for lo, piece in _pieces(tensor, (cuts or {}).get(name)):
                strides = tuple(s * piece.element_size() for s in row_strides(piece.shape))
                hi = tuple(a + n for a, n in zip(lo, piece.shape, strict=True))
                rows.append(Placement(name, len(names), lo, hi, 0, strides))
                names.append(Buffer(f"{name}@{lo}", 0, str(piece.dtype).removeprefix("torch."), tuple(piece.shape)))
                self.buffers.append(piece)
        self.sources = Placements.from_rows(names, rows, list(self.manifest.tensors))
        self.seconds: dict[str, float] = {}
        self.plan: Plan | None = None
        self.replies: list[PrepareReply] = []
        self._sender: Any = None

    def offer(self, specs: Mapping[str, TensorSpec], sources: Placements, buffers: Sequence[torch.Tensor]) -> None:
        """Offer shards that were described elsewhere instead."""
        self.manifest, self.sources, self.buffers = Manifest(dict(specs)), sources, list(buffers)

    def prepare(self, fp8_config: dict[str, Any] | None = None) -> list[PrepareReply]:
        """Plan with the engine and open the wire. Returns the replies; raises the engine's problems."""
        self.replies = self.engine.prepare(pack_offer(Offer(self.manifest, self.sources)), fp8_config)
        raise_problems(self.replies)
        targets = [unpack_placements(r.targets) for r in self.replies if r.targets is not None]
        self.plan = build_plan(self.manifest, self.sources, concatenate(targets))
        for reply in self.replies:
            assert reply.digest == self.plan.digest(reply.rank)
        chosen = wire(self.wire_name)
        self._sender = chosen.open_sender(
            0, chosen.send_tables(self.plan, Hosts.single(1, len(self.replies)), self.bucket_bytes)[0], self.buffers
        )
        self._sender.resident = self.resident
        return self.replies

    def refit(self, version: str, **more: Any) -> list[UpdateReport]:
        """Hand over what the buffers hold now."""
        start = time.perf_counter()
        part = self._sender.begin(self.buffers)
        self.seconds = {"publish": time.perf_counter() - start}
        field = {self.wire_name: wire(self.wire_name).info([part]), **more}
        digests = {str(r.rank): r.digest for r in self.replies}
        update = UpdateInfo(
            wire=self.wire_name,  # type: ignore[arg-type]
            version=version,
            session=secrets.token_hex(8),
            digests=digests,
            deadline_s=self.deadline_s,
            hash_reloaded=True,
            **field,
        )
        sender: Sender = self._sender
        if sender.sends:
            deadline = time.monotonic() + self.deadline_s
            calls = Calls(
                [self.engine], lambda _, engine: engine.update(update), lambda _, e: sender.refuse(update.session, e, deadline)
            )
            failed = None
            try:
                sender.transfer(update.session, getattr(update, self.wire_name), deadline)
            except RefitError as error:
                failed = error
            return calls.results(self.deadline_s, "they serve it", failed)[0]
        try:
            return self.engine.update(update)
        except RefitError:
            sender.forget()
            raise
        finally:
            sender.rest()

    def digests(self) -> dict[str, dict[str, str]]:
        """What each engine rank must hold, by rank as text and tensor."""
        assert self.plan is not None
        memory = _Memory(self.buffers)
        wanted = {}
        for reply in self.replies:
            share = self.plan.for_target(reply.rank)
            scales = ScaleMoves(share)
            total = sum_by_tensor(share, range(len(share)), lambda m, s=share, c=scales: sent_content(s, m, memory, c))  # type: ignore[misc]
            wanted[str(reply.rank)] = {n: f"{v % MODULUS:016x}" for n, v in total.items()}
        return wanted

    def verify(self) -> int:
        """Compare with the engine. Returns tensors compared."""
        wanted = self.digests()
        self.engine.verify(wanted)
        return sum(map(len, wanted.values()))

    def close(self) -> None:
        """Give back the wire."""
        if self._sender is not None:
            self._sender.close()


def _pieces(tensor: torch.Tensor, cut: Cut | None) -> Sequence[tuple[tuple[int, ...], torch.Tensor]]:
    if cut is None:
        return [((0,) * tensor.ndim, tensor)]
    dim, count = cut
    found, start = [], 0
    for piece in tensor.tensor_split(count, dim):
        lo = tuple(start if d == dim else 0 for d in range(tensor.ndim))
        found.append((lo, piece.contiguous()))
        start += piece.shape[dim]
    return found


class _Memory(Memory):
    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers

    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of a buffer."""
        return as_bytes(self._buffers[buffer])
