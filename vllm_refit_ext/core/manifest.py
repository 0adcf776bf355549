"""The manifest: what will travel. Names, shapes, dtypes and formats of checkpoint tensors, checked as they come in."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.dtypes import ITEMSIZE, dtype_name
from vllm_refit_ext.core.errors import ManifestError, Problem, RefitError
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.table import PackedPlacements, pack_placements, unpack_placements

FORMATS = ("plain", "mxfp8")
"""`plain`: numbers of the tensor's dtype. `mxfp8`: E4M3 codes whose E8M0 scales travel as the entry named in `scale`."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of the manifest. `shape` in elements; `dtype` as in `core.dtypes`; `scale` names the partner entry."""

    shape: tuple[int, ...]
    dtype: str
    format: str = "plain"
    scale: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """Everything offered for one refit. `aliases` maps a second name of a tied tensor to the name that travels."""

    tensors: dict[str, TensorSpec]
    aliases: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """sha256 over names, shapes, dtypes, formats and aliases, in name order."""
        entries = sorted((n, list(t.shape), t.dtype, t.format, t.scale) for n, t in self.tensors.items())
        return hashlib.sha256(msgspec.msgpack.encode([entries, sorted(self.aliases.items())])).hexdigest()


class Offer(msgspec.Struct, frozen=True):
    """What a trainer offers: the manifest, the sources of all its ranks (None: whole tensors on rank 0), the number that this
    engine's rank 0 has among all the engine ranks of the refit, and the site of every trainer rank (empty: not told), so that of
    equal copies the near one is read."""

    manifest: Manifest
    sources: Placements | None = None
    first_rank: int = 0
    sites: tuple[str, ...] = ()


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    manifest: Manifest
    sources: PackedPlacements | None
    first_rank: int
    sites: tuple[str, ...] = ()


def pack_offer(offer: Offer) -> bytes:
    """`offer` as the bytes that a sender passes as `state_dict_info`."""
    sources = pack_placements(offer.sources) if offer.sources is not None else None
    return msgspec.msgpack.encode(_Packed(offer.manifest, sources, offer.first_rank, offer.sites))


def parse_state_dict_info(info: object) -> Offer:
    """Read `state_dict_info` in any of its forms.

    info: a mapping name -> (shape, dtype) or name -> {"shape", "dtype", "format", "scale"}; or the packed form made by
    `pack_offer`, as bytes or (over HTTP) as their base64 text. Shapes may be lists, tuples or torch.Size; dtypes torch dtypes or
    names.

    Raises ManifestError that lists every bad entry.
    """
    if isinstance(info, str):
        try:
            info = base64.b64decode(info, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ManifestError(
                "state_dict_info is text but not base64", got=str(error), do="pass the mapping, or bytes as base64"
            ) from None
    if isinstance(info, bytes | bytearray | memoryview):
        try:
            packed = msgspec.msgpack.decode(info, type=_Packed)
            sources = unpack_placements(packed.sources) if packed.sources is not None else None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ManifestError(
                "the packed state_dict_info can't be read", got=str(error), do="send what `pack_offer` makes"
            ) from None
        check_manifest(packed.manifest)
        ranks = 1 + max((b.rank for b in sources.buffers), default=-1) if sources is not None else 1
        if packed.sites and len(packed.sites) < ranks:
            raise ManifestError("some trainer ranks have no site", got=f"{len(packed.sites)} sites", wanted=f"{ranks}, or none")
        return Offer(packed.manifest, sources, packed.first_rank, packed.sites)
    if not isinstance(info, Mapping):
        raise ManifestError("state_dict_info has the wrong type", got=type(info).__name__, wanted="a mapping or bytes")
    tensors: dict[str, TensorSpec] = {}
    problems: list[Problem] = []
    for name, entry in info.items():
        try:
            tensors[str(name)] = _spec(entry)
        except RefitError as error:
            problems += [Problem(p.what, f"tensor {name!r}", p.got, p.wanted, p.do) for p in error.problems]
    if not info:
        problems.append(Problem("state_dict_info is empty", wanted="at least one tensor"))
    if problems:
        raise ManifestError.of(problems, f"state_dict_info has {len(problems)} bad entries")
    manifest = Manifest(tensors)
    check_manifest(manifest)
    return Offer(manifest)


def _spec(entry: object) -> TensorSpec:
    fields: dict[str, Any]
    if isinstance(entry, Mapping):
        fields = dict(entry)
        unknown = sorted(set(fields) - {"shape", "dtype", "format", "scale"})
        if unknown:
            raise ManifestError("unknown keys", got=unknown, wanted="shape, dtype, format, scale")
        missing = sorted({"shape", "dtype"} - set(fields))
        if missing:
            raise ManifestError("missing keys", got=missing, wanted="shape and dtype")
    elif isinstance(entry, list | tuple) and len(entry) == 2:
        fields = {"shape": entry[0], "dtype": entry[1]}
    else:
        raise ManifestError("an entry must be (shape, dtype) or a mapping", got=repr(entry)[:80])
    shape = fields["shape"]
    if isinstance(shape, str | bytes) or not isinstance(shape, Iterable):
        raise ManifestError("a shape must be a sequence of sizes", got=repr(shape)[:80])
    sizes = tuple(shape)
    if not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in sizes):
        raise ManifestError("sizes must be whole numbers, zero or more", got=repr(sizes)[:80])
    return TensorSpec(sizes, dtype_name(fields["dtype"]), str(fields.get("format", "plain")), str(fields.get("scale", "")))


