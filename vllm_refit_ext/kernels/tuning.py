"""Tile shapes and warps of each kernel. docs/how-it-works.md says how they were found; `benchmarks/kernels.py --sweep` repeats
it."""

from __future__ import annotations

from dataclasses import dataclass

WIDE = 16
"""Bytes of the widest load that a thread does. Addresses and rows that are multiples of it take the fast kernels."""


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `cols` elements (units for copies) a program handles, by `warps` warps of 32 threads."""

    rows: int
    cols: int
    warps: int

    def waste(self, cols: int) -> float:
        """Columns that the tiles of a row of `cols` cover, over `cols`: 1 when they fit."""
        return -(-cols // self.cols) * self.cols / cols


TILES: dict[str, tuple[Tile, ...]] = {
    "quantize_rows": (Tile(8, 1024, 4), Tile(32, 256, 4), Tile(64, 128, 4), Tile(128, 64, 4)),
    "quantize_marlin": (Tile(64, 64, 2),),
    "shuffle_rows": (Tile(32, 256, 4),),
    "shuffle_marlin": (Tile(64, 64, 1),),
    "copy_units": (Tile(1, 1024, 2),),
    "digest_tiles": (Tile(16, 256, 4),),
}
"""By kernel name, best first. A table takes for each move the first tile that fits its columns (`choose`)."""

TOLERATED_WASTE = 1.15


def choose(tiles: tuple[Tile, ...], cols: int) -> Tile:
    """The first tile that wastes little on rows of `cols` columns, else the one that wastes least."""
    for tile in tiles:
        if tile.waste(cols) <= TOLERATED_WASTE:
            return tile
    return min(tiles, key=lambda tile: tile.waste(cols))
