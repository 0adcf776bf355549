"""Pieces: how memory is cut, who takes what from whom, and that sources give equally."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_refit_ext.core.pieces import ALIGN, PIECES, Peer, cut, given_by, next_step, part

sizes_ = st.lists(st.integers(0, 1 << 20).map(lambda n: 4 * n), max_size=60)


@given(sizes_)
def test_pieces_are_neighbours_of_equal_bytes(sizes: list[int]) -> None:
    piece = cut(sizes)
    assert len(piece) == len(sizes)
    assert sorted(piece.tolist()) == piece.tolist()
    assert set(piece.tolist()) == set(range(len(set(piece.tolist()))))
    assert len(set(piece.tolist())) <= PIECES
    total = sum(sizes)
    for p in set(piece.tolist()):
        mine = [s for s, q in zip(sizes, piece.tolist(), strict=True) if p == q]
        assert sum(mine) <= total / PIECES + 2 * max(mine) + 1


@given(sizes_, st.integers(1, 9))
def test_parts_are_all_bytes_once_and_equal(sizes: list[int], of: int) -> None:
    seen = [np.zeros(s, np.int8) for s in sizes]
    shares = []
    for number in range(of):
        boxes = part(sizes, number, of)
        for region, low, high in boxes:
            assert low % ALIGN == 0
            assert high % ALIGN == 0 or high == sizes[region]
            seen[region][low:high] += 1
        shares.append(sum(high - low for _, low, high in boxes))
    assert all((s == 1).all() for s in seen)
    assert max(shares) - min(shares) <= 3 * ALIGN


class Rank:
    """A rank that takes: what the registry says of it, and what it read, as (source, piece)."""

    def __init__(self, epoch: str, host: str, shares: bool = True) -> None:
        self.epoch, self.host, self.shares = epoch, host, shares
        self.done: set[int] = set()
        self.claim = -1
        self.took: dict[str, int] = {}
        self.read: list[tuple[str, int]] = []
        self.first, self.dead = zlib.crc32(epoch.encode()), False


def turn(rank: Rank, ranks: list[Rank], pieces: int, trainer: bool, stalled: bool = False) -> bool:
    """One look at the registry and, where there is something to do, one step of its two halves. False where it has to wait."""
    if rank.claim >= 0:  # the second half: what was claimed is there now
        rank.done.add(rank.claim)
        rank.claim = -1
        return True
    living = [r for r in ranks if not r.dead]
    given = given_by([r.took for r in living])
    others = [
        Peer(r.epoch, r.host == rank.host, set(r.done), r.claim, given.get(r.epoch, 0))
        for r in living
        if r is not rank and r.shares
    ]
    place = sum(p.near for p in others)
    first = place * pieces // (place + 1) if place else rank.first % pieces
    step = next_step(pieces, rank.done, others, trainer, given.get("", 0), first, rank.shares, stalled)
    if step is None:
        return False
    for source in step.sources or ("",):
        rank.read.append((source, step.piece))
        rank.took[source] = rank.took.get(source, 0) + 1_000_000 // max(len(step.sources), 1)
    if step.claimed:
        rank.claim = step.piece
    else:
        rank.done.add(step.piece)
    return True


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 40), st.randoms(use_true_random=False))
def test_each_piece_comes_to_a_host_once(hosts: int, engines: int, pieces: int, random: object) -> None:
    ranks = [Rank(f"{h}.{e}", f"h{h}") for h in range(hosts) for e in range(engines)]
    while open_ranks := [r for r in ranks if len(r.done) < pieces]:
        turn(random.choice(open_ranks), ranks, pieces, True)  # type: ignore[attr-defined]
    for host in {r.host for r in ranks}:
        near = {r.epoch for r in ranks if r.host == host}
        come = Counter(p for r in ranks if r.host == host for s, p in r.read if s not in near)
        assert come == Counter(range(pieces))
    # each rank has each piece once, from one place or in parts
    assert all(len({p for _, p in r.read}) == pieces for r in ranks)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.booleans(), st.randoms(use_true_random=False))
def test_a_late_rank_reads_what_others_have_in_equal_parts(count: int, pieces: int, trainer: bool, random: object) -> None:
    ranks = [Rank(str(n), "here") for n in range(count)]
    for rank in ranks:
        rank.done = set(range(pieces))
    late = Rank("late", "here")
    while len(late.done) < pieces:
        assert turn(late, [*ranks, late], pieces, trainer)
    assert late.took.keys() == {r.epoch for r in ranks}, "nothing of the trainer"
    assert max(late.took.values()) <= 1.05 * min(late.took.values())


def test_many_hosts_that_join_together_make_a_tree() -> None:
    """The trainer gives about what everybody gives: nobody feeds all."""
    pieces, hosts = 32, 16
    ranks = [Rank(str(h), f"h{h}") for h in range(hosts)]
    while any(len(r.done) < pieces for r in ranks):
        for rank in ranks:
            if len(rank.done) < pieces:
                turn(rank, ranks, pieces, True)
    given = given_by([r.took for r in ranks])
    assert sum(given.values()) == hosts * pieces * 1_000_000
    assert given[""] >= pieces * 1_000_000, "each byte leaves it at least once"
    assert given[""] <= 3 * pieces * 1_000_000
    assert max(n for s, n in given.items() if s) <= 3 * pieces * 1_000_000


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 30), st.integers(0, 60), st.randoms(use_true_random=False))
def test_a_rank_that_dies_costs_the_others_no_piece(count: int, pieces: int, when: int, random: object) -> None:
    """Its entry ends; or it is only stopped, and the others read what it claims once they have waited."""
    for stopped in (False, True):
        ranks = [Rank(str(n), "here") for n in range(count)]
        victim, turns = ranks[0], 0
        while waiting := [r for r in ranks if len(r.done) < pieces and not (r is victim and turns >= when)]:
            turns += 1
            victim.dead = victim.dead or (turns >= when and not stopped)
            going = [turn(r, ranks, pieces, True) for r in waiting]
            if not any(going):
                assert stopped
                assert all(turn(r, ranks, pieces, True, stalled=True) for r in waiting)
        assert all(r.done == set(range(pieces)) for r in ranks[1:])


def test_nobody_has_it() -> None:
    assert next_step(2, {0}, [Peer("a", True, {0})], False, 0, 0, True, True) is None
    assert cut([]).tolist() == []
    assert part([], 0, 2) == []
