"""Names and sizes of element types. Names are torch's, without the prefix: `bfloat16`, `float8_e4m3fn`, `uint8`."""

from __future__ import annotations

from vllm_refit_ext.core.errors import ManifestError

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes an element."""

CASTS = frozenset((a, b) for a in ("bfloat16", "float16", "float32") for b in ("bfloat16", "float16", "float32") if a != b)
"""(source, target) pairs that a move may convert. Every other pair of unequal dtypes is refused: a copy between, say,
uint8 and float8_e8m0fnu would convert numbers where bytes were meant."""


def cast_text(source: str, target: str) -> str:
    """How a move converts between dtypes of `CASTS`. Every bfloat16 and every float16 is a float32 too."""
    return f"{source} to {target}, {'exact' if target == 'float32' else 'rounded'}"


def dtype_name(dtype: object) -> str:
    """The name of `dtype`, given as a name, a `torch.` name or a torch dtype.

    Raises ManifestError for anything else.
    """
    name = str(dtype).removeprefix("torch.")
    name = {"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64"}.get(name, name)
    if name not in ITEMSIZE:
        raise ManifestError("unknown dtype", got=repr(dtype), wanted="one of " + ", ".join(ITEMSIZE))
    return name


def itemsize(name: str) -> int:
    """Bytes an element of dtype `name` takes."""
    return ITEMSIZE[name]
