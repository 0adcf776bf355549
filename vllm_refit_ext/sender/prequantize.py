"""Quantising in the trainer: a rank's shards as E4M3 codes and scales, in place of the tensors that engines hold as MXFP8.

Half the bytes are then sent, and a trainer with many engine ranks quantises once instead of each of them. It costs memory for
codes and scales, 33/64 of the BF16 shards, which stays allocated between refits so that its addresses do, unless it is released.
What bounds it is memory: two bytes are read and 33/32 written for each element, in one pass. The rule is always
"ceil" (`core.mxfp8`), so the bits are those of a checkpoint quantised by ModelOpt or TransformerEngine, not those of an engine
that quantises by another rule while loading.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from vllm_refit_ext.core.coded import SENT_SCALE
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.layouts import Stored
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.mxfp8 import BLOCK
from vllm_refit_ext.core.placement import Buffer, Placements, concatenate
from vllm_refit_ext.kernels.moves import At, QuantizeMove, Stack, strided
from vllm_refit_ext.kernels.table import Table, bound, check_finite

CODES = "float8_e4m3fn"
QUANTISABLE = ("bfloat16", "float32")
ROOM_BYTES, ROOM_ALIGN = 1 << 30, 256
"""Most bytes of an allocation that holds several codes or scales, and what each begins at a multiple of."""


class Prequantised:
    """A rank's offer with `names` quantised.

    specs: the manifest's entries, those of `names` as `mxfp8` with their partners. placements, tensors: what is sent, the
    buffers in the order of the tensors: all of the given ones as `fill` last saw them, then codes and scales of each that holds
    one of `names`.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], placements: Placements, tensors: Sequence[torch.Tensor], names: Collection[str]
    ) -> None:
        """specs, placements, tensors: of this rank, unquantised. names: HF names to quantise, on all ranks the same; this one
        may hold a part.

        Raises ConfigError that names every tensor that can't be quantised: stored as FP8 already, or cut inside a block of 32.
        """
        chosen = set(names) & set(specs)
        problems = [p for n in sorted(chosen) for p in _problems_of(n, specs[n])]
        mine = np.array([n in chosen for n in placements.names], bool)
        coded = mine[placements.tensor] if len(placements) else np.zeros(0, bool)
        problems += _cut_problems(placements, coded)
        if problems:
            raise ConfigError.of(problems, f"{len(problems)} tensor(s) can't be quantised in the trainer")
        self.specs = {}
        for name, spec in specs.items():
            if name not in chosen:
                self.specs[name] = spec
                continue
            scales = (*spec.shape[:-1], spec.shape[-1] // BLOCK)
            self.specs[name] = TensorSpec(spec.shape, CODES, "mxfp8", name + SENT_SCALE)
            self.specs[name + SENT_SCALE] = TensorSpec(scales, "uint8")
        used = np.unique(placements.buffer[coded]).tolist()
        self._used = used
        self._rooms: list[torch.Tensor] = []
        pairs = self._take_room([tensors[i] for i in used])
        self._codes, self._scales = [codes for codes, _ in pairs], [scales for _, scales in pairs]
        self.placements = concatenate([placements.select(~coded), *_pairs(placements, coded, used)])
        self._table: Table | None = None
        self._names = [
            ", ".join(sorted({placements.names[t] for t in placements.tensor[placements.buffer == i]})[:2]) for i in used
        ]
        self._made = [t for codes, scales in pairs for t in (codes.view(torch.float8_e4m3fn), scales)]
        self._seen: Sequence[int] | None = None
        self.tensors = [*tensors, *self._made]
        self.addresses: list[int] = []
        """Of `tensors`, as the last `fill` found them; the same list while nothing has moved."""

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and the table that quantises into them."""
        table = self._table.nbytes if self._table is not None else 0
        return table + sum(room.nbytes for room in self._rooms)

    def release(self) -> int:
        """Give the memory of codes and scales back until the next `fill`, which takes it anew, elsewhere. No engine may map it
        then. Returns the bytes."""
        self._seen = None
        held = sum(room.untyped_storage().nbytes() for room in self._rooms)
        for room in self._rooms:
            room.untyped_storage().resize_(0)
        return held

    def _take_room(self, sources: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Memory for the codes and the scales of `sources`, in few allocations: each is a handle that engines open."""
        sizes = [n for t in sources for n in (t.numel(), t.numel() // BLOCK)]
        places, filled = [], list[int]()
        for size in sizes:
            if not filled or filled[-1] + size > ROOM_BYTES:
                filled.append(0)
            places.append((len(filled) - 1, filled[-1]))
            filled[-1] += -(-size // ROOM_ALIGN) * ROOM_ALIGN
        device = sources[0].device if sources else torch.device("cpu")
        self._rooms = [torch.empty(size, dtype=torch.uint8, device=device) for size in filled]
        views = [self._rooms[room][at : at + size] for (room, at), size in zip(places, sizes, strict=True)]
        return [
            (views[2 * i].view(t.shape), views[2 * i + 1].view(*t.shape[:-1], t.shape[-1] // BLOCK))
            for i, t in enumerate(sources)
        ]

    def bind(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Make ready to quantise from these addresses of `tensors`. Nothing is done while they are as before."""
        if addresses is not self._seen and addresses != self._seen:
            for room in self._rooms:
                if room.untyped_storage().nbytes() != room.numel():  # `release` gave it back
                    room.untyped_storage().resize_(room.numel())
            self._make_table(tensors)
            self.tensors = [*tensors, *self._made]
            self.addresses = [*addresses, *(t.data_ptr() for t in self._made)]
        self._seen = addresses

    def fill(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Quantise what `tensors` hold now, in one launch a dtype. addresses: theirs, where the caller has looked. Returns
        `self.tensors`.

        Nothing is done for each tensor while none has moved. Raises LayoutError that names tensors with NaN or Inf. Waits for the
        device.
        """
        self.bind(tensors, addresses if addresses is not None else [t.data_ptr() for t in tensors])
        if self._table is not None:
            self._table.launch()
            check_finite(self._table)
        return self.tensors

    def _make_table(self, tensors: Sequence[torch.Tensor]) -> None:
        sources = [tensors[i].detach() for i in self._used]
        if not sources:
            return
        buffers = [t for triple in zip(sources, self._codes, self._scales, strict=True) for t in triple]
        moves = [
            QuantizeMove(
                strided(_matrix(s), 3 * i), Stack("plain", At(3 * i + 1), At(3 * i + 2), _stored(s)), (0, 0), "ceil", name
            )
            for i, (s, name) in enumerate(zip(sources, self._names, strict=True))
        ]
        self._table = bound(moves, sources[0].device, buffers, self._table)
        self._table.compile()


def _problems_of(name: str, spec: TensorSpec) -> list[Problem]:
    where = f"tensor {name!r}"
    if spec.dtype not in QUANTISABLE or spec.format != "plain":
        do = "Keep the trainer's parameters in BF16, or leave prequantisation off."
        return [
            Problem(
                "the trainer does not store it as numbers that can be quantised", where, spec.dtype, " or ".join(QUANTISABLE), do
            )
        ]
    if len(spec.shape) < 2 or spec.shape[-1] % BLOCK:
        return [Problem("its last dimension does not split into blocks", where, str(list(spec.shape)), f"a multiple of {BLOCK}")]
    return []


def _cut_problems(placements: Placements, coded: np.ndarray) -> list[Problem]:
    """Names whose boxes here do not begin and end on blocks, or whose rows do not lie along the buffer's."""
    found: dict[str, Problem] = {}
    for row in np.flatnonzero(coded):
        buffer = placements.buffers[placements.buffer[row]]
        item, name = ITEMSIZE[buffer.dtype], placements.names[placements.tensor[row]]
        steps = placements.strides[row] // item
        depth = int(np.flatnonzero(placements.hi[row] - placements.lo[row] > 1).max(initial=0)) + 1
        last = depth - 1
        lo, hi = int(placements.lo[row, last]), int(placements.hi[row, last])
        whole = steps[last] == 1 and lo % BLOCK == 0 and (hi - lo) % BLOCK == 0 and placements.offset[row] // item % BLOCK == 0
        if len(buffer.shape) < 2 or buffer.shape[-1] % BLOCK or not whole or (steps[:last] % BLOCK).any():
            got = f"columns {lo} to {hi} of buffer {buffer.name!r} {list(buffer.shape)} on trainer rank {buffer.rank}"
            do = "Choose a tensor-parallel size that cuts K at multiples of 32, or leave prequantisation off."
            found[name] = Problem(
                "the trainer's cut goes through a block along K", f"tensor {name!r}", got, f"multiples of {BLOCK}", do
            )
    return list(found.values())


def _pairs(placements: Placements, coded: np.ndarray, used: list[int]) -> list[Placements]:
    """The coded rows in buffers of codes, and again in buffers of scales. The first table also says where these buffers stand."""
    rows = placements.select(coded)
    place = {b: i for i, b in enumerate(used)}
    number = np.array([place[b] for b in rows.buffer.tolist()], np.int64)
    item = np.array([ITEMSIZE[placements.buffers[b].dtype] for b in rows.buffer.tolist()], np.int64)
    buffers = []
    for i in used:
        b = placements.buffers[i]
        buffers.append(Buffer(f"{b.name} codes", b.rank, CODES, b.shape))
        buffers.append(Buffer(f"{b.name} scales", b.rank, "uint8", (*b.shape[:-1], b.shape[-1] // BLOCK)))
    offset, steps = rows.offset // item, rows.strides // item[:, None]
    # Only what is coded has scales: an engine refuses a table with a name that the manifest lacks.
    named, tensor = np.unique(rows.tensor, return_inverse=True)
    codes = Placements([rows.names[t] for t in named], buffers, tensor, 2 * number, rows.lo, rows.hi, offset, steps)
    names = [n + SENT_SCALE for n in codes.names]
    lo, hi, blocks = rows.lo.copy(), rows.hi.copy(), steps // BLOCK
    for r in range(len(rows)):
        last = int(np.flatnonzero(steps[r] == 1).max())
        lo[r, last], hi[r, last], blocks[r, last] = lo[r, last] // BLOCK, hi[r, last] // BLOCK, 1
    scales = Placements(names, buffers, tensor, 2 * number + 1, lo, hi, offset // BLOCK, blocks)
    merged = concatenate([codes, scales])
    # Both tables name the same buffers; they are numbered once.
    merged = Placements(
        merged.names,
        buffers,
        merged.tensor,
        merged.buffer % max(1, len(buffers)),
        merged.lo,
        merged.hi,
        merged.offset,
        merged.strides,
    )
    return [merged]


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _stored(tensor: torch.Tensor) -> Stored:
    return Stored(tensor.numel() // tensor.shape[-1], tensor.shape[-1])
