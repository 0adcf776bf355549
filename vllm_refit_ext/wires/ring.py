"""Wire `ring`: through a ring of buffers that each trainer rank exports once, where its parameters can't be exported or
must move.

The trainer packs its part of the plan into buckets of bounded size, in plan order; a tensor larger than a bucket is cut; while
one bucket is written into the engine the next is packed. The engine reads the trainer's buffers where they lie, so the extra
memory is two buckets for each engine rank on the trainer's side, and on the engine's side only scales that are sent beside their
codes. Without a GPU the ring lies in shared memory, and everything else is the same.

An engine rank reads messages in the order (round, source), each from the ring of its source. A ring has RING buffers for an
engine rank, and a buffer holds one message. No two ranks wait for each other: a trainer rank fills buffers in the order (round,
target), and while it waits for one it shows what it launched before as that ends. Let m be the first message in the order (round,
target, source) that is not ready. All of that reader's messages before m are ready, so it reads on until it asks for m, and by
then it has given up all earlier rounds, so the buffer of m is free; and all that m's source fills before m is ready.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, WireError, gave_up
from vllm_refit_ext.core.hosts import Hosts, check_near
from vllm_refit_ext.core.messages import RingInfo, RingRank, UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires import BUCKET_BYTES
from vllm_refit_ext.wires.boxes import launched, wait_for
from vllm_refit_ext.wires.outgoing import outgoing, sent_by
from vllm_refit_ext.wires.ring_buffers import DONE, READY, STOP, RingMapping, seal_of
from vllm_refit_ext.wires.ring_send import WHERE, Part, RingSender, SendTable, rest_of
from vllm_refit_ext.wires.staging import RING, BucketReader, Staging, padded, rounds


class RingRounds(Staging):
    """The moves into one engine rank with the rings as their source. Kept from refit to refit.

    A source buffer of these plans is one message. messages: of each its trainer rank, its number among those of that rank, and
    bytes. slots: bytes of the largest message, by trainer rank.
    """

    def __init__(self, plan: Plan, bucket_bytes: int, device: torch.device) -> None:
        self.key = bucket_bytes, device
        cut = rounds(plan, bucket_bytes)
        found = [(number, m) for number, messages in enumerate(cut.messages) for m in messages]
        index = {(number, m.source): i for i, (number, m) in enumerate(found)}
        count: Counter[int] = Counter()
        self.messages: list[tuple[int, int, int]] = []
        self.slots: dict[int, int] = {}
        for _, m in found:
            self.messages.append((m.source, count[m.source], m.nbytes))
            self.slots[m.source] = max(self.slots.get(m.source, 0), m.nbytes)
            count[m.source] += 1
        keys = zip(cut.number.tolist(), cut.plan.source_rank.tolist(), strict=True)
        message = np.fromiter((index[key] for key in keys), np.int64, len(cut.plan))
        buffers = [(f"round {r} of trainer rank {m.source}", m.source, m.nbytes) for r, m in found]
        super().__init__(cut, message, cut.at, buffers, [r for r, _ in found], device)


class RingReader(BucketReader):
    """An engine rank's half, for one refit. rings: by trainer rank. epochs: of this refit. `token` changes with any address."""

    def __init__(self, laid: RingRounds, rings: dict[int, RingMapping], epochs: dict[int, int]) -> None:
        super().__init__(laid, WHERE)
        self._laid, self._rings, self._epochs = laid, rings, epochs
        self._deadline, self._done = 0.0, False
        self._leaving: deque[tuple[int, Callable[[], bool]]] = deque()
        # Addresses change only with the rings themselves.
        self.token = tuple((owner, ring.seal) for owner, ring in rings.items())

    def start(self, deadline: float) -> None:
        """There is no rendezvous: the words of the rings say what is there. deadline: time.monotonic seconds."""
        self._deadline = deadline

    def _bring(self, number: int) -> torch.Tensor:
        (source, count, nbytes), rank = self._laid.messages[number], self._laid.rank
        ring, where = self._rings[source], f"{WHERE}, engine rank {rank} from trainer rank {source}"
        ring.words.wait(rank, READY, count + 1, self._epochs[source], self._deadline, where, self._free)
        self.received[source] = self.received.get(source, 0) + nbytes
        # Seen as several dtypes, so it ends where all of them do; buffers are that long.
        memory = ring.slot(rank, count % RING)[: padded(nbytes)]
        kept = self._laid.kept.get(number)
        if kept is not None:
            kept.copy_(memory)
            self._give_up(number)
        return memory

    def _give_up(self, number: int) -> None:
        """Let the trainer fill the buffer again when what was launched here has read it."""
        self._leaving.append((number, launched(self._laid.device)))
        self._free()

    def _free(self) -> bool:
        """At every look: say which buffers are read. Nobody has given up by that."""
        while self._leaving and self._leaving[0][1]():
            source, count, _ = self._laid.messages[self._leaving.popleft()[0]]
            self._rings[source].words.write(self._laid.rank, DONE, self._epochs[source], count + 1)
        return False

    def confirm(self) -> None:
        """Raise WireError when rounds were left or a ring went on to another refit. Then the trainer may go on."""
        self._check_read()
        wait_for(self._laid.device)
        _check_epochs(self._rings, self._epochs)
        self._leaving += [(message, lambda: True) for message in self._here]  # nobody looks again at an event recorded now
        self._free()
        self._done = True

    def close(self) -> None:
        """Tell the trainer that this rank has given up, unless everything was read."""
        if not self._done:
            wait_for(self._laid.device)
            for owner, ring in self._rings.items():
                ring.words.write(self._laid.rank, STOP, self._epochs[owner])
        self._here = {}


