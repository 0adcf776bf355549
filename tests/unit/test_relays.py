"""Which rank relays for whom, and where every message lies: pure tables, held to what the order argument needs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_refit_ext.core.errors import ConfigError, ManifestError
from vllm_refit_ext.core.hosts import HOST_ID, Hosts, apart, distances, not_shared
from vllm_refit_ext.core.manifest import Manifest, Offer, TensorSpec, pack_offer, parse_state_dict_info
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Edge, build_plan
from vllm_refit_ext.core.relays import choose_relays
from vllm_refit_ext.wires.ring_order import Task, places, table_of, tasks_of
from vllm_refit_ext.wires.staging import ALIGN, RING, Message


@st.composite
def edges_and_hosts(draw):
    """Trainer ranks on a few hosts, engine ranks on some of those, and bytes between any of them."""
    trainers = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
    engines = draw(st.lists(st.sampled_from(sorted(set(trainers))), min_size=1, max_size=6))
    pairs = [(s, t) for s in range(len(trainers)) for t in range(len(engines)) if draw(st.booleans())]
    edges = [Edge(s, t, draw(st.sampled_from([1, 5, 5, 100, 10**9])), 1) for s, t in pairs]
    return edges, Hosts(trainers, engines)


@given(edges_and_hosts())
@settings(max_examples=200, deadline=None)
def test_every_edge_between_hosts_has_a_relay_beside_its_reader_and_no_other_has(case):
    edges, hosts = case
    relays = choose_relays(edges, hosts)
    far = {(e.source, e.target) for e in edges if hosts.trainers[e.source] != hosts.engines[e.target]}
    assert set(relays) == far
    for (_, target), relay in relays.items():
        assert hosts.trainers[relay] == hosts.engines[target]
    assert relays == choose_relays(edges[::-1], hosts), "the order of the edges does not matter"
    # No rank of a host passes on more than the mean of its host and one edge.
    load: dict[int, int] = {}
    for e in edges:
        if (relay := relays.get((e.source, e.target))) is not None:
            load[relay] = load.get(relay, 0) + e.nbytes
    for host in set(hosts.engines):
        ranks = [r for r, s in enumerate(hosts.trainers) if s == host]
        total = sum(load.get(r, 0) for r in ranks)
        largest = max((e.nbytes for e in edges if (e.source, e.target) in far and hosts.engines[e.target] == host), default=0)
        assert max(load.get(r, 0) for r in ranks) <= total / len(ranks) + largest


def test_equal_edges_are_spread_evenly():
    hosts = Hosts(["a"] * 4 + ["b"] * 4, ["a"] * 4 + ["b"] * 4)
    edges = [Edge(s, t, 10, 1) for s in range(8) for t in range(8)]
    relays = choose_relays(edges, hosts)
    assert sorted(relays.values()) == sorted(list(range(8)) * 4)


def test_an_engine_rank_without_a_trainer_rank_beside_it_is_named():
    hosts = Hosts(["a", "a", "b"], ["a", "c", "c", "d", "b"])
    edges = [Edge(s, t, 1, 1) for s in range(3) for t in range(5)]
    with pytest.raises(ConfigError) as caught:
        choose_relays(edges, hosts)
    assert len(caught.value.problems) == 2, "one for each host"
    first = caught.value.problems[0]
    assert first.where == "engine ranks 1, 2 on 'c'"
    assert "trainer ranks 0, 1 on 'a'" in first.got
    assert "trainer rank 2 on 'b'" in first.got
    assert HOST_ID in first.do
    assert "collective" in first.do
    assert "engine rank 3 on 'd'" in str(caught.value)


def test_many_ranks_without_one_beside_them_make_a_short_error():
    hosts = Hosts(["a"] * 300, ["b"] * 300)
    with pytest.raises(ConfigError) as caught:
        choose_relays([Edge(0, t, 1, 1) for t in range(300)], hosts)
    assert "and 292 more" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_host_that_nobody_named_is_near_all():
    assert not apart("", "b")
    assert not apart("a", "")
    assert choose_relays([Edge(0, 0, 5, 1)], Hosts(["a"], [""])) == {}
    assert choose_relays([Edge(0, 0, 5, 1)], Hosts.single(1, 1)) == {}
    assert distances(["a", "b", ""], {2: "a", 0: "b"}).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_what_to_do_about_memory_that_can_not_be_opened(monkeypatch):
    monkeypatch.setenv(HOST_ID, "here")
    assert "'there'" in not_shared("there")
    assert "'here'" in not_shared("there")
    assert HOST_ID in not_shared("there")
    assert HOST_ID not in not_shared("here")
    assert HOST_ID not in not_shared("")


def test_hosts_are_sent_in_the_offer_and_near_copies_are_read():
    manifest = Manifest({"t": TensorSpec((4,), "float32")})
    rows = [Placement("t", r, (0,), (4,), 0, (4,)) for r in range(3)]
    sources = Placements.from_rows([Buffer("t", r, "float32", (4,)) for r in range(3)], rows)
    offer = parse_state_dict_info(pack_offer(Offer(manifest, sources, 5, ("a", "b", "c"))))
    assert (offer.first_rank, offer.hosts) == (5, ("a", "b", "c"))
    targets = Placements.from_rows([Buffer("t", 5, "float32", (4,))], [Placement("t", 0, (0,), (4,), 0, (4,))])
    for near, rank in (("a", 0), ("b", 1), ("c", 2)):
        plan = build_plan(manifest, sources, targets, distances(offer.hosts, {5: near}))
        assert plan.source_rank.tolist() == [rank]
    with pytest.raises(ManifestError, match="have no host"):
        parse_state_dict_info(pack_offer(Offer(manifest, sources, 0, ("a", "b"))))
    assert parse_state_dict_info(pack_offer(Offer(manifest, sources))).hosts == ()


@st.composite
def rounds_and_relays(draw):
    """Messages of a few rounds from any sources, and relays for some of them."""
    sources = draw(st.integers(1, 6))
    relay = {s: draw(st.integers(6, 7)) for s in range(sources) if draw(st.booleans())}
    messages = []
    for _ in range(draw(st.integers(0, 7))):
        here = sorted(draw(st.sets(st.integers(0, sources - 1), min_size=1)))
        messages.append([Message(s, 0, draw(st.integers(1, 3 * ALIGN))) for s in here])
    return messages, relay


@given(rounds_and_relays())
@settings(max_examples=200, deadline=None)
def test_seats_never_overlap_while_a_reader_may_still_look_at_them(case):
    messages, relay = case
    found, slots = places(messages, relay)
    for owner in slots:
        mine = [
            (number, message, slot)
            for number, (here, row) in enumerate(zip(messages, found, strict=True))
            for message, slot in zip(here, row, strict=True)
            if slot.owner == owner
        ]
        assert [slot.count for _, _, slot in mine] == list(range(len(mine))), "numbered in the order (round, source)"
        for number, message, slot in mine:
            assert relay.get(message.source, message.source) == owner
            assert slot.at % ALIGN == 0
            assert slot.at + message.nbytes <= slots[owner]
            assert slot.after <= slot.count
            # A reader gives up a round when it asks for the next; so at least the round before must still be spared.
            before = [n for n, _, other in mine if other.count < slot.count and n < number]
            if before:
                last = max(before)
                assert all(n != last for n, _, other in mine if other.count < slot.after), "the reader may hold the round before"
            for n, m, other in mine:
                overlap = slot.half == other.half and slot.at < other.at + m.nbytes and other.at < slot.at + message.nbytes
                if overlap and other.count < slot.count:
                    assert n < number
                    assert other.count < slot.after, "it was given up before it is written over"


def test_one_source_has_two_buffers_in_turn():
    found, slots = places([[Message(3, 0, 100)], [Message(3, 0, 300)], [Message(3, 0, 1)]], {})
    assert [(s.owner, s.count, s.after, s.half, s.at) for (s,) in found] == [(3, 0, 0, 0, 0), (3, 1, 0, 1, 0), (3, 2, 1, 0, 0)]
    assert slots == {3: 300}
    assert RING == 2


def test_tasks_are_sent_as_a_table():
    given_ = [Task(1, 2, count=3, after=4, half=1, at=256, peer=5, tag=6), Task(0, 9)]
    assert tasks_of(table_of(given_)) == given_
    assert tasks_of(table_of([])) == []
