"""The settings of a sender."""

from __future__ import annotations

import math

import msgspec

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.messages import DEADLINE_S, CachePolicy, WireName
from vllm_refit_ext.wires import BUCKET_BYTES, ONE_SIDED

SMALLEST_BUCKET = 1 << 10
"""Bytes. A bucket must hold an element; a thousand of its messages cost more than their bytes already."""
LONGEST_S = 7 * 24 * 3600.0
"""The longest deadline. More is taken for a mistake."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that are checked when they are made. Raises ConfigError with every field that can't work."""

    def __post_init__(self) -> None:
        problems = []
        for field in msgspec.structs.fields(self):
            value, where = getattr(self, field.name), f"{type(self).__name__}.{field.name}"
            try:
                read = msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                problems.append(Problem(f"not a value that it takes: {error}", where, repr(value)[:80]))
                continue
            if read != value:  # a list of names
                msgspec.structs.force_setattr(self, field.name, read)
            problems += [Problem(what, where, str(value), wanted) for what, wanted in self.wrong(field.name)]
        if problems:
            raise ConfigError.of(problems)

    def wrong(self, name: str) -> list[tuple[str, str]]:
        """What is wrong with a field that has the right type, and what is wanted instead."""
        return []


class SenderConfig(Settings, frozen=True):
    """wire: how bytes move. unused: checkpoint names that no engine rank needs to read. caches: what a commit does with caches
    of older weights, see `core.messages.CachePolicy`. deadline_s: seconds within which a refit must end, and each call of an
    engine in `prepare` and `verify`. resident: the trainer's memory is never freed between refits, so engines may keep it mapped.
    prequantize: quantise in the trainer what engines hold as MXFP8, and the checkpoint names in `quantise` beside. sample: moves
    that every engine rank recomputes by the reference before each commit. hash_reloaded: engines hash what goes through vLLM's
    own reload, which `verify` needs to compare such tensors; a refit pays a pass over their bytes on the host. keep: what every
    engine keeps as it is and need not be offered (a frozen vision tower), by name or glob of engine parameters or checkpoint
    tensors. bucket_bytes: most payload of a message on the wires that stage (`nixl`, `ring`, `collective`). registry_port: where
    trainer rank 0 serves the registry of published versions, 0 for a port of the kernel's choice; None where nothing is
    published.
    """

    wire: WireName = "shm"
    unused: tuple[str, ...] = ()
    caches: CachePolicy = "reset"
    deadline_s: float = DEADLINE_S
    resident: bool = False
    prequantize: bool = False
    quantise: tuple[str, ...] = ()
    sample: int = 0
    hash_reloaded: bool = False
    keep: tuple[str, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    registry_port: int | None = None

    def wrong(self, name: str) -> list[tuple[str, str]]:
        if name == "deadline_s" and not (math.isfinite(self.deadline_s) and 0 < self.deadline_s <= LONGEST_S):
            return [("the deadline must be a positive number of seconds", f"more than 0, at most {LONGEST_S:.0f}")]
        if name == "bucket_bytes" and self.bucket_bytes < SMALLEST_BUCKET:
            return [("a bucket is too small", f"at least {SMALLEST_BUCKET}")]
        if name == "sample" and self.sample < 0:
            return [("a number of moves can't be negative", "0 or more")]
        if name == "registry_port" and self.registry_port is not None:
            if not 0 <= self.registry_port < 1 << 16:
                return [("no such port", "0 to 65535")]
            if self.wire not in ONE_SIDED:
                return [(f"wire {self.wire} needs both sides, so engines can't take by it", " or ".join(ONE_SIDED))]
        if name == "quantise" and self.quantise and not self.prequantize:
            return [("nothing is quantised in the trainer", "prequantize=True, or no names")]
        return []
