"""Who puts which message where, on wire `ring`: pure tables, equal on all ranks.

An engine rank reads messages in the order (round, source), each from the ring of one trainer rank of its own host: the source
itself, or the relay that the source sends it to. A ring has RING buffers for an engine rank, and a buffer holds one round: what
the ring's owner gives itself and what it passes on, one after another. So a ring needs two buckets for an engine rank however
many sources there are, and an engine rank has two words in it: how many messages are ready, how many are done with.

No two ranks wait for each other. Each trainer rank works through its messages, own and relayed, in one order for all: (round,
target, source). It may start a later message while earlier ones are under way, but it never blocks for a later one: before it
waits for a buffer it waits for all that is under way, in order. Let m be the first message of that order which is not ready for
its reader. Everything before m is ready, so both trainer ranks of m have come to it, or wait for something before it that ends by
itself: a send that was received, a receive whose bytes are there. The buffer that m goes into held messages of the same reader
from RING of its rounds ago. These and all of that reader's messages before m are ready, so it reads on until it asks for m, and
by then it has given up every earlier round. So m becomes ready, whatever the other readers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.relays import Relays
from vllm_refit_ext.wires.staging import RING, Message, Rounds, padded


class Place(msgspec.Struct, frozen=True):
    """Where a message lies: in buffer `half` of trainer rank `owner` for the engine rank, `at` bytes from its start.

    count: its number among that engine rank's messages in this ring. after: how many of those must be done with before it may be
    written.
    """

    owner: int
    count: int
    after: int
    half: int
    at: int


class Task(msgspec.Struct, frozen=True):
    """What a trainer rank does with a message to engine rank `target`.

    It packs one of its own into its ring (peer -1), packs and sends one of its own (count -1), or receives one from `peer` into
    its ring. tag: tells the messages between two trainer ranks apart. count, after, half, at: as in `Place`.
    """

    target: int
    nbytes: int
    count: int = -1
    after: int = 0
    half: int = 0
    at: int = 0
    peer: int = -1
    tag: int = 0

    @property
    def own(self) -> bool:
        """Whether this rank holds the bytes."""
        return self.peer < 0 or self.count < 0


def places(messages: Sequence[Sequence[Message]], relay: Mapping[int, int]) -> tuple[list[list[Place]], dict[int, int]]:
    """Places of one engine rank's messages, by round as in `Rounds`, and the bytes of a buffer in each ring that holds any.

    relay: source -> the rank that passes its messages on; a source that is not in it shows them itself.
    """
    found: list[list[Place]] = []
    ends: dict[int, list[int]] = {}
    slots: dict[int, int] = {}
    for here in messages:
        room: dict[int, int] = {}
        begun: dict[int, int] = {}
        row = []
        for message in here:
            owner = relay.get(message.source, message.source)
            done = ends.setdefault(owner, [0])
            count = begun.get(owner, done[-1])
            number = len(done) - 1  # rounds of this ring before this one
            at = room.get(owner, 0)
            row.append(Place(owner, count, done[max(0, number - RING + 1)], number % RING, at))
            begun[owner] = count + 1
            slots[owner] = max(slots.get(owner, 0), at + message.nbytes)
            room[owner] = padded(at + message.nbytes)
        for owner, count in begun.items():
            ends[owner].append(count)
        found.append(row)
    return found, slots


def schedule(cuts: Sequence[Rounds], relays: Relays, ranks: int) -> tuple[list[list[Task]], list[list[int]]]:
    """For each trainer rank its tasks in the one order of all messages, and the bytes of a ring buffer for each engine rank.

    cuts: the rounds of each engine rank.
    """
    tasks: list[list[Task]] = [[] for _ in range(ranks)]
    slots = [[0] * len(cuts) for _ in range(ranks)]
    by_target = []
    own: list[dict[int, int]] = [{} for _ in cuts]
    for (source, target), relay in relays.items():
        own[target][source] = relay
    for target, r in enumerate(cuts):
        found, sizes = places(r.messages, own[target])
        by_target.append(found)
        for owner, nbytes in sizes.items():
            slots[owner][target] = nbytes
    tags: dict[tuple[int, int], int] = {}
    for number in range(max((len(r.messages) for r in cuts), default=0)):
        for target, r in enumerate(cuts):
            if number >= len(r.messages):
                continue
            for message, place in zip(r.messages[number], by_target[target][number], strict=True):
                placed = {"count": place.count, "after": place.after, "half": place.half, "at": place.at}
                if place.owner == message.source:
                    tasks[place.owner].append(Task(target, message.nbytes, **placed))
                    continue
                pair = (message.source, place.owner)
                tag = tags[pair] = tags.get(pair, -1) + 1
                tasks[message.source].append(Task(target, message.nbytes, peer=place.owner, tag=tag))
                tasks[place.owner].append(Task(target, message.nbytes, peer=message.source, tag=tag, **placed))
    return tasks, slots


def table_of(tasks: Iterable[Task]) -> Int:
    """Tasks as a table, int64 [n, fields of Task]."""
    rows = [msgspec.structs.astuple(t) for t in tasks]
    return np.array(rows, np.int64).reshape(len(rows), len(Task.__struct_fields__))


def tasks_of(table: Int) -> list[Task]:
    """What `table_of` was made from."""
    return [Task(*row) for row in table.tolist()]
