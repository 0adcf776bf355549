"""A plan for people: what goes where, bytes of every rank and edge, which path tensors take and why, and seconds from link
speeds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.plan import Edge, Plan
from vllm_refit_ext.tools.plan_traffic import Crossing, Floor, Speeds, Traffic, size

if TYPE_CHECKING:
    from rich.table import Table

MXFP8_BYTES = 33 / 32
"""Bytes an element with its part of the scale."""


class Path(msgspec.Struct, frozen=True):
    """Tensors that take the same path for the same reason. nbytes: what is sent for them to all engine ranks. example: one
    name.
    """

    path: str
    why: str
    tensors: int
    nbytes: int
    example: str


def sent_bytes(plan: Plan, coded: Callable[[str], bool]) -> Int:
    """Bytes of each move as it is sent, int64 [n]. coded: whether a tensor is sent as MXFP8 already."""
    width = np.array([MXFP8_BYTES if coded(n) else 0.0 for n in plan.names])[plan.tensor] if len(plan) else np.zeros(0)
    elements = np.prod(plan.extent, axis=1, dtype=np.int64)
    return np.where(width > 0, (elements * width).astype(np.int64), plan.nbytes)


class PlanReport(msgspec.Struct, frozen=True):
    """sent, received: bytes by trainer rank and by engine rank. edges: every pair that exchanges any. crossings: all bytes by the
    links that they cross. crossing_hosts: share of the bytes that cross hosts. seconds: those of `floor`. published: the floor
    where engines take a published version and read it from each other too. unread: names that no engine reads.
    """

    recipe: str
    model: str
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
    crossings: list[Crossing]
    crossing_hosts: float
    seconds: float | None
    floor: Floor
    published: Floor
    unread: list[str]


class Tally:
    """Adds up plans, one an engine, into a report."""

    def __init__(self, trainers: int, engines: int) -> None:
        self.bytes = np.zeros((trainers, engines), np.int64)
        self.moves = np.zeros((trainers, engines), np.int64)
        self.paths: dict[tuple[str, str], dict[str, int]] = {}
        self.unread: list[str] = []

    def add(self, plan: Plan, path_of: Callable[[str], tuple[str, str]], coded: Callable[[str], bool]) -> None:
        """path_of: name -> (path, why). coded: whether a tensor is sent as MXFP8 already."""
        nbytes = sent_bytes(plan, coded)
        np.add.at(self.bytes, (plan.source_rank, plan.target_rank), nbytes)
        np.add.at(self.moves, (plan.source_rank, plan.target_rank), 1)
        total = np.zeros(len(plan.names), np.int64)
        np.add.at(total, plan.tensor, nbytes)
        for tensor in np.unique(plan.tensor).tolist():
            name = plan.names[tensor]
            group = self.paths.setdefault(path_of(name), {})
            group[name] = group.get(name, 0) + int(total[tensor])

    def note(self, path: str, why: str, names: Sequence[str]) -> None:
        """Tensors that nothing is sent for."""
        self.paths.setdefault((path, why), {}).update(dict.fromkeys(names, 0))
        self.unread += names

    def edges(self) -> list[Edge]:
        """Every pair of ranks that exchanges any bytes."""
        return [Edge(int(s), int(t), int(self.bytes[s, t]), int(self.moves[s, t])) for s, t in np.argwhere(self.moves > 0)]

    def report(self, recipe: str, model: str, wire: str, traffic: Traffic, taken: Traffic, speeds: Speeds) -> PlanReport:
        """traffic: which GPUs the bytes pass in a push; taken: when versions are taken. speeds: of the kinds of links."""
        paths = [Path(p, w, len(names), sum(names.values()), next(iter(names))) for (p, w), names in self.paths.items()]
        least, total = traffic.floor(speeds), int(self.bytes.sum())
        across = int(traffic.nbytes[traffic.kinds == 2].sum())
        return PlanReport(
            recipe,
            model,
            wire,
            *self.bytes.shape,
            len({name for names in self.paths.values() for name in names}),
            int(self.moves.sum()),
            total,
            self.bytes.sum(axis=1).tolist(),
            self.bytes.sum(axis=0).tolist(),
            self.edges(),
            sorted(paths, key=lambda p: -p.nbytes),
            traffic.crossings(speeds),
            across / total if total else 0.0,
            least.seconds,
            least,
            taken.floor(speeds),
            self.unread,
        )


def tables(report: PlanReport, edges: bool = False) -> list[Table]:
    """The report as rich tables. edges: list every edge too."""
    from rich.table import Table

    summary = Table(title=f"plan of {report.recipe}", title_justify="left", show_header=False)
    rows = {
        "model": report.model,
        "wire": report.wire,
        "ranks": f"{report.trainers} of the trainer, {report.engines} of engines",
        "tensors": str(report.tensors),
        "moves": f"{report.moves} on {len(report.edges)} edges",
        "bytes": f"{size(report.nbytes)}, {report.crossing_hosts:.0%} of them between hosts",
        "a trainer rank sends": spread(report.sent),
        "an engine rank receives": spread(report.received),
        "seconds": str(report.floor),
        "seconds of a version": str(report.published),
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


def grouped(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Names by reason, where reasons that differ in numbers alone count as one."""
    found: dict[str, list[str]] = {}
    for name, reason in names.items():
        found.setdefault(re.sub(r"\d+", "*", reason), []).append(name)
    return found
