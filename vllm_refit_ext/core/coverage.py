"""Coverage, in both directions: every element that the engine needs is offered, and every element offered is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vllm_refit_ext.core.box import Int, describe, uncovered, volume
from vllm_refit_ext.core.errors import Problem
from vllm_refit_ext.core.manifest import Manifest
from vllm_refit_ext.core.placement import Placements

LISTED = 4
"""Missing boxes of one tensor that a problem names."""


def unoffered(targets: Placements, tensor: Int, row: Int, lo: Int, hi: Int, names: Sequence[str]) -> list[Problem]:
    """Every target row that its overlaps with the sources do not fill.

    tensor: int64 [target rows], index into `names`. row, lo, hi: int64 [n], [n, D], the overlaps. These share no
    element, so equal volume proves coverage.
    """
    wanted = volume(targets.lo, targets.hi)
    got = np.zeros(len(targets), np.int64)
    np.add.at(got, row, volume(lo, hi))
    problems = []
    for i in np.flatnonzero(got != wanted):
        mine = row == i
        holes = uncovered(targets.lo[i].tolist(), targets.hi[i].tolist(), lo[mine], hi[mine])
        where = f"tensor {names[tensor[i]]!r}, engine rank {targets.rank[i]}"
        problems.append(
            Problem("no trainer rank offers a part of it", where, f"{got[i]} elements", f"{wanted[i]}; missing {_listed(holes)}")
        )
    return problems


def unread_parts(manifest: Manifest, targets: Placements, unused: Iterable[str] = ()) -> list[Problem]:
    """A problem for every tensor of which the ranks of one engine read a part, and not all.

    A loader narrows what it is offered to its own sizes without a word, so a trainer of more heads, a wider feed-forward or a
    longer vocabulary shows here only. targets: boxes of all ranks of the engine. unused: names that need not be read.
    """
    index = {name: i for i, name in enumerate(manifest.tensors)}
    specs = list(manifest.tensors.values())
    lookup = np.array([index.get(name, -1) for name in targets.names], np.int64)
    tensor = lookup[targets.tensor] if len(targets) else np.zeros(0, np.int64)
    depth = max([targets.lo.shape[1], *(len(spec.shape) for spec in specs)])
    targets = targets.widened(depth)
    shapes = np.ones((len(specs), depth), np.int64)
    for i, spec in enumerate(specs):
        shapes[i, : len(spec.shape)] = spec.shape
    done = np.zeros(len(specs), bool)
    done[[index[name] for name in unused if name in index]] = True
    whole = (tensor >= 0) & ((targets.lo == 0) & (targets.hi == shapes[tensor])).all(axis=1)
    done[tensor[whole]] = True
    rows = np.flatnonzero((tensor >= 0) & ~done[tensor])
    rows = rows[np.lexsort((*targets.hi[rows].T, *targets.lo[rows].T, tensor[rows]))]
    edges = np.flatnonzero(np.diff(tensor[rows], prepend=-1, append=len(specs)))
    problems, holes_of = [], dict[bytes, list[tuple[tuple[int, int], ...]]]()
    for a, b in zip(edges, edges[1:], strict=False):
        t, mine = int(tensor[rows[a]]), rows[a:b]
        lo, hi = targets.lo[mine], targets.hi[mine]
        key = shapes[t].tobytes() + lo.tobytes() + hi.tobytes()  # the layers of a model are cut alike
        if key not in holes_of:
            holes_of[key] = uncovered([0] * depth, shapes[t].tolist(), lo, hi)
        if holes := [hole[: len(specs[t].shape)] for hole in holes_of[key]]:
            name = list(manifest.tensors)[t]
            problems.append(
                Problem(
                    "no rank of the engine reads a part of what is offered",
                    f"tensor {name!r}",
                    f"shape {list(specs[t].shape)}; nobody reads {_listed(holes)}",
                    "every element read",
                    "compare the trainer's sizes with the engine's config (heads, feed-forward, experts, vocabulary): one of "
                    "them is wrong, or declare the tensor unused",
                )
            )
    return problems


def check_consumed(manifest: Manifest, read: Iterable[str], unused: Iterable[str] = ()) -> list[Problem]:
    """A problem for every tensor of the manifest that no engine rank reads and that is not declared unused."""
    known = set(read) | set(unused)
    return [
        Problem("offered, but no engine rank reads it", f"tensor {name!r}", do="correct the name, or declare it unused")
        for name in manifest.tensors
        if name not in known
    ]


def repeated(sources: Placements, tensor: Int, pairs: Int, names: Sequence[str]) -> list[Problem]:
    """A problem for each tensor of which one rank offers elements from two places. pairs: int64 [n, 2], rows of `sources`."""
    problems: dict[tuple[int, int], Problem] = {}
    for first, second in pairs:
        buffers = [sources.buffers[sources.buffer[row]] for row in (first, second)]
        boxes = [describe(sources.lo[row], sources.hi[row]) for row in (first, second)]
        key = int(tensor[first]), buffers[0].rank
        got = " and ".join(f"{box} in buffer {b.name!r}" for box, b in zip(boxes, buffers, strict=True))
        where = f"tensor {names[key[0]]!r}, trainer rank {key[1]}"
        do = "offer each element once on a rank; equal boxes on other ranks are replicas"
        problems.setdefault(key, Problem("the rank offers the same elements from two places", where, got, "one place", do))
    return list(problems.values())


def _listed(holes: Sequence[Sequence[tuple[int, int]]]) -> str:
    text = ", ".join(describe(*zip(*hole, strict=True)) if hole else "all" for hole in holes[:LISTED])
    return text + (f" and {len(holes) - LISTED} more" if len(holes) > LISTED else "")