def _check_epochs(rings: Mapping[int, RingMapping], epochs: Mapping[int, int]) -> None:
    """Raise WireError where a ring is in another refit than its epoch here, or its owner gave this one up."""
    do = "refit once more"
    problems = [
        Problem("the ring belongs to another refit", f"{WHERE}, trainer rank {o}", str(r.words.epoch), str(epochs[o]), do)
        if r.words.epoch != epochs[o]
        else gave_up(f"{WHERE}, trainer rank {o}")
        for o, r in rings.items()
        if r.words.stopped(epochs[o])
    ]
    if problems:
        raise WireError.of(problems)


class _Kept:
    """What an engine rank keeps between refits: of the last message that was accepted."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.laid: RingRounds | None = None
        self.rings: dict[int, RingMapping] = {}

    def close(self) -> None:
        """Unmap every ring."""
        for ring in self.rings.values():
            ring.close()
        self.rings, self.plan, self.laid = {}, None, None


def send_tables(plan: Plan, hosts: Hosts, bucket_bytes: int = BUCKET_BYTES) -> list[bytes]:
    """Cut the whole plan into the messages of the trainer's ranks.

    Raises ConfigError where an engine rank needs bytes of another host.
    """
    check_near("ring", plan.edges(), hosts)
    cuts = [rounds(plan.for_target(t), bucket_bytes) for t in range(len(hosts.engines))]
    pieces = [outgoing(sent_by(cuts, rank), plan, rank) for rank in range(len(hosts.trainers))]
    return [msgspec.msgpack.encode(SendTable(len(cuts), bucket_bytes, p)) for p in pieces]


def open_sender(rank: int, table: bytes, tensors: Sequence[torch.Tensor]) -> RingSender:
    """Allocate and export this rank's ring. Raises WireError when there is no room."""
    return RingSender(rank, msgspec.msgpack.decode(table, type=SendTable), tensors)


def info(parts: Sequence[bytes]) -> RingInfo:
    """The message for `update_weights`."""
    decoded = [msgspec.msgpack.decode(p, type=Part) for p in parts]
    return RingInfo(rings=[p.ring for p in decoded], bucket_bytes=decoded[0].bucket_bytes, engines=decoded[0].engines)


def open_reader(update: UpdateInfo, plan: Plan, kept: dict[str, Any]) -> RingReader:
    """Map the rings that this rank's plan reads, and check that they belong to this refit. Raises ConfigError, WireError."""
    message = update.ring
    if message is None:
        raise ConfigError("wire ring needs the field ring", where="update_weights", do="pass what the sender made")
    ranks = {b.rank for b in plan.targets}
    if ranks and (max(ranks) >= message.engines or message.bucket_bytes < 8):
        raise ConfigError(
            "this rank's number does not fit the message",
            where=WHERE,
            got=sorted(ranks),
            wanted=f"below {message.engines}",
            do="prepare again",
        )
    last: _Kept = kept.setdefault("ring", _Kept())
    on_gpu = any(r.handle for r in message.rings)
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("the trainer's ring is on a GPU and this engine has none", where=WHERE, do="use the wire shm")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    key = message.bucket_bytes, device
    laid = last.laid if last.laid is not None and last.plan is plan and last.laid.key == key else RingRounds(plan, *key)
    by_rank = {r.rank: r for r in message.rings}
    if len(by_rank) < len(message.rings):
        raise WireError("two rings were named for one trainer rank", where=WHERE, got=[r.rank for r in message.rings])
    _check_rings(laid, by_rank)
    rest, opened, problems = rest_of(message.bucket_bytes, message.engines), dict[int, RingMapping](), list[Problem]()
    for owner in laid.slots:
        ring = last.rings.get(owner)
        try:
            if ring is None or ring.seal != seal_of(by_rank[owner], rest):
                opened[owner] = RingMapping(by_rank[owner], device, rest)
        except WireError as error:
            problems += error.problems
    rings = {owner: opened[owner] if owner in opened else last.rings[owner] for owner in laid.slots if not problems}
    epochs = {owner: by_rank[owner].epoch for owner in rings}
    try:
        if problems:
            raise WireError.of(problems)
        _check_epochs(rings, epochs)
    except WireError:
        for ring in opened.values():
            ring.close()
        raise
    for owner, ring in last.rings.items():
        if rings.get(owner) is not ring:
            ring.close()
    last.plan, last.laid, last.rings = plan, laid, rings
    return RingReader(laid, rings, epochs)


def _check_rings(laid: RingRounds, rings: Mapping[int, RingRank]) -> None:
    """Raise WireError when rings are missing, ConfigError when they have other buffers than this rank's messages."""
    missing = sorted(set(laid.slots) - set(rings))
    if missing:
        raise WireError("no ring was named for trainer ranks that the plan reads", where=WHERE, got=missing, do="prepare again")
    for owner, nbytes in sorted(laid.slots.items()):
        slots = rings[owner].slots
        got = slots[laid.rank] if laid.rank < len(slots) else 0
        wanted = padded(nbytes)
        if got != wanted:
            where = f"{WHERE}, ring of trainer rank {owner}, engine rank {laid.rank}"
            raise ConfigError(
                "a ring has other buffers than the plan needs", where=where, got=got, wanted=wanted, do="prepare again"
            )
