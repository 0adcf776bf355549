"""A plan for people: what goes where, bytes of every rank and edge, which path tensors take and why, and seconds from link
speeds.

The seconds are a floor. Every byte crosses the slowest link of its way once, a GPU's links work at the given speed all the
time, and nothing else takes time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_refit_ext.core.plan import Edge, Plan

if TYPE_CHECKING:
    from rich.table import Table

MXFP8_BYTES = 33 / 32
"""Bytes an element with its share of the scale."""


class Path(msgspec.Struct, frozen=True):
    """Tensors that take the same path for the same reason. nbytes: what travels for them to all engine ranks. example: one
    name.
    """

    path: str
    why: str
    tensors: int
    nbytes: int
    example: str


class Links(msgspec.Struct, frozen=True):
    """Bytes a second of one direction: within a GPU (read plus written), to a GPU of the same host, to another host. None:
    unknown.
    """

    copy: float | None = None
    host: float | None = None
    network: float | None = None


class PlanReport(msgspec.Struct, frozen=True):
    """sent, received: bytes by trainer rank and by engine rank. edges: every pair that exchanges any. seconds: the floor, or
    None with `seconds_need`, the speed that is missing. bottleneck: the GPU and direction that the floor comes from."""

    recipe: str
    wire: str
    trainers: int
    engines: int
    tensors: int
    moves: int
    nbytes: int
    sent: list[int]
    received: list[int]
    edges: list[Edge]
    paths: list[Path]
    seconds: float | None
    seconds_need: str
    bottleneck: str


class Tally:
    """Adds up plans, one an engine, into a report."""

    def __init__(self, trainers: int, engines: int) -> None:
        self.bytes = np.zeros((trainers, engines), np.int64)
        self.moves = np.zeros((trainers, engines), np.int64)
        self.paths: dict[tuple[str, str], dict[str, int]] = {}

    def add(self, plan: Plan, path_of: Callable[[str], tuple[str, str]], coded: Callable[[str], bool]) -> None:
        """path_of: name -> (path, why). coded: whether a tensor travels as MXFP8 already."""
        travels = np.array([MXFP8_BYTES if coded(n) else 0.0 for n in plan.names])[plan.tensor] if len(plan) else np.zeros(0)
        elements = np.prod(plan.extent, axis=1, dtype=np.int64)
        nbytes = np.where(travels > 0, (elements * travels).astype(np.int64), plan.nbytes)
        np.add.at(self.bytes, (plan.source_rank, plan.target_rank), nbytes)
        np.add.at(self.moves, (plan.source_rank, plan.target_rank), 1)
        total = np.zeros(len(plan.names), np.int64)
        np.add.at(total, plan.tensor, nbytes)
        for tensor in np.unique(plan.tensor).tolist():
            name = plan.names[tensor]
            group = self.paths.setdefault(path_of(name), {})
            group[name] = group.get(name, 0) + int(total[tensor])

    def note(self, path: str, why: str, names: Sequence[str]) -> None:
        """Tensors that no bytes travel for."""
        self.paths.setdefault((path, why), {}).update(dict.fromkeys(names, 0))

    def report(
        self, recipe: str, wire: str, place: tuple[Sequence[int], Sequence[int]], per_host: int, links: Links
    ) -> PlanReport:
        """place: the GPU of each trainer rank and of each engine rank, numbered over all hosts. per_host: GPUs a host."""
        seconds, need, bottleneck = floor(self.bytes, place, per_host, links)
        edges = [Edge(int(s), int(t), int(self.bytes[s, t]), int(self.moves[s, t])) for s, t in np.argwhere(self.moves > 0)]
        paths = [Path(p, w, len(names), sum(names.values()), next(iter(names))) for (p, w), names in self.paths.items()]
        return PlanReport(
            recipe,
            wire,
            *self.bytes.shape,
            len({name for names in self.paths.values() for name in names}),
            int(self.moves.sum()),
            int(self.bytes.sum()),
            self.bytes.sum(axis=1).tolist(),
            self.bytes.sum(axis=0).tolist(),
            edges,
            sorted(paths, key=lambda p: -p.nbytes),
            seconds,
            need,
            bottleneck,
        )


def floor(
    nbytes: np.ndarray[tuple[int, int], np.dtype[np.int64]],
    place: tuple[Sequence[int], Sequence[int]],
    per_host: int,
    links: Links,
) -> tuple[float | None, str, str]:
    """Seconds of the busiest GPU and direction, or None and the speed that is missing; and which GPU that is.

    nbytes: int64 [trainer ranks, engine ranks].
    """
    source, target = (np.asarray(p, np.int64) for p in place)
    same = source[:, None] == target[None, :]
    near = (source[:, None] // per_host == target[None, :] // per_host) & ~same
    kinds = (("copy_bytes_per_second", same, links.copy, 2), ("host_bytes_per_second", near, links.host, 1))
    cost = np.zeros(nbytes.shape)
    for name, where, speed, factor in (*kinds, ("network_bytes_per_second", ~same & ~near, links.network, 1)):
        if not nbytes[where].any():
            continue
        if speed is None:
            return None, f"hardware.{name}", ""
        cost[where] = factor * nbytes[where] / speed
    out, into = np.zeros(source.max(initial=0) + 1), np.zeros(target.max(initial=0) + 1)
    np.add.at(out, source, cost.sum(axis=1))
    np.add.at(into, target, cost.sum(axis=0))
    if out.max(initial=0) >= into.max(initial=0):
        return float(out.max(initial=0)), "", f"GPU {int(out.argmax())} sends"
    return float(into.max()), "", f"GPU {int(into.argmax())} receives"


def size(nbytes: float) -> str:
    """Bytes for people, in powers of ten: `10.3 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def tables(report: PlanReport, edges: bool = False) -> list[Table]:
    """The report as rich tables. edges: list every edge too."""
    from rich.table import Table

    summary = Table(title=f"plan of {report.recipe}", title_justify="left", show_header=False)
    seconds = (
        f"{report.seconds:.3g} s at least ({report.bottleneck})"
        if report.seconds is not None
        else f"unknown: set {report.seconds_need}"
    )
    rows = {
        "wire": report.wire,
        "ranks": f"{report.trainers} of the trainer, {report.engines} of engines",
        "tensors": str(report.tensors),
        "moves": f"{report.moves} on {len(report.edges)} edges",
        "bytes": size(report.nbytes),
        "a trainer rank sends": spread(report.sent),
        "an engine rank receives": spread(report.received),
        "seconds": seconds,
    }
    for row in rows.items():
        summary.add_row(*row)
    paths = Table(title="paths", title_justify="left")
    for name in ("path", "why", "tensors", "bytes", "for example"):
        paths.add_column(name, overflow="fold")
    for p in report.paths:
        paths.add_row(p.path, p.why, str(p.tensors), size(p.nbytes), p.example)
    if not edges:
        return [summary, paths]
    each = Table(title="edges", title_justify="left")
    for name in ("trainer rank", "engine rank", "bytes", "moves"):
        each.add_column(name, justify="right")
    for e in report.edges:
        each.add_row(str(e.source), str(e.target), str(e.nbytes), str(e.moves))
    return [summary, paths, each]


def spread(values: Sequence[int]) -> str:
    """Least to most of some byte counts."""
    low, high = min(values, default=0), max(values, default=0)
    return size(high) if low == high else f"{size(low)} to {size(high)}"


def pattern(name: str) -> str:
    """A tensor's name without its layer and expert: `model.layers.*.mlp.experts.*.up_proj.weight`."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def grouped(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by reason, where reasons that differ in numbers alone count as one."""
    found: dict[str, list[str]] = {}
    for name, reason in names.items():
        found.setdefault(re.sub(r"\d+", "*", reason), []).append(name)
    return found
