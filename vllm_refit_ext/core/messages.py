"""The messages of a refit, as plain data: what an RPC carries in `docs/wire.md`'s words.

Every message crosses as JSON-like values: `to_rpc` turns bytes into base64 text, `from_rpc` turns them back, so that one form
serves vLLM's in-process, multiprocess and HTTP paths. Unknown fields are errors.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.table import Column, PackedPlacements

PROTOCOL = 1
"""Raised when a message changes so that an older peer would misread it. Peers with different numbers refuse each other."""

DEADLINE_S = 300.0
"""Seconds that a refit may take, unless the caller says otherwise."""

WireName = Literal["shm", "ipc", "ipc_staged", "collective"]
"""How bytes travel. `shm`: shared memory of one host. `ipc`: CUDA IPC on one host. `ipc_staged`: rings of buffers on each host,
which trainer ranks fill for their own host and relay for others. `collective`: shard to shard over NCCL or gloo. The field of
`UpdateInfo` with this name holds the wire's own part."""

CachePolicy = Literal["reset", "reset_running", "keep"]
"""What a commit does with caches computed from older weights. `reset`: clear the prefix and encoder caches; refused before
anything is written while requests run. `reset_running`: preempt running requests, so that they are computed again. `keep`: leave
them; the caller accepts results that mix versions. See `receiver.caches`."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""


class PrepareReply(Message, frozen=True, kw_only=True):
    """What one engine rank answers to `prepare_refit_info`.

    rank: this worker's rank in its engine. targets: the boxes it needs, in checkpoint coordinates. digest: of its share of the
    plan, empty while there are problems or where the sources were not given. reads: names it reads. dropped: names its loaders
    skip on this rank, with the reason. reload: names that take the engine's own reload, with the reason. quantise: names that it
    wants as MXFP8. kept: engine parameters and offered tensors that stay as they are, with the patterns that say so. extra_bytes:
    peak memory a refit needs beyond the model. site: of this worker, see `core.sites`. seconds: by phase.
    """

    rank: int
    protocol: int = PROTOCOL
    engine: str = ""
    problems: list[Problem] = []
    targets: PackedPlacements | None = None
    digest: str = ""
    dropped: dict[str, str] = {}
    reload: dict[str, str] = {}
    kept: dict[str, list[str]] = {}
    quantise: list[str] = []
    layouts: dict[str, int] = {}
    extra_bytes: int = 0
    wire_bytes: int = 0
    site: str = ""
    seconds: dict[str, float] = {}

    @property
    def ok(self) -> bool:
        """Whether this rank can take part in a refit."""
        return not self.problems


class Segment(Message, frozen=True, kw_only=True):
    """A shared-memory file that one trainer rank filled. nonce: stands in its header and changes with every refit. site: of the
    trainer rank, for errors."""

    rank: int
    name: str
    nbytes: int
    nonce: int
    site: str = ""


class ShmInfo(Message, frozen=True, kw_only=True):
    """Where the sources lie for wire `shm`. offsets: per source buffer, bytes from its rank's segment start, or -1."""

    segments: list[Segment]
    offsets: Column


class CollectiveInfo(Message, frozen=True, kw_only=True):
    """Where to meet for wire `collective`: the store at host and port, the ranks on both sides, most payload bytes of a round.
    forwarding: names the tables in the store, where engine ranks of one site hand boxes to each other; else empty.
    """

    host: str
    port: int
    backend: Literal["gloo", "nccl"]
    trainers: int
    engines: int
    bucket_bytes: int
    forwarding: str = ""


class IpcRank(Message, frozen=True, kw_only=True):
    """One trainer rank's memory for wire `ipc`. process, device: who made the handles, on which GPU (UUID). epoch: names the
    handles, which are in `export` when this epoch is new. nonce: the word that stands in its memory during this refit. resident:
    mappings may stay open. site: of the trainer rank, for errors. All empty for a rank that nothing is read from.
    """

    rank: int
    process: str = ""
    device: str = ""
    epoch: str = ""
    nonce: int = 0
    export: bytes | None = None
    resident: bool = False
    site: str = ""


