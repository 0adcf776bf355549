"""One rank's part of one Megatron tensor, and the runs of rows that most mappings are made of.

Everything is in elements and rows of the local tensor; `source.py` turns elements into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm_refit_ext.core.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The box lo..hi of `tensor` (of `shape`) lies in the local tensor at `offset`, with `strides` along the box's dimensions."""

    tensor: str
    shape: Shape
    lo: Shape
    hi: Shape
    offset: int
    strides: Shape


@dataclass(frozen=True)
class Part:
    """One rank's part of one Megatron tensor, and what decides its cut.

    `mapping` is the bridge's, with its names resolved; `module` owns the tensor and `config` is that module's; `shape` is local;
    `ranks` and `rank` are of the tensor-parallel group that shares the tensor (for experts the expert-tensor-parallel one).
    `checkpoint_shape(name)` is the shape that the checkpoint has for a name, or None where it doesn't say.
    `vocabulary` is the number of true rows when the rows are a padded vocabulary, else None.
    """

    mapping: Any
    module: Any
    config: Any
    shape: Shape
    ranks: int
    rank: int
    checkpoint_shape: Callable[[str], Shape | None]
    vocabulary: int | None = None

    @property
    def strides(self) -> Shape:
        """Row-major strides of the local tensor."""
        return tuple(prod(self.shape[d + 1 :]) for d in range(len(self.shape)))


Run = tuple[str, int, int, int]
"""(tensor name, its first row, local first row, number of rows)."""


_FIXED_KINDS = {
    "ColumnParallelMapping": "column",
    "RowParallelMapping": "row",
    "ReplicatedMapping": "replicated",
    "DirectMapping": "replicated",
    # Their exports gather along rows without asking the module.
    "GatedMLPMapping": "column",
    "FusedGatedExpertMapping": "column",
}


def shard_axis(part: Part) -> int | None:
    """The dimension along which the ranks of the group hold different parts, or None when each holds the whole tensor.

    For an `AutoMapping` the bridge itself looks at the module, as its export does.
    """
    kind = _FIXED_KINDS.get(class_name(part))
    if kind is None:
        detector: Any = part.mapping if class_name(part) in ("AutoMapping", "FusedExpertMapping") else part.mapping._tp_mapping
        if type(detector).__qualname__ == "ColumnParallelMapping":
            return 0
        try:
            kind = detector._detect_parallelism_type(part.module)
        except ValueError as error:
            what = f"the bridge can't tell how {type(part.module).__name__} is split over ranks"
            raise ConfigError(what, do="Register the module type with the bridge's AutoMapping.") from error
    if kind == "row":
        return 1 if len(part.shape) > 1 else None
    return 0 if kind == "column" else None


def class_name(part: Part) -> str:
    return type(part.mapping).__qualname__


def row_cuts(part: Part, sizes: dict[str, int], runs: Iterator[Run] | Sequence[Run]) -> list[Cut]:
    """Cuts from runs of rows; `sizes` gives each tensor's number of rows. Checks that the runs tile the local rows."""
    tail, row_strides = part.shape[1:], part.strides
    cuts: list[Cut] = []
    covered = 0
    for name, row, local, count in _joined(runs):
        covered += count
        if local + count > part.shape[0] or row + count > sizes[name]:
            break
        zeros = (0,) * len(tail)
        cuts.append(Cut(name, (sizes[name], *tail), (row, *zeros), (row + count, *tail), local * row_strides[0], row_strides))
    if covered != part.shape[0]:
        raise ConfigError(
            f"its rows don't fit what {class_name(part)} makes of the model's numbers",
            got=f"{part.shape[0]} local rows, {part.ranks} rank(s)",
            wanted=", ".join(f"{name} of {rows} rows" for name, rows in sizes.items()),
        )
    return cuts


def _joined(runs: Iterator[Run] | Sequence[Run]) -> Iterator[Run]:
    last: Run | None = None
    for run in runs:
        if last and last[0] == run[0] and last[1] + last[3] == run[1] and last[2] + last[3] == run[2]:
            last = (last[0], last[1], last[2], last[3] + run[3])
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


def window(part: Part, packed: Sequence[tuple[str, int, int]]) -> Iterator[Run]:
    """Runs of this rank's equal part of a packed tensor, whose sections (name, first row, rows) follow each other.

    Sections may be cut anywhere: with fewer KV heads than ranks, a rank holds a part of a query group.
    """
    total = sum(rows for _, _, rows in packed)
    ranks, rank = (part.ranks, part.rank) if shard_axis(part) == 0 else (1, 0)
    if total != part.shape[0] * ranks:
        raise ConfigError(
            f"its rows don't fit what {class_name(part)} makes of the model's numbers",
            got=f"{part.shape[0]} local rows times {ranks} rank(s)",
            wanted=f"{total} rows in all",
        )
    begin = part.shape[0] * rank
    end, at = begin + part.shape[0], 0
    for name, row, rows in packed:
        low, high = max(at, begin), min(at + rows, end)
        if low < high:
            yield name, row + low - at, low - begin, high - low
        at += rows


def section_cuts(part: Part, local: Sequence[tuple[str, int]]) -> list[Cut]:
    """Local sections (name, rows) that follow each other; each is one rank's equal part of a section of its tensor."""
    sizes: dict[str, int] = {}
    runs: list[Run] = []
    at = 0
    for name, rows in local:
        runs.append((name, sizes.get(name, 0) + rows * part.rank, at, rows))
        sizes[name] = sizes.get(name, 0) + rows * part.ranks
        at += rows
    return row_cuts(part, sizes, runs)
