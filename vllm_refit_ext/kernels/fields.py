"""Columns of the int64 tables that the kernels read: one table row a matrix (or a strided rectangle of a copy), 128 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

WIDTH = 16
"""Columns a table row has. 128 bytes, so that a row is one cache line."""


class Matrix(IntEnum):
    """A rectangle of an MXFP8 matrix: the canonical side is strided, the stored side is in a layout.

    Addresses are bytes; strides, sizes and positions count elements (scale blocks for the scale stride).
    """

    FIRST_TILE = 0
    TILE_COLS = 1
    CANON = 2
    CANON_SCALES = 3
    STORED = 4
    STORED_SCALES = 5
    ROWS = 6
    COLS = 7
    ROW_STRIDE = 8
    COL_STRIDE = 9
    SCALE_ROW_STRIDE = 10
    ROW0 = 11
    COL0 = 12
    STORED_ROWS = 13
    STORED_COLS = 14
    HALF = 15


class Copy(IntEnum):
    """A rectangle of `ROWS` x `COLS` units (a unit is 1 to 16 bytes of raw copy, or one element of a cast). Strides count bytes.

    A tile is 2^SHIFT columns wide; SHIFT differs between rows so that one launch serves long and short runs.
    """

    FIRST_TILE = 0
    TILE_COLS = 1
    SOURCE = 2
    TARGET = 3
    ROWS = 4
    COLS = 5
    SOURCE_ROW = 6
    SOURCE_COL = 7
    TARGET_ROW = 8
    TARGET_COL = 9
    SHIFT = 10


class Digest(IntEnum):
    """A rectangle to digest. FLAT0, FLAT_ROW and FLAT_COL give an element's index in the checkpoint tensor.

    For content in a layout, ROW0 to HALF are those of `Matrix`; for strided content, ROW_STRIDE and COL_STRIDE count elements.
    """

    FIRST_TILE = 0
    TILE_COLS = 1
    ADDRESS = 2
    OUT = 3
    ROWS = 4
    COLS = 5
    ROW_STRIDE = 6
    COL_STRIDE = 7
    FLAT0 = 8
    FLAT_ROW = 9
    FLAT_COL = 10
    ROW0 = 11
    COL0 = 12
    STORED_ROWS = 13
    STORED_COLS = 14
    HALF = 15


def cells_of(row: Mapping[int, int]) -> list[int]:
    """A table row with these columns, 0 elsewhere."""
    cells = [0] * WIDTH
    for column, value in row.items():
        cells[column] = value
    return cells