class IpcInfo(Message, frozen=True, kw_only=True):
    """Where the sources lie for wire `ipc`."""

    ranks: list[IpcRank]


class RingInfo(Message, frozen=True, kw_only=True):
    """One trainer rank's ring for wire `ipc_staged`. name: of the file with the words. slots: bytes of a buffer for each engine
    rank. start: where the buffers begin in that file when they are not on a GPU. handle, device, address, process: the memory on
    a GPU. nonce: the word that stands in the ring during this refit. site: of the trainer rank, for errors."""

    rank: int
    name: str
    slots: list[int]
    start: int
    handle: bytes = b""
    device: str = ""
    address: int = 0
    process: str = ""
    nonce: int = 0
    site: str = ""


class IpcStagedInfo(Message, frozen=True, kw_only=True):
    """The rings of all trainer ranks, most payload bytes of a bucket, and the number of engine ranks.

    lanes: int64 [n, 3], sorted: (trainer rank, engine rank, relay). What the plan takes from that trainer rank for that engine
    rank lies in the relay's ring; every other message lies in the ring of the rank that holds it. None: there are no lanes.
    host, port: of the store in which trainer ranks of several sites meet; engine ranks do not.
    """

    rings: list[RingInfo]
    bucket_bytes: int
    engines: int
    lanes: Column | None = None
    host: str = ""
    port: int = 0


class UpdateInfo(Message, frozen=True, kw_only=True):
    """What `update_weights` is told.

    version: opaque name of the new weights, set at commit. session: a name for this attempt, the same on all ranks. digests: by
    engine rank as text, the digest of its share of the plan; empty: the caller did not plan, and nothing is compared. deadline_s:
    seconds from the start of the call within which every wait must end. sample: moves that each rank recomputes by the reference
    and compares before the commit, drawn anew for each session.
    """

    wire: WireName
    version: str
    session: str
    digests: dict[str, str] = {}
    deadline_s: float = DEADLINE_S
    caches: CachePolicy = "reset"
    sample: int = 0
    shm: ShmInfo | None = None
    ipc: IpcInfo | None = None
    ipc_staged: IpcStagedInfo | None = None
    collective: CollectiveInfo | None = None


class UpdateReport(Message, frozen=True, kw_only=True):
    """What one engine rank did in a refit. seconds: by phase. received: bytes by source rank as text, as they travelled.
    forwarded: bytes by engine rank of its site as text, that handed them on; they are not in `received`.
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


class Status(Message, frozen=True, kw_only=True):
    """State of one engine rank. state: unprepared, ready, receiving, torn. version: the weights that it serves."""

    rank: int
    state: str = "unprepared"
    version: str = ""
    prepared: str = ""
    problems: list[Problem] = []
    last: UpdateReport | None = None
    caches: str = ""


class VerifyReply(Message, frozen=True, kw_only=True):
    """problems: why there are no digests. Digests of one engine rank's share, by tensor as hexadecimal text. staged: names whose
    live bytes can't be read back in canonical form, so that the digest is of what was handed to the engine's own reload. differs:
    names that differ from what was expected, in plan order."""

    rank: int
    problems: list[Problem] = []
    version: str = ""
    digests: dict[str, str] = {}
    staged: list[str] = []
    differs: list[str] = []


def to_rpc(message: Message) -> dict[str, Any]:
    """`message` as JSON-like values."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    return plain


M = TypeVar("M", bound=Message)


def from_rpc(kind: type[M], value: object, where: str) -> M:
    """Read a message of type `kind`. `where` names the call in the error. Raises ConfigError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        do = "see docs/wire.md for its fields"
        raise ConfigError(
            f"{where} got a message it can't read: {error}", where=where, got=repr(value)[:120], wanted=kind.__name__, do=do
        ) from None
