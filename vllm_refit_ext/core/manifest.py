"""The manifest: what will be sent. Names, shapes, dtypes and formats of checkpoint tensors, checked as they come in."""

from __future__ import annotations

import base64
import binascii
import difflib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.dtypes import ITEMSIZE, dtype_name
from vllm_refit_ext.core.errors import MAX_LISTED, ManifestError, Problem, RefitError
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.protocol import PROTOCOL, check_protocol, check_unchanged, checksum
from vllm_refit_ext.core.table import MAX_RANKS, PackedPlacements, pack_placements, shape_problem, unpack_placements

OFFER = "the packed state_dict_info"
FORMATS = ("plain", "mxfp8")
"""`plain`: numbers of the tensor's dtype. `mxfp8`: E4M3 codes whose E8M0 scales are sent as the entry named in `scale`."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of the manifest. `shape` in elements; `dtype` as in `core.dtypes`; `scale` names the partner entry."""

    shape: tuple[int, ...]
    dtype: str
    format: str = "plain"
    scale: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """Everything offered for one refit. `aliases` maps a second name of a tied tensor to the name that is sent."""

    tensors: dict[str, TensorSpec]
    aliases: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """sha256 over names, shapes, dtypes, formats and aliases, in name order."""
        entries = sorted((n, list(t.shape), t.dtype, t.format, t.scale) for n, t in self.tensors.items())
        return hashlib.sha256(msgspec.msgpack.encode([entries, sorted(self.aliases.items())])).hexdigest()


class Offer(msgspec.Struct, frozen=True):
    """What a trainer offers: the manifest, the sources of all its ranks (None: whole tensors on rank 0), the number that this
    engine's rank 0 has among all the engine ranks of the refit, and the host of every trainer rank (empty: unknown), so that of
    equal copies the near one is read."""

    manifest: Manifest
    sources: Placements | None = None
    first_rank: int = 0
    hosts: tuple[str, ...] = ()


class _Packed(msgspec.Struct, forbid_unknown_fields=True):
    manifest: Manifest
    sources: PackedPlacements | None
    first_rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    hosts: tuple[str, ...] = ()
    protocol: int = 1
    checksum: str = ""


class _Numbered(msgspec.Struct):
    protocol: int = 1  # packed offers of the first protocol had no number


class _Keys(msgspec.Struct):
    tensors: msgspec.Raw
    aliases: msgspec.Raw


class _Manifest(msgspec.Struct):
    manifest: _Keys


def pack_offer(offer: Offer) -> bytes:
    """`offer` as the bytes that a sender passes as `state_dict_info`."""
    sources = pack_placements(offer.sources) if offer.sources is not None else None
    packed = _Packed(offer.manifest, sources, offer.first_rank, offer.hosts, PROTOCOL)
    packed.checksum = checksum(packed)
    return msgspec.msgpack.encode(packed)


def parse_state_dict_info(info: object) -> Offer:
    """Read `state_dict_info` in any of its forms.

    info: a mapping name -> (shape, dtype) or name -> {"shape", "dtype", "format", "scale"}; or the packed form made by
    `pack_offer`, as bytes or (over HTTP) as their base64 text. Shapes may be lists, tuples or torch.Size; dtypes torch dtypes or
    names.

    Raises ManifestError that lists every bad entry, and ConfigError for a packed form of another protocol.
    """
    info = _plain(info)
    if isinstance(info, Mapping):
        return Offer(_manifest_of(info))
    packed = _unpack(info)
    check_manifest(packed.manifest)
    if packed.sources is None:
        sources, ranks = None, 1
    else:
        sources = unpack_placements(packed.sources, "the table of sources")
        ranks = 1 + max((b.rank for b in sources.buffers), default=-1)
        if problems := _source_problems(sources, packed.manifest):
            raise ManifestError.of(problems, f"the table of sources has {len(problems)} problem(s)")
    if packed.hosts and not ranks <= len(packed.hosts) <= MAX_RANKS:
        got, wanted = f"{len(packed.hosts)} hosts", f"{ranks}, or none"
        raise ManifestError("some trainer ranks have no host", where=OFFER, got=got, wanted=wanted)
    check_unchanged(packed, OFFER)
    return Offer(packed.manifest, sources, packed.first_rank, packed.hosts)


def parse_manifest(info: object) -> Manifest:
    """The manifest alone of what `parse_state_dict_info` reads, unchecked where it is packed. Raises ManifestError."""
    info = _plain(info)
    return _manifest_of(info) if isinstance(info, Mapping) else _unpack(info).manifest


def _plain(info: object) -> object:
    """`info` as a mapping or as bytes."""
    if isinstance(info, str):
        try:
            return base64.b64decode(info, validate=True)
        except (binascii.Error, ValueError) as error:
            do = "pass the mapping, or bytes as base64"
            raise ManifestError("state_dict_info is text but not base64", got=str(error), do=do) from None
    if isinstance(info, Mapping | bytes | bytearray | memoryview):
        return info
    raise ManifestError("state_dict_info has the wrong type", got=type(info).__name__, wanted="a mapping or bytes")


def _unpack(info: Any) -> _Packed:
    """The packed form, decoded. Names that stand in it twice are problems: a map keeps the last of them without a word."""
    try:
        check_protocol(msgspec.msgpack.decode(info, type=_Numbered).protocol, OFFER)
        packed = msgspec.msgpack.decode(info, type=_Packed)
        keys = msgspec.msgpack.decode(info, type=_Manifest).manifest
        problems = [
            Problem(f"the packed offer holds a {what} twice", f"{what} {name!r}", " and ".join(map(str, values)), "one entry")
            for what, raw, read in (
                ("tensor", keys.tensors, packed.manifest.tensors),
                ("alias", keys.aliases, packed.manifest.aliases),
            )
            for name, values in _repeated(bytes(raw), len(read)).items()
        ]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        do = "send what `pack_offer` makes"
        raise ManifestError("the packed state_dict_info can't be read", got=str(error), do=do) from None
    if problems:
        raise ManifestError.of(problems)
    return packed


