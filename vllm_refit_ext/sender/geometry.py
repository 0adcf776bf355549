"""Which elements of a tensor a rank holds, from its mesh coordinate and placements alone: no process group, no torch.

torch cuts a dimension as `torch.chunk` does, so the last shards may be smaller or empty. `Shard` placements apply from the first
mesh dimension to the last. `_StridedShard` is how FSDP says that it cut shards which tensor or expert parallelism, on later mesh
dimensions, had cut before: it applies after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from vllm_refit_ext.core.errors import ConfigError

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """What one mesh dimension does to a tensor: dimension `dim` is chunked, in each of its first `split` chunks apart."""

    dim: int
    split: int = 1


class Shard(NamedTuple):
    """The box lo..hi of the whole tensor; its first element has index `at` in the local tensor."""

    lo: Shape
    hi: Shape
    at: Shape


class Run(NamedTuple):
    """Elements lo..hi of one dimension."""

    lo: int
    hi: int


def cuts_of(placements: Iterable[Any], dims: int, where: str = "") -> tuple[Cut | None, ...]:
    """DTensor placements, one a mesh dimension, as cuts; None where the mesh dimension holds copies.

    dims: dimensions of the tensor. Raises ConfigError for `Partial`, whose values are not the tensor's, and for any other class.
    """
    cuts: list[Cut | None] = []
    for placement in placements:
        # By name: whether `_StridedShard` is a `Shard` differs between versions of torch, and is answered wrongly by some.
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard") and -dims <= placement.dim < dims:
            cuts.append(Cut(placement.dim % dims, int(placement.split_factor) if kind == "_StridedShard" else 1))
        elif kind == "Replicate":
            cuts.append(None)
        else:
            raise ConfigError(
                f"its placement {placement} does not say which elements a rank holds",
                where=where,
                wanted="Shard, _StridedShard or Replicate of one of its dimensions",
                do="redistribute it before the sender is made; a partial sum must be reduced first",
            )
    return tuple(cuts)


def shards(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Iterable[Any],
    *,
    local: Sequence[int] | None = None,
    where: str = "",
) -> list[Shard]:
    """The boxes of a tensor of `shape` that the rank at `coordinate` of a mesh of shape `mesh` holds.

    coordinate: None for a rank outside the mesh, which holds nothing. placements: DTensor's, or `Cut` and None. local: the
    shape that the rank's tensor has, where it is known. There is one box, except for a `_StridedShard` without its partners on
    later mesh dimensions.
    Raises ConfigError for placements that say nothing about elements, and where `local` is another shape than they make.
    """
    if coordinate is None:
        return []
    placements = list(placements)
    plain = all(p is None or isinstance(p, Cut) for p in placements)
    cuts = tuple(placements) if plain else cuts_of(placements, len(shape), where)
    nested, in_order = _runs(shape, mesh, coordinate, cuts, nested=True), _runs(shape, mesh, coordinate, cuts, nested=False)
    empty = local is not None and not prod(local)
    if empty and not prod(_shape_of(nested)) * prod(_shape_of(in_order)):
        return []  # FSDP gives an empty shard other sizes than its placements make
    fitting = [r for r in (nested, in_order) if local is None or _shape_of(r) == tuple(local)]
    if not fitting:
        got, wanted = (
            f"{tuple(local or ())}",
            f"{_shape_of(nested)} of {tuple(shape)} at {tuple(coordinate)} of mesh {tuple(mesh)}",
        )
        raise ConfigError("its local shape is not what its placements make", where=where, got=got, wanted=wanted)
    if local is not None and len(fitting) == 2 and fitting[0] != fitting[1]:
        raise ConfigError(
            "an uneven cut whose placements can be read in two ways",
            where=where,
            got=", ".join(map(str, placements)),
            do="choose a size that its mesh dimensions divide",
        )
    return _boxes(fitting[0])


def _runs(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut | None], *, nested: bool
) -> list[list[Run]]:
    """For each dimension the runs of elements that the rank holds, in the order in which it holds them.

    nested: strided cuts that name exactly the shards of later mesh dimensions apply after these, as FSDP does. Otherwise all
    apply in mesh order, as `distribute_tensor` does. The two differ only where sizes are uneven.
    """
    runs = [[Run(0, n)] if n else [] for n in shape]
    for dim in range(len(shape)):
        mine = [(m, cut) for m, cut in enumerate(cuts) if cut is not None and cut.dim == dim]
        if nested:
            late = [m for m, cut in mine if cut.split > 1 and cut.split == prod(mesh[n] for n, _ in mine if n > m)]
            mine = [x for x in mine if x[0] not in late] + [x for x in reversed(mine) if x[0] in late]
            mine = [(m, Cut(dim) if m in late else cut) for m, cut in mine]
        for m, cut in mine:
            pieces = [_chunk(runs[dim], cut.split, i) for i in range(cut.split)]
            runs[dim] = _merged(run for piece in pieces for run in _chunk(piece, mesh[m], coordinate[m]))
    return runs


def _chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """Chunk `index` of `count` of the elements of `runs`, as torch.chunk cuts."""
    total = sum(hi - lo for lo, hi in runs)
    size = -(-total // count)
    begin, end, at = size * index, min(size * (index + 1), total), 0
    found = []
    for lo, hi in runs:
        first, last = max(begin, at), min(end, at + hi - lo)
        if first < last:
            found.append(Run(lo + first - at, lo + last - at))
        at += hi - lo
    return found


def _merged(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for run in runs:
        if found and found[-1].hi == run.lo:
            run = Run(found.pop().lo, run.hi)
        found.append(run)
    return found


def _shape_of(runs: Sequence[Sequence[Run]]) -> Shape:
    return tuple(sum(hi - lo for lo, hi in dim) for dim in runs)


def _boxes(runs: Sequence[Sequence[Run]]) -> list[Shard]:
    placed: list[list[tuple[Run, int]]] = []
    for dim in runs:
        at, row = 0, []
        for run in dim:
            row.append((run, at))
            at += run.hi - run.lo
        placed.append(row)
    return [
        Shard(tuple(r.lo for r, _ in combination), tuple(r.hi for r, _ in combination), tuple(at for _, at in combination))
        for combination in product(*placed)
    ]
