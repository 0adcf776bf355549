"""The messages of a refit, as plain data: what an RPC carries in `docs/wires.md`'s words.

Every message crosses as JSON-like values: `to_rpc` turns bytes into base64 text, `from_rpc` turns them back, so that one form
serves vLLM's in-process, multiprocess and HTTP paths. Unknown fields are errors.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from vllm_refit_ext.core.errors import ConfigError, Problem, WireError
from vllm_refit_ext.core.protocol import PROTOCOL, Numbered, check_protocol, checksum
from vllm_refit_ext.core.table import MAX_BYTES, MAX_RANKS, Column, PackedPlacements

DEADLINE_S = 300.0
"""Seconds that a refit may take, unless the caller says otherwise."""

Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
Nonce = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
"""Numbers that a peer may send. What lies outside is a problem of the message, and no overflow somewhere behind it."""

WireName = Literal["shm", "ipc", "nixl", "ring", "collective"]
"""How bytes move. `shm`: shared memory of one host. `ipc`: CUDA IPC on one host. `nixl`: engines READ over NIXL, from any
host. `ring`: rings of buffers that trainer ranks fill for engines of their host. `collective`: shard to shard over NCCL or gloo.
The field of `UpdateInfo` with this name holds the wire's own part."""

CachePolicy = Literal["reset", "reset_running", "keep"]
"""What a commit does with caches computed from older weights. `reset`: clear the prefix and encoder caches; refused before
anything is written while requests run. `reset_running`: preempt running requests, so that they are computed again. `keep`: leave
them; the caller accepts results that mix versions. See `engine.caches`."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class Envelope(Message, frozen=True, kw_only=True):
    """Base of the messages that cross by themselves. protocol: see `core.protocol`; a peer of another number refuses."""

    protocol: int = PROTOCOL


class PrepareReply(Envelope, frozen=True, kw_only=True):
    """What one engine rank answers to `prepare_refit_info`.

    rank: this worker's rank in its engine. engine: what serves, and its version. problems: what keeps this rank from taking part.
    targets: the boxes it needs, in checkpoint coordinates. digest: of its part of the plan, empty while there are problems.
    dropped: names its loaders skip on this rank, with the reason. reload: names that take the engine's own reload, with the
    reason. casts: names whose elements are converted on the way, and how. quantise: names that it wants as MXFP8. layouts:
    buffers by layout. kept: engine parameters and offered tensors that stay as they are, with the patterns that say so.
    extra_bytes: peak memory a refit needs beyond the model. wire_bytes: what a refit brings to this rank. host: of this worker,
    see `core.hosts`. seconds: by phase.
    """

    rank: int
    engine: str = ""
    problems: list[Problem] = []
    targets: PackedPlacements | None = None
    digest: str = ""
    dropped: dict[str, str] = {}
    reload: dict[str, str] = {}
    kept: dict[str, list[str]] = {}
    casts: dict[str, str] = {}
    quantise: list[str] = []
    layouts: dict[str, int] = {}
    extra_bytes: int = 0
    wire_bytes: int = 0
    host: str = ""
    seconds: dict[str, float] = {}

    @property
    def ok(self) -> bool:
        """Whether this rank can take part in a refit."""
        return not self.problems


class Segment(Message, frozen=True, kw_only=True):
    """A shared-memory file that one trainer rank filled. nonce: stands in its header and changes with every refit. host: of the
    trainer rank, for errors."""

    rank: Rank
    name: str
    nbytes: Bytes
    nonce: Nonce
    host: str = ""


class ShmInfo(Message, frozen=True, kw_only=True):
    """Where the sources lie for wire `shm`. offsets: per source buffer, bytes from its rank's segment start, or -1."""

    segments: list[Segment]
    offsets: Column


class CollectiveInfo(Message, frozen=True, kw_only=True):
    """The rendezvous of wire `collective`: the store at host and port, the ranks on both sides, most payload bytes of a round."""

    host: str
    port: Port
    backend: Literal["gloo", "nccl"]
    trainers: Rank
    engines: Rank
    bucket_bytes: Bytes


