"""What the doctor reports."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]
GIB = 1 << 30


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing looked at: how it stands, what it is, what was got and wanted, and what to do unless it is ok."""

    level: Level
    what: str
    got: str
    wanted: str = ""
    do: str = ""
