"""Tables of moves: built once, bound to addresses, launched every refit.

    table = Table(moves, device="cuda:0")     once: expands, checks and groups the moves, uploads int64 tables
    table.bind(buffers)                       when addresses change: a small upload and one gather on the device
    table.launch()                            every refit: a few kernels on the current stream, whatever the number of moves
    table.nonfinite()                         names of quantised tensors that held NaN or Inf (waits for the stream)

On a CPU, or with `backend="torch"`, the torch reference runs the same moves, bit for bit. The table holds 128 bytes a matrix
and 4 bytes a tile on the device (`table.nbytes`), and nothing else: there is no scratch, because every move is a single pass from
its source to its final place. That is also why moves whose sources overlap what the table writes are refused.
Build tables outside an engine's sleep pool: they live as long as the plan, across sleep and wake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.kernels import torch_moves
from vllm_refit_ext.kernels.memory import Buffer, address_of, extent_of
from vllm_refit_ext.kernels.moves import CopyMove, DigestMove, QuantizeMove, ShuffleMove
from vllm_refit_ext.kernels.pack import Group, Key, Packer, Touched
from vllm_refit_ext.kernels.tuning import WIDE, Tile

Backend = Literal["auto", "triton", "torch"]
AnyMove = CopyMove | QuantizeMove | ShuffleMove | DigestMove


@dataclass
class _Launch:
    """One group on the device. `template` holds offsets, `table` addresses; `slots` [rows, columns] buffer numbers."""

    key: Key
    tile: Tile
    count: int
    template: torch.Tensor
    table: torch.Tensor
    tiles: torch.Tensor
    columns: torch.Tensor
    slots: torch.Tensor
    flags: torch.Tensor
    owner: np.ndarray


class Table:
    """Moves, ready to run on `device`.

    `alignment` gives the least alignment in bytes of a buffer's address where it is not a multiple of 16; `backend` "auto" takes
    Triton on a GPU and the torch reference elsewhere; `tiles` overrides `tuning.TILES` by kernel name. `digests` [max out + 1]
    int64 receives the sums of DigestMoves.

    Raises LayoutError for moves that no kernel takes (the moves themselves check their shapes and dtypes).
    """

    def __init__(
        self,
        moves: Sequence[AnyMove],
        device: torch.device | str,
        *,
        alignment: Mapping[int, int] | None = None,
        backend: Backend = "auto",
        tiles: Mapping[str, tuple[Tile, ...]] | None = None,
    ) -> None:
        self.moves = list(moves)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes the current one, with its index
        self.backend = backend if backend != "auto" else ("triton" if self.device.type == "cuda" else "torch")
        self.alignment = dict(alignment or {})
        packer = Packer(self.alignment, tiles or {})
        packer.pack(self.moves)
        self._touched = _Touched(packer.touched)
        outs = [move.out for move in self.moves if isinstance(move, DigestMove)]
        self.digests = torch.zeros(max(outs, default=-1) + 1, dtype=torch.int64, device=self.device)
        self._buffers: list[Buffer] = []
        self._addresses: list[int] | None = None
        self._bad: set[int] = set()
        self._launches = [self._upload(group) for group in packer.groups.values()] if self.backend == "triton" else []

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that a launch runs, in order."""
        return [str(dict(launch.key)["kernel"]) for launch in self._launches]

    @property
    def nbytes(self) -> int:
        """Bytes that the table holds on the device."""
        parts = [t for x in self._launches for t in (x.template, x.table, x.tiles, x.columns, x.slots, x.flags)]
        return sum(t.numel() * t.element_size() for t in [*parts, self.digests])

    def bind(self, buffers: Sequence[Buffer]) -> None:
        """Give the buffers' memory: tensors (the memory from their first element to the end of their storage) or addresses.

        The torch reference needs tensors, and holds them until the next bind or `release`. Does nothing where no address has
        changed.

        Raises LayoutError for a missing buffer, one that is too small or not aligned as declared, or one on another device, and
        where a range that is read overlaps a range that is written.
        """
        addresses = [address_of(b) for b in buffers]
        # Kernels run on addresses: holding the tensors would keep every upload of a writer alive.
        self._buffers = list(buffers) if self.backend == "torch" else []
        if addresses == self._addresses:
            return
        # The torch reference takes any alignment of whole elements; the kernels were chosen for the declared one.
        wide = WIDE if self.backend == "triton" else 1
        self._touched.check(self.moves, buffers, addresses, self.alignment, self.device, wide)
        bases = torch.tensor(addresses or [0], dtype=torch.int64).to(self.device)
        for launch in self._launches:
            launch.table[:, launch.columns] = launch.template[:, launch.columns] + bases[launch.slots]
        self._addresses = addresses

    def release(self) -> None:
        """Let go of the buffers' tensors; `bind` is to be called before the next launch, which costs nothing where no address has
        changed. Kernels that run must have ended."""
        self._buffers = []

    def launch(self) -> None:
        """Run all moves on the current stream. Digests start at zero each time. Raises LayoutError when nothing is bound."""
        if self._addresses is None:
            raise LayoutError("the table has no addresses", do="call bind first")
        if len(self.digests):
            self.digests.zero_()
        if self.backend == "torch":
            self._bad = torch_moves.run(self.moves, self._buffers, self.digests)
            return
        for x in self._launches:
            if len(x.flags):
                x.flags.zero_()
        self._start(run=True)

    def compile(self) -> None:
        """Compile the kernels of a launch, for which the first launch would wait. Nothing need be bound."""
        self._start(run=False)

    def _start(self, run: bool) -> None:
        if self._launches:
            from vllm_refit_ext.kernels.launch import launch
        for x in self._launches:
            out = self.digests if "digest" in str(dict(x.key)["kernel"]) else x.flags
            launch(x.key, x.tile, x.count, x.table, x.tiles, out, run)

    def nonfinite(self) -> list[int]:
        """Numbers of the QuantizeMoves whose source held NaN or Inf in the last launch, ascending. Waits for the stream."""
        if self.backend == "torch":
            return sorted(self._bad)
        flagged = [x for x in self._launches if len(x.flags)]
        return sorted({int(i) for x in flagged for i in x.owner[x.flags.cpu().numpy() != 0]})

    def digest_values(self) -> list[int]:
        """The digests of the last launch as integers in [0, 2^64). Waits for the stream."""
        return [value % (1 << 64) for value in self.digests.tolist()]

    def _upload(self, group: Group) -> _Launch:
        template = torch.tensor(group.rows, dtype=torch.int64).to(self.device)
        columns = sorted(group.slots)
        flags = len(group.rows) if str(dict(group.key)["kernel"]).startswith("quantize") else 0
        return _Launch(
            key=group.key,
            tile=group.tile,
            count=group.count,
            template=template,
            table=template.clone(),
            tiles=torch.from_numpy(group.tile_owner()).to(self.device),
            columns=torch.tensor(columns, dtype=torch.int64).to(self.device),
            slots=torch.tensor([group.slots[c] for c in columns], dtype=torch.int64).T.contiguous().to(self.device),
            flags=torch.zeros(flags, dtype=torch.int32, device=self.device),
            owner=np.array(group.owner),
        )