def _repeated(raw: bytes, count: int) -> dict[str, list[Any]]:
    """Keys that a map of text keys in msgpack has more than once, with their values; `count` is the number of distinct keys."""
    head = {0xDE: 3, 0xDF: 5}.get(raw[0], 1)
    n = int.from_bytes(raw[1:head], "big") if head > 1 else raw[0] & 0xF
    if n == count:
        return {}
    # The same bytes under the head of a list: keys and values by turns.
    flat = msgspec.msgpack.decode(b"\xdd" + (2 * n).to_bytes(4, "big") + raw[head:])
    found: dict[str, list[Any]] = {}
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        found.setdefault(key, []).append(value)
    return {key: values for key, values in found.items() if len(values) > 1}


def _source_problems(sources: Placements, manifest: Manifest) -> list[Problem]:
    problems = [
        Problem("a source names a tensor that is not in the manifest", f"tensor {name!r}", do=do)
        for name, do in suggest_each((n for n in sources.names if n not in manifest.tensors), manifest.tensors)
    ]
    return problems + [
        Problem("a trainer's buffer must be plain", f"buffer {b.name!r} of rank {b.rank}", b.layout, "plain")
        for b in sources.buffers
        if b.layout != "plain"
    ]


def _manifest_of(info: Mapping[Any, Any]) -> Manifest:
    tensors: dict[str, TensorSpec] = {}
    problems: list[Problem] = []
    for name, entry in info.items():
        try:
            if not isinstance(name, str):
                raise ManifestError("a name must be text", got=type(name).__name__)
            tensors[name] = _spec(entry)
        except RefitError as error:
            problems += [Problem(p.what, f"tensor {name!r}", p.got, p.wanted, p.do) for p in error.problems]
    if not info:
        problems.append(Problem("state_dict_info is empty", wanted="at least one tensor"))
    if problems:
        raise ManifestError.of(problems, f"state_dict_info has {len(problems)} bad entries")
    manifest = Manifest(tensors)
    check_manifest(manifest)
    return manifest


def _spec(entry: object) -> TensorSpec:
    fields: dict[str, Any]
    if isinstance(entry, Mapping):
        fields = dict(entry)
        unknown = sorted(repr(key)[:80] for key in set(fields) - {"shape", "dtype", "format", "scale"})
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
    texts = [fields.get("format", "plain"), fields.get("scale", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ManifestError("format and scale must be text", got=repr(texts)[:80])
    return TensorSpec(sizes, dtype_name(fields["dtype"]), *texts)


def whole_tensors(manifest: Manifest) -> Placements:
    """The sources of a trainer that did not say: every tensor whole and row-major in a buffer of its own, on rank 0."""
    buffers = [Buffer(name, 0, t.dtype, t.shape) for name, t in manifest.tensors.items()]
    rows = [
        Placement(name, i, (0,) * len(t.shape), t.shape, 0, tuple(s * ITEMSIZE[t.dtype] for s in row_strides(t.shape)))
        for i, (name, t) in enumerate(manifest.tensors.items())
    ]
    return Placements.from_rows(buffers, rows, list(manifest.tensors))


def check_manifest(manifest: Manifest) -> None:
    """Raise ManifestError that lists every entry whose text, size, dtype, format, partner or alias does not hold together."""
    problems: list[Problem] = []
    users: dict[str, str] = {}
    for name, spec in manifest.tensors.items():
        where = f"tensor {name!r}"
        if not _is_text(name, spec.format, spec.scale):
            problems.append(Problem("its name, format or scale is no text that UTF-8 can hold", where))
            continue
        if spec.dtype not in ITEMSIZE:
            problems.append(Problem("unknown dtype", where, repr(spec.dtype), "one of " + ", ".join(ITEMSIZE)))
        elif text := shape_problem(spec.shape, spec.dtype):
            problems.append(Problem(text, where, str(list(spec.shape))[:80]))
        if spec.format not in FORMATS:
            problems.append(Problem("unknown format", where, spec.format, " or ".join(FORMATS)))
        if spec.format == "mxfp8":
            problems += _mxfp8_problems(name, spec, manifest)
            if (other := users.setdefault(spec.scale, name)) != name:
                problems.append(Problem("two tensors name the same scales", where, repr(spec.scale), f"those of {other!r} alone"))
        elif spec.scale:
            problems.append(Problem("only an mxfp8 tensor has a scale", where, spec.scale))
    for alias, name in manifest.aliases.items():
        if not _is_text(alias, name):
            problems.append(Problem("an alias is no text that UTF-8 can hold", f"alias {alias!r}"))
        elif name not in manifest.tensors or alias in manifest.tensors:
            problems.append(Problem("an alias must name a tensor that is sent, and not be sent itself", f"alias {alias!r}", name))
    if problems:
        raise ManifestError.of(problems, f"the manifest has {len(problems)} problem(s)")


def _is_text(*texts: str) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


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
    elif partner.shape != wanted or partner.dtype != "uint8" or partner.format != "plain":
        got = f"{partner.dtype} {list(partner.shape)}"
        problems.append(Problem("its scale tensor has the wrong form", where, got, f"uint8 {list(wanted)}"))
    return problems


def suggest_each(names: Iterable[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Each name with its `suggest`, for as many as a message lists: a wrong prefix misspells every name of a model."""
    for i, name in enumerate(names):
        yield name, suggest(name, known) if i < MAX_LISTED else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a misspelt name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close else ""
