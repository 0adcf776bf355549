"""Tile shapes and warps of each kernel. docs/kernels.md says how they were found; `benchmarks/kernels.py --sweep` repeats it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `cols` elements (units for copies) a program handles, by `warps` warps of 32 threads."""

    rows: int
    cols: int
    warps: int


TILES: dict[str, Tile] = {
    "quantize_rows": Tile(32, 256, 4),
    "quantize_marlin": Tile(64, 128, 4),
    "shuffle_rows": Tile(32, 256, 4),
    "shuffle_marlin": Tile(64, 128, 4),
    "copy_units": Tile(1, 512, 4),
    "digest_tiles": Tile(16, 256, 4),
}
"""By kernel name. A table reads it when it is built."""