def whole_tensors(manifest: Manifest) -> Placements:
    """The sources of a trainer that did not say: every tensor whole and row-major in a buffer of its own, on rank 0."""
    buffers = [Buffer(name, 0, t.dtype, t.shape) for name, t in manifest.tensors.items()]
    rows = [
        Placement(name, i, (0,) * len(t.shape), t.shape, 0, tuple(s * ITEMSIZE[t.dtype] for s in row_strides(t.shape)))
        for i, (name, t) in enumerate(manifest.tensors.items())
    ]
    return Placements.from_rows(buffers, rows, list(manifest.tensors))


def check_manifest(manifest: Manifest) -> None:
    """Raise ManifestError that lists every entry whose dtype, format, partner or alias does not hold together."""
    problems: list[Problem] = []
    for name, spec in manifest.tensors.items():
        where = f"tensor {name!r}"
        try:
            dtype_name(spec.dtype)
        except ManifestError as error:
            problems += [Problem(p.what, where, p.got, p.wanted) for p in error.problems]
        if spec.format not in FORMATS:
            problems.append(Problem("unknown format", where, spec.format, " or ".join(FORMATS)))
        if spec.format == "mxfp8":
            problems += _mxfp8_problems(name, spec, manifest)
        elif spec.scale:
            problems.append(Problem("only an mxfp8 tensor has a scale", where, spec.scale))
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            problems.append(Problem("an alias must name a travelling tensor and not travel itself", f"alias {alias!r}", name))
    if problems:
        raise ManifestError.of(problems, f"the manifest has {len(problems)} problem(s)")


def _mxfp8_problems(name: str, spec: TensorSpec, manifest: Manifest) -> list[Problem]:
    where = f"tensor {name!r}"
    problems = []
    if spec.dtype != "float8_e4m3fn":
        problems.append(Problem("an mxfp8 tensor holds E4M3 codes", where, spec.dtype, "float8_e4m3fn"))
    if not spec.shape or spec.shape[-1] % 32:
        problems.append(Problem("the last dimension must be a multiple of 32", where, str(list(spec.shape))))
        return problems
    wanted = (*spec.shape[:-1], spec.shape[-1] // 32)
    partner = manifest.tensors.get(spec.scale)
    if partner is None:
        problems.append(Problem("its scale tensor is missing", where, repr(spec.scale), "the name of a uint8 entry"))
    elif partner.shape != wanted or partner.dtype != "uint8":
        got = f"{partner.dtype} {list(partner.shape)}"
        problems.append(Problem("its scale tensor has the wrong form", where, got, f"uint8 {list(wanted)}"))
    return problems


def suggest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a misspelt name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close else ""
