"""Seeded mutations of a message as plain data: what a peer might send that is not what its sender meant."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

SEEDS = [range(1000), pytest.param(range(1000, 100_000), marks=pytest.mark.long)]
"""Of the mutations of one message: 10^3 in `make test`, 10^5 in `make test-all`."""

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 7, 2**31, 2**48, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -1.5, 1e300, float("nan"), float("inf"),
    "", "x", "0", "../../tmp/x", "bfloat16", "float32", "torch.float16", b"", b"\xff" * 9, [], {}, [[]], {"a": 1},
)  # fmt: skip
"""Values of every type, and numbers at the edges of what a field may hold."""
TEXT_ONLY: tuple[Any, ...] = ("\ud800", {1: 2, "1": 3}, 2**70)
"""Values that only messages of Python objects can carry."""


def mutated(message: Any, seed: int, *, python: bool = False, times: int = 1) -> Any:
    """A copy of `message`, plain data within a dict or list, with `times` changes. python: odd Python objects too."""
    draw = random.Random(seed)
    changed = copy.deepcopy(message)
    for _ in range(times):
        owner, key = draw.choice(list(_places(changed)))
        _change(draw, owner, key, ODD + TEXT_ONLY if python else ODD)
    return changed


def _places(node: Any) -> Any:
    """Every (container, key) below `node`."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _change(draw: random.Random, owner: Any, key: Any, odd: tuple[Any, ...]) -> None:
    value = owner[key]
    kinds = [lambda v: copy.deepcopy(draw.choice(odd))] * 2
    if isinstance(value, int) and not isinstance(value, bool):
        kinds += [lambda v: v + draw.choice((-1, 1, 2, 64, 4096)), lambda v: v ^ 1 << draw.randrange(62), lambda v: -v]
    if isinstance(value, bytes) and value:
        kinds += [lambda v: _flipped(draw, v)] * 3 + [lambda v: v[: draw.randrange(len(v))]]
    if isinstance(value, str) and value:
        kinds += [lambda v: v[:-1], lambda v: v + "0", str.swapcase]
    if isinstance(value, list) and value:
        kinds += [lambda v: v[:-1], lambda v: [*v, v[0]], lambda v: v[::-1]]
    new = draw.choice(kinds)(value)
    if draw.random() < 0.1 and isinstance(owner, dict):
        if draw.random() < 0.5:
            del owner[key]
        else:
            owner[draw.choice(("x", "protocol", "host"))] = owner.pop(key)
    else:
        owner[key] = new


def spoilt(data: bytes, seed: int) -> bytes:
    """`data` with a few bits flipped, or a field's worth of bytes set to an edge of what it may hold. Of the same length."""
    draw = random.Random(seed)
    for _ in range(draw.choice((1, 1, 2, 8))):
        width = min(len(data), draw.choice((1, 4, 8)))
        at = draw.randrange(len(data) - width + 1) // width * width
        edge = draw.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), draw.getrandbits(8 * width)))
        data = _flipped(draw, data) if draw.random() < 0.5 else data[:at] + edge.to_bytes(width, "little") + data[at + width :]
    return data


def _flipped(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