class IpcRank(Message, frozen=True, kw_only=True):
    """One trainer rank's memory for wire `ipc`. process, device: who made the handles, on which GPU (UUID). epoch: names the
    handles, which are in `export` when this epoch is new. nonce: the word that stands in its memory during this refit. resident:
    mappings may stay open. host: of the trainer rank, for errors. All empty for a rank that nothing is read from.
    """

    rank: Rank
    process: str = ""
    device: str = ""
    epoch: str = ""
    nonce: Nonce = 0
    export: bytes | None = None
    resident: bool = False
    host: str = ""


class IpcInfo(Message, frozen=True, kw_only=True):
    """Where the sources lie for wire `ipc`."""

    ranks: list[IpcRank]


class NixlRank(Message, frozen=True, kw_only=True):
    """One trainer rank's memory for wire `nixl`. epoch: names what is registered, which is in `export` when this epoch is new.
    nonce: the word that stands in its memory during this refit. host: of the trainer rank, for errors. All empty for a rank that
    nothing is read from."""

    rank: Rank
    epoch: str = ""
    nonce: Nonce = 0
    export: bytes | None = None
    host: str = ""


class NixlInfo(Message, frozen=True, kw_only=True):
    """Where the sources lie for wire `nixl`, and most payload bytes of a round."""

    ranks: list[NixlRank]
    bucket_bytes: Bytes


class RingRank(Message, frozen=True, kw_only=True):
    """One trainer rank's ring for wire `ring`. name: of the file with the words. slots: bytes of a buffer for each engine
    rank. start: where the buffers begin in that file when they are not on a GPU. handle, device, address, process: the memory on
    a GPU. epoch: number of this refit among those of the ring, from 1. host: of the trainer rank, for errors. The ring's file
    has a digest of all this but the epoch."""

    rank: Rank
    name: str
    slots: list[Bytes]
    start: Bytes
    handle: bytes = b""
    device: str = ""
    address: Address = 0
    process: str = ""
    epoch: Count = 0
    host: str = ""


class RingInfo(Message, frozen=True, kw_only=True):
    """The rings of all trainer ranks, most payload bytes of a message, and the number of engine ranks."""

    rings: list[RingRank]
    bucket_bytes: Bytes
    engines: Rank


class UpdateInfo(Envelope, frozen=True, kw_only=True):
    """The argument of `update_weights`.

    version: opaque name of the new weights, set at commit. session: a name for this attempt, the same on all ranks. digests: by
    engine rank as text, the digest of its part of the plan as the caller planned it; empty skips the check, for a caller that
    did not plan. deadline_s: seconds from the start of the call within which every wait must end. caches: see `CachePolicy`.
    sample: moves that each rank recomputes by the reference and compares before the commit, drawn anew for each session.
    hash_reloaded: take digests of what goes through the engine's own reload, which can't be read back, so that `refit_verify` can
    compare it; costs a pass over these bytes on the host. part: names or globs of the checkpoint tensors that are sent, see
    `core.part`; empty for all. checksum: of all other fields, made by `to_rpc`; empty in a message that was written by hand.
    """

    wire: WireName
    version: str
    session: str
    digests: dict[str, str] = {}
    deadline_s: Seconds = DEADLINE_S
    caches: CachePolicy = "reset"
    sample: Count = 0
    hash_reloaded: bool = False
    part: list[str] = []
    checksum: str = ""
    shm: ShmInfo | None = None
    ipc: IpcInfo | None = None
    nixl: NixlInfo | None = None
    ring: RingInfo | None = None
    collective: CollectiveInfo | None = None


class Published(Envelope, frozen=True, kw_only=True):
    """What an engine learns of a version that it takes, as a document of its publisher (msgpack). update: all but the session,
    the deadline and the policy for caches, which are the engine's own. unused: offered tensors that nobody need read. keep: as
    `prepare_refit_info` takes it."""

    update: UpdateInfo
    unused: list[str] = []
    keep: list[str] = []


class UpdateReport(Message, frozen=True, kw_only=True):
    """What one engine rank did in a refit. seconds: by phase. received: bytes by source rank as text, of the moves that were
    executed, as they were sent.
    forwarded: bytes by name of the replica that they were read from; they are not in `received`.
    launches: kernels that wrote. sampled: moves that were recomputed by the reference and found equal. kept: engine parameters
    and offered tensors that stayed as they were, by the user's wish.
    """

    rank: int
    version: str
    writer: str
    seconds: dict[str, float] = {}
    received: dict[str, int] = {}
    forwarded: dict[str, int] = {}
    moves: int = 0
    launches: int = 0
    sampled: int = 0
    kept: list[str] = []