def alignment_of(buffers: Sequence[Buffer]) -> dict[int, int]:
    """Least alignment in bytes of each buffer that does not lie on whole `WIDE` bytes, as `Table` takes it."""
    return {i: min(WIDE, at & -at) for i, at in enumerate(map(address_of, buffers)) if at % WIDE}


def bound(moves: Sequence[AnyMove], device: torch.device, buffers: Sequence[Buffer], table: Table | None = None) -> Table:
    """`table`, or one of `moves` where there is none yet or memory is aligned worse than it was built for, bound to `buffers`."""
    needed = alignment_of(buffers)
    if table is None or any(align < table.alignment.get(i, WIDE) for i, align in needed.items()):
        table = Table(moves, device, alignment=needed)
    table.bind(buffers)
    return table


class _Touched:
    """The byte ranges of a table, checked against memory when it is bound."""

    def __init__(self, touched: Touched) -> None:
        self.buffer = np.array(touched.buffer, dtype=np.int64)
        self.begin = np.array(touched.begin, dtype=np.int64)
        self.end = np.array(touched.end, dtype=np.int64)
        self.writes = np.array(touched.writes, dtype=bool)
        self.owner = np.array(touched.owner, dtype=np.int64)
        self.used, which = np.unique(self.buffer, return_inverse=True)
        reach = np.zeros(len(self.used), np.int64)
        np.maximum.at(reach, which, self.end)
        self.reach: list[int] = reach.tolist()
        """How far the table goes into each of `used`, bytes."""

    def check(
        self,
        moves: Sequence[object],
        buffers: Sequence[Buffer],
        addresses: Sequence[int],
        alignment: Mapping[int, int],
        device: torch.device,
        wide: int,
    ) -> None:
        """Raise LayoutError for memory that the table can't run on."""
        if not len(self.buffer):
            return
        if self.buffer.max() >= len(buffers):
            raise LayoutError("a buffer is missing", got=f"{len(buffers)} buffers", wanted=f"{self.buffer.max() + 1}")
        for number, reach in zip(self.used.tolist(), self.reach, strict=True):
            buffer, multiple = buffers[number], min(alignment.get(number, wide), wide)
            if addresses[number] % multiple:
                raise LayoutError(
                    "an address is not aligned as declared",
                    where=f"buffer {number}",
                    got=f"address {addresses[number]:#x}",
                    wanted=f"a multiple of {multiple}",
                    do="declare its alignment when the table is built",
                )
            if isinstance(buffer, torch.Tensor) and buffer.device != device:
                raise LayoutError("a buffer is on another device", where=f"buffer {number}", got=buffer.device, wanted=device)
            size = extent_of(buffer)
            if size is not None and reach > size:
                raise LayoutError(
                    "a buffer is too small", where=f"buffer {number}", got=f"{size} bytes", wanted=f"at least {reach}"
                )
        self._check_overlap(moves, np.array(addresses, dtype=np.uint64).astype(np.int64))

    def _check_overlap(self, moves: Sequence[object], bases: np.ndarray) -> None:
        begin, end = self.begin + bases[self.buffer], self.end + bases[self.buffer]
        reads, writes = ~self.writes, self.writes
        if not reads.any() or not writes.any():
            return
        order = np.argsort(begin[writes])
        starts = begin[writes][order]
        # The furthest end among the writes that start before a read ends says whether one of them reaches into it.
        reach = np.maximum.accumulate(end[writes][order])
        before = np.searchsorted(starts, end[reads], side="left") - 1
        hit = (before >= 0) & (reach[np.maximum(before, 0)] > begin[reads])
        if hit.any():
            move = moves[int(self.owner[reads][hit][0])]
            raise LayoutError(
                "a source overlaps memory that the table writes",
                where=getattr(move, "name", ""),
                got="in-place moves",
                wanted="separate memory: every move is a single pass",
                do="stage the source elsewhere",
            )


def check_finite(table: Table) -> None:
    """Raise LayoutError that names the tensors in which the table's last launch met NaN or Inf. Waits for the stream."""
    bad = table.nonfinite()
    if bad:
        names = sorted({table.moves[i].name or f"move {i}" for i in bad})
        raise LayoutError(
            "NaN or Inf in a tensor to quantise", where=", ".join(names), got=f"{len(names)} tensor(s)", wanted="finite values"
        )
