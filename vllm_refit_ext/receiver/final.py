"""What a refit leaves on an engine rank, as bytes: regions of memory that are equal on every rank of equal layout.

Whoever has them can hand them on as they lie: nothing is cast, quantised or shuffled a second time. What is computed from written
parameters (`receiver.derived`) is not among them; a commit makes it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.coded import SCALE_OF
from vllm_refit_ext.core.errors import SessionError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec, whole_tensors
from vllm_refit_ext.core.pieces import cut, identity, part
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.protocol import PROTOCOL
from vllm_refit_ext.receiver.kernel_writer import KernelWriter
from vllm_refit_ext.receiver.prepared import Prepared
from vllm_refit_ext.receiver.stored_digests import StoredDigests
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires.boxes import as_bytes, target_view, wait_for


class Final:
    """The final bytes of one engine rank, in pieces.

    tensors: the regions, int32 or uint8 [n], in an order that ranks of equal layout share. piece: int64, of each region. layout:
    digest of what lies where. pieces: how many there are. plan: every region onto itself.
    """

    def __init__(self, prepared: Prepared) -> None:
        """Raises SessionError, with the reason, for a rank whose bytes can't be handed on."""
        targets = prepared.targets
        if targets.reload:
            name, reason = next(iter(targets.reload.items()))
            raise SessionError(
                "the engine's own reload makes some of its bytes, which are not known to be all in reach",
                where=f"{len(targets.reload)} tensor(s), first {name!r}",
                got=reason,
                do="take from the trainer",
            )
        self._prepared, self._device = prepared, prepared.view.device
        owners = list(dict.fromkeys(b.name.partition(SCALE_OF)[0] for b in targets.placements.buffers))
        groups: list[list[torch.Tensor]] = []
        seen: set[tuple[int, int]] = set()
        for name in owners:
            stored = targets.stored.get(name)
            live = [targets.params[name]] if stored is None else [stored.values, *stored.scales]
            fresh = [t for t in map(region, live) if t.numel() and (t.data_ptr(), t.nbytes) not in seen]
            seen |= {(t.data_ptr(), t.nbytes) for t in fresh}
            groups.append(fresh)
        spans = sorted(seen)
        if any(a + n > b for (a, n), (b, _) in zip(spans, spans[1:], strict=False)):
            raise SessionError("two parameters share a part of their memory", where="engine", do="take from the trainer")
        of = cut([sum(t.nbytes for t in group) for group in groups])
        self.tensors = [t for group in groups for t in group]
        self.piece = np.array([p for p, group in zip(of.tolist(), groups, strict=True) for _ in group], np.int64)
        self.pieces = int(of.max(initial=-1)) + 1
        self._of = dict(zip(owners, of.tolist(), strict=True))
        self.nbytes = sum(t.nbytes for t in self.tensors)
        kinds = [str(t.dtype).removeprefix("torch.") for t in self.tensors]
        names = [str(i) for i in range(len(kinds))]
        specs = {n: TensorSpec((t.numel(),), kind) for n, t, kind in zip(names, self.tensors, kinds, strict=True)}
        self._named = dict(zip(names, self.tensors, strict=True))
        self.plan = identity(Manifest(specs), whole_tensors(Manifest(specs)))
        self.layout = self._digest()
        self._trainer: dict[int, Plan] = {}
        self._peers: dict[int, tuple[int, list[Plan]]] = {}
        self._digests: dict[int, StoredDigests] = {}

    def _digest(self) -> str:
        table, kept = self._prepared.targets.placements, sorted(self._prepared.targets.kept)
        state = hashlib.sha256(
            msgspec.msgpack.encode([PROTOCOL, self._prepared.view.name, str(self._device.type), table.names, kept])
        )
        buffers = [[b.name, b.dtype, b.shape, b.layout] for b in table.buffers]
        state.update(msgspec.msgpack.encode([buffers, [[str(t.dtype), t.numel()] for t in self.tensors], self.piece.tolist()]))
        for column in (table.tensor, table.buffer, table.lo, table.hi, table.offset, table.strides):
            state.update(np.ascontiguousarray(column, "<i8").tobytes())
        return state.hexdigest()

    def of_piece(self, piece: int) -> list[int]:
        """Numbers of a piece's regions."""
        found: list[int] = np.flatnonzero(self.piece == piece).tolist()
        return found

    def from_trainer(self, piece: int) -> Plan:
        """The moves that fill a piece from what the trainer holds."""
        if piece not in self._trainer:
            plan = self._prepared.plan
            mine = plan.into(lambda buffer: self._of[buffer.name.partition(SCALE_OF)[0]] == piece)
            self._trainer[piece] = plan.select(mine)
        return self._trainer[piece]

    def from_peers(self, piece: int, count: int) -> list[Plan]:
        """The moves that copy a piece from `count` ranks that have it, an equal part of each. Their writers stand in the prepared
        state as those of any plan; those for another count go."""
        known = self._peers.get(piece)
        if known is not None and known[0] == count:
            return known[1]
        writers = self._prepared.in_place_of
        for plan in known[1] if known is not None else ():
            writers.pop(plan, None)
        regions = self.of_piece(piece)
        sizes = [self.tensors[i].nbytes for i in regions]
        plans = []
        for number in range(count):
            boxes = [(regions[i], low, high) for i, low, high in part(sizes, number, count)]
            plan = self._boxes(boxes)
            on_gpu = self._device.type == "cuda"
            writers[plan] = KernelWriter(plan, self._named, {}, self._device) if on_gpu else InPlaceWriter(plan, self._named)
            plans.append(plan)
        self._peers[piece] = count, plans
        return plans

    def _boxes(self, boxes: Sequence[tuple[int, int, int]]) -> Plan:
        """Moves of byte ranges of regions onto themselves."""
        plan = self.plan.select(np.array([i for i, _, _ in boxes], np.int64))
        item = np.array([self.tensors[i].element_size() for i, _, _ in boxes], np.int64)
        low, high = (np.array([box[k] for box in boxes], np.int64) for k in (1, 2))
        plan.lo, plan.extent = (low // item)[:, None], ((high - low) // item)[:, None]
        plan.source_offset = plan.target_offset = low
        return plan

    def settle(self, plan: Plan) -> None:
        """Wait for what was just written. Raises LayoutError where numbers that are none were quantised."""
        self._prepared.in_place_writer(plan).finish()
        wait_for(self._device)

    def digest_of(self, piece: int) -> str:
        """Of the bytes that a piece has now."""
        if piece not in self._digests:
            plan = self.plan.select(np.array(self.of_piece(piece), np.int64))
            self._digests[piece] = StoredDigests(plan, self._named, {}, self._device)
        plan = self._digests[piece].plan
        sums = self._digests[piece](lambda move: target_view(plan, move, as_bytes(self.tensors[int(plan.target[move])])))
        return hashlib.blake2b(msgspec.msgpack.encode(sorted(sums.get(0, {}).items())), digest_size=16).hexdigest()


def region(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, [n] of int32 where it has whole words, else of uint8."""
    item, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    span = (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * item if tensor.numel() else 0
    kind = torch.int32 if not span % 4 and not start % 4 and not tensor.untyped_storage().data_ptr() % 4 else torch.uint8
    words = torch.empty(0, dtype=kind, device=tensor.device)
    words.set_(tensor.detach().untyped_storage(), start // kind.itemsize, (span // kind.itemsize,), (1,))
    return words