class TakeReply(Envelope, frozen=True, kw_only=True):
    """What one engine rank answers to `refit_take`. problems: why nothing was taken. taken: whether a version was; where the
    newest is served already, or nothing is published, it is not. version, epoch: what is served now, and its publication.
    received: as in `UpdateReport`. replica: how this rank hands on what it serves, with the memory that takes, or why it does
    not. seconds: by phase: `find` (registry and lease), `prepare` where the offer was new, and those of the refit: `register`
    (what is read is opened), `read` (waiting for bytes), `write`, `commit`, and agreements."""

    rank: int
    problems: list[Problem] = []
    taken: bool = False
    version: str = ""
    epoch: str = ""
    received: dict[str, int] = {}
    replica: str = ""
    seconds: dict[str, float] = {}


class Status(Envelope, frozen=True, kw_only=True):
    """State of one engine rank. state: unprepared, ready, receiving, torn. version: the weights that it serves. since: when they
    were committed, in seconds since 1970 on that host. epoch: of their publication, where the engine took them. parts: where
    partial refits mixed versions, the version of each pattern, later ones over earlier ones; `*` is the last full one.
    following: the registry that the engine follows, how often it looks, and what keeps it from taking. skipped: versions that it
    saw there and did not take, the last ones. replica: as in `TakeReply`.
    """

    rank: int
    state: str = "unprepared"
    version: str = ""
    prepared: str = ""
    problems: list[Problem] = []
    last: UpdateReport | None = None
    caches: str = ""
    since: float = 0.0
    epoch: str = ""
    parts: dict[str, str] = {}
    following: str = ""
    skipped: list[str] = []
    replica: str = ""


class VerifyReply(Envelope, frozen=True, kw_only=True):
    """problems: why there are no digests. digests: of one engine rank's part of the plan, by tensor as hexadecimal. reloaded:
    names whose live bytes can't be read back in canonical form, so it is a digest of what the engine's reload got.
    unhashed: names without a digest, as the last refit was not asked for one (`UpdateInfo.hash_reloaded`). differs: names that
    differ from what was expected, in plan order."""

    rank: int
    problems: list[Problem] = []
    version: str = ""
    digests: dict[str, str] = {}
    reloaded: list[str] = []
    unhashed: list[str] = []
    differs: list[str] = []


def to_rpc(message: Message) -> dict[str, Any]:
    """`message` as JSON-like values, summed up where it has a checksum."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if "checksum" in plain:
        with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):  # the reader refuses it, and says why
            plain["checksum"] = checksum(msgspec.convert(plain, type(message)))
    return plain


M = TypeVar("M", bound=Message)


def from_rpc(kind: type[M], value: object, where: str) -> M:
    """Read a message of type `kind`. `where` names the call in the error. Raises ConfigError."""
    try:
        if issubclass(kind, Envelope):
            check_protocol(msgspec.convert(value, Numbered).protocol, where)
        message = msgspec.convert(value, kind)
        msgspec.msgpack.encode(message)
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError, RecursionError) as error:
        do = "see docs/wires.md for its fields"
        raise ConfigError(
            f"{where} got a message it can't read: {error}", where=where, got=repr(value)[:120], wanted=kind.__name__, do=do
        ) from None
    return message


T = TypeVar("T")


def decoded(kind: type[T], raw: bytes, where: str, what: str = "what a peer left there can't be read") -> T:
    """What a peer wrote as msgpack. what, where: for the error. Raises WireError."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        do = "run the same version of this project on both sides"
        raise WireError(what, where=where, got=str(error)[:200], wanted=getattr(kind, "__name__", str(kind)), do=do) from None


Digests = dict[str, dict[str, str]]
"""What each engine rank is to hold: rank as text -> tensor -> 16 hexadecimal digits, see `core.digest`."""


def read_digests(value: object) -> Digests:
    """The argument of `refit_verify`; None is no digests. Raises ConfigError."""
    try:
        digests: Digests = msgspec.convert({} if value is None else value, Digests)
        msgspec.msgpack.encode(digests)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        wanted = "rank as text -> tensor -> hexadecimal digits"
        raise ConfigError(
            f"refit_verify got digests it can't read: {error}", where="refit_verify", got=repr(value)[:120], wanted=wanted
        ) from None
    return digests
