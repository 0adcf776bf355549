"""Seconds that a plan takes at least, and the arithmetic that says so.

The bytes of the busiest GPU, by the links that they cross, over the speeds of those links. A GPU's links work at the given speed
all the time, one after another, and nothing else takes time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.box import Int


class Links(msgspec.Struct, frozen=True):
    """Bytes a second of one direction: within a GPU (read plus written), to a GPU of the same host, to another host. None:
    unknown.
    """

    copy: float | None = None
    host: float | None = None
    network: float | None = None


class Traffic(msgspec.Struct, frozen=True):
    """Bytes between GPUs, which are numbered over all hosts. source, target, nbytes: int64 [n].

    `direct` is that of a wire on which every trainer rank gives every engine rank its bytes itself. One that passes bytes on
    has more rows, with the GPUs in between.
    """

    source: Int
    target: Int
    nbytes: Int


class Crossing(msgspec.Struct, frozen=True):
    """Bytes that cross one kind of link, and their time. factor: how often such a link is crossed by a byte (within a GPU it is
    read and written). speed: bytes a second, None if the recipe does not say. seconds: factor * nbytes / speed.
    """

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


def direct(nbytes: Int, place: tuple[Sequence[int], Sequence[int]]) -> Traffic:
    """Every edge by itself. nbytes: int64 [trainer ranks, engine ranks]. place: the GPU of each rank of either side."""
    s, t = np.nonzero(nbytes)
    return Traffic(np.asarray(place[0], np.int64)[s], np.asarray(place[1], np.int64)[t], nbytes[s, t])


class Kind(msgspec.Struct, frozen=True):
    """One kind of link. rows: the rows of a traffic that cross it, bool [n]. setting: where a recipe says its speed."""

    link: str
    rows: NDArray[np.bool_]
    factor: int
    speed: float | None
    setting: str


def crossed(traffic: Traffic, per_host: int, links: Links) -> tuple[Kind, Kind, Kind]:
    """The three kinds of links, and what crosses them: within a GPU, within a host, between hosts."""
    same = traffic.source == traffic.target
    near = (traffic.source // per_host == traffic.target // per_host) & ~same
    return (
        Kind("within a GPU", same, 2, links.copy, "hardware.copy_bytes_per_second"),
        Kind("between GPUs of a host", near, 1, links.host, "hardware.host_bytes_per_second"),
        Kind("between hosts", ~same & ~near, 1, links.network, "hardware.network_bytes_per_second"),
    )


def floor(traffic: Traffic, kinds: Sequence[Kind]) -> Floor:
    """The time of the busiest GPU in the direction in which it is busier, with its parts."""
    cost = np.zeros(len(traffic.nbytes))
    for kind in kinds:
        if not traffic.nbytes[kind.rows].any():
            continue
        if kind.speed is None:
            return Floor(None, "", [], kind.setting)
        cost[kind.rows] = kind.factor * traffic.nbytes[kind.rows] / kind.speed
    if not len(cost):
        return Floor(0.0, "", [])
    out, into = np.bincount(traffic.source, cost), np.bincount(traffic.target, cost)
    sends = bool(out.max() >= into.max())
    gpu = int(out.argmax() if sends else into.argmax())
    mine = (traffic.source if sends else traffic.target) == gpu
    parts = crossings(np.where(mine, traffic.nbytes, 0), kinds)
    return Floor(float(max(out.max(), into.max())), f"GPU {gpu} {'sends' if sends else 'receives'}", parts)


def crossings(nbytes: Int, kinds: Sequence[Kind]) -> list[Crossing]:
    """`nbytes` (int64 [n], one a row of the traffic) by the kinds of links that they cross; unused kinds are left out."""
    found = []
    for kind in kinds:
        total = int(nbytes[kind.rows].sum())
        seconds = kind.factor * total / kind.speed if kind.speed is not None else None
        if total:
            found.append(Crossing(kind.link, total, kind.factor, kind.speed, seconds))
    return found


def reckoned(found: Floor) -> str:
    """The floor with the arithmetic that it comes from."""
    if found.seconds is None:
        return f"unknown: set {found.need}"
    terms = [
        f"{size(p.nbytes)} {p.link}{f' x {p.factor} (read, written)' if p.factor > 1 else ''} / {size(p.speed or 0)}/s"
        f" = {p.seconds or 0:.3g} s"
        for p in found.parts
    ]
    return f"{found.seconds:.3g} s at least" + (f": {found.gpu} " + " + ".join(terms) if terms else "")


def size(nbytes: float) -> str:
    """Bytes for people, in powers of ten: `10.3 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError
