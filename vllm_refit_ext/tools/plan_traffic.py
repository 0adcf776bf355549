"""What goes between which GPUs, from the plan, and the seconds that it takes at least.

Bytes go straight from trainer to engine. Seconds are those of the
busiest GPU: its bytes over the speeds of the links that they cross, one link after another at full speed, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.hosts import Hosts

Place = tuple[Sequence[int], Sequence[int]]
"""The GPU of each trainer rank and of each engine rank, numbered over all hosts."""

LINKS = (
    ("within a GPU", 2, "copy_bytes_per_second"),
    ("between GPUs of a host", 1, "host_bytes_per_second"),
    ("between hosts", 1, "network_bytes_per_second"),
)
"""Kinds of links: their name, how often a byte crosses one (within a GPU it is read and written), and where a recipe's `hardware`
says the speed, in bytes a second of one direction."""

Speeds = Sequence[float | None]
"""The speed of each kind of link; None: unknown."""


class Crossing(msgspec.Struct, frozen=True):
    """Bytes that cross one kind of link, and their time: factor * nbytes / speed. None: the speed is unknown."""

    link: str
    nbytes: int
    factor: int
    speed: float | None
    seconds: float | None


class Floor(msgspec.Struct, frozen=True):
    """seconds: those of the busiest GPU and direction, `gpu`; None with `need`, the setting that is missing. parts: what they
    are the sum of.
    """

    seconds: float | None
    gpu: str
    parts: list[Crossing]
    need: str = ""

    def __str__(self) -> str:
        """The seconds with the arithmetic that they come from."""
        if self.seconds is None:
            return f"unknown: set {self.need}"
        terms = [
            f"{size(p.nbytes)} {p.link}{f' x {p.factor} (read, written)' if p.factor > 1 else ''} / {size(p.speed or 0)}/s"
            f" = {p.seconds or 0:.3g} s"
            for p in self.parts
        ]
        return f"{self.seconds:.3g} s at least" + (f": {self.gpu} " + " + ".join(terms) if terms else "")


class Traffic(msgspec.Struct, frozen=True):
    """Bytes between GPUs, which are numbered over all hosts, `per_host` on each. source, target, nbytes: int64 [n]."""

    source: Int
    target: Int
    nbytes: Int
    per_host: int

    @property
    def kinds(self) -> Int:
        """The row of LINKS that each row crosses."""
        return np.where(
            self.source == self.target, 0, np.where(self.source // self.per_host == self.target // self.per_host, 1, 2)
        )

    def crossings(self, speeds: Speeds, of: Int | None = None) -> list[Crossing]:
        """Bytes by the links that they cross; of some rows only, if given. Links that nothing crosses are left out."""
        kinds, nbytes = (self.kinds, self.nbytes) if of is None else (self.kinds[of], self.nbytes[of])
        found = []
        for kind, ((link, factor, _), speed) in enumerate(zip(LINKS, speeds, strict=True)):
            total = int(nbytes[kinds == kind].sum())
            if total:
                found.append(Crossing(link, total, factor, speed, None if speed is None else factor * total / speed))
        return found

    def floor(self, speeds: Speeds) -> Floor:
        """The time of the busiest GPU in the direction in which it is busier, with its parts."""
        kinds = self.kinds[self.nbytes > 0]
        for kind in np.unique(kinds).tolist():
            if speeds[kind] is None:
                return Floor(None, "", [], f"hardware.{LINKS[kind][2]}")
        if not len(kinds):
            return Floor(0.0, "", [])
        each = np.array([factor / (speed or 1.0) for (_, factor, _), speed in zip(LINKS, speeds, strict=True)])
        cost = self.nbytes * each[self.kinds]
        out, into = np.bincount(self.source, cost), np.bincount(self.target, cost)
        sends = bool(out.max() >= into.max())
        gpu = int(out.argmax() if sends else into.argmax())
        mine = np.flatnonzero((self.source if sends else self.target) == gpu)
        return Floor(
            float(max(out.max(), into.max())), f"GPU {gpu} {'sends' if sends else 'receives'}", self.crossings(speeds, mine)
        )


def hosts_of(place: Place, per_host: int) -> Hosts:
    """The hosts of both sides. per_host: GPUs of a host."""
    trainers, engines = ([str(gpu // per_host) for gpu in side] for side in place)
    return Hosts(trainers, engines)


def direct(nbytes: Int, place: Place, per_host: int) -> Traffic:
    """Every trainer rank gives every engine rank its bytes itself. nbytes: int64 [trainer ranks, engine ranks]."""
    s, t = np.nonzero(nbytes)
    return Traffic(np.asarray(place[0], np.int64)[s], np.asarray(place[1], np.int64)[t], nbytes[s, t], per_host)


def published(nbytes: Int, place: Place, per_host: int, alike: Sequence[object]) -> Traffic:
    """As `direct`, where engines take a published version and replicas are sources (`core.pieces`): of k engine ranks of a host
    that are alike each takes 1/k of the bytes from the trainer, and the rest from the others. alike: what equal engine ranks
    have in common, hashable. Bytes are rounded to whole ones."""
    engines = np.asarray(place[1], np.int64)
    groups: dict[tuple[int, object], list[int]] = {}
    for rank, what in enumerate(alike):
        groups.setdefault((int(engines[rank]) // per_host, what), []).append(rank)
    near, handed = nbytes.astype(np.float64), np.zeros((len(engines), len(engines)))
    for ranks in groups.values():
        near[:, ranks] /= len(ranks)
        for rank in ranks:
            handed[[r for r in ranks if r != rank], rank] = nbytes[:, rank].sum() / len(ranks)
    table = np.concatenate([near, handed]).round().astype(np.int64)
    return direct(table, ([*place[0], *place[1]], place[1]), per_host)


def size(nbytes: float) -> str:
    """Bytes for people, in powers of ten: `10.3 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
