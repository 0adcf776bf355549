"""The registry: states, leases and documents in a real store, over loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError, WireError
from vllm_refit_ext.wires import registry as registries
from vllm_refit_ext.wires.registry import Documents, Entry, Replica, StoreRegistry, find, serve, wait_for_leases


def soon() -> float:
    return time.monotonic() + 20.0


def entry(version: str, epoch: str, state: str) -> Entry:
    return Entry(version, epoch, state, "shm", publisher="a trainer")  # type: ignore[arg-type]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    address, store = serve()
    yield address
    del store


def test_a_version_goes_through_its_states(address: str) -> None:
    publisher, taker = StoreRegistry(address), StoreRegistry(address)
    assert taker.entries(soon()) == []
    publisher.put(entry("v1", "a", "staging"), soon())
    assert find(taker.entries(soon()), "", latest=True) is None
    with pytest.raises(SessionError, match="staging"):
        taker.lease("a", "engine", soon())
    publisher.put(entry("v1", "a", "ready"), soon())
    taker.lease("a", "engine", soon())
    publisher.put(entry("v2", "b", "ready"), soon())
    publisher.put(entry("v1", "a", "releasing"), soon())
    assert [e.version for e in taker.entries(soon())] == ["v1", "v2"], "the order is that of the first put"
    with pytest.raises(SessionError, match="releasing"):
        taker.lease("a", "late", soon())
    assert publisher.leases("a", soon()) == ["engine"]
    taker.lease("a", "engine", soon(), held=False)
    assert publisher.leases("a", soon()) == []
    publisher.put(entry("v1", "a", "gone"), soon())
    with pytest.raises(SessionError, match=r"wanted ready; the registry has 'v2'"):
        find(taker.entries(soon()), "v1")
    with pytest.raises(SessionError, match="gone"):
        taker.lease("a", "late", soon())


def test_nothing_of_a_version_is_left(address: str) -> None:
    registry = StoreRegistry(address)
    for n in range(20):
        digest = Documents(address, f"e{n}").put(b"x" * n, soon())
        registry.put(msgspec.structs.replace(entry(f"v{n}", f"e{n}", "ready"), offer=digest), soon())
        for holder in range(3):
            registry.lease(f"e{n}", f"engine {holder}", soon())
        registry.lease(f"e{n}", "engine 1", soon(), held=False)
        registry.put(entry(f"v{n}", f"e{n}", "gone"), soon())
        registry.leases(f"e{n}", soon())
    registry.put(entry("v", "last", "gone"), soon())
    keys = registry.connection.call(lambda store: store.call(lambda raw: raw.num_keys(), soon()), soon())
    # torch's own key, the entries, and the counters that the last look at each epoch made
    assert keys <= 2 + 20


def test_one_name_is_one_publication(address: str) -> None:
    registry = StoreRegistry(address)
    registry.put(entry("v1", "a", "ready"), soon())
    with pytest.raises(SessionError, match=r"version 'v1'.*already.*published by a trainer"):
        registry.put(entry("v1", "b", "staging"), soon())
    registry.put(entry("v1", "a", "gone"), soon())
    registry.put(entry("v1", "b", "staging"), soon())
    assert [e.epoch for e in registry.entries(soon())] == ["b"]


def test_publishers_at_once_lose_no_entry(address: str) -> None:
    def publish(who: int) -> None:
        registry = StoreRegistry(address)
        for n in range(10):
            registry.put(entry(f"{who}-{n}", f"{who}-{n}", "staging"), soon())
            registry.put(entry(f"{who}-{n}", f"{who}-{n}", "ready" if n % 2 else "gone"), soon())

    threads = [threading.Thread(target=publish, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = StoreRegistry(address).entries(soon())
    assert sorted(e.version for e in found) == sorted(f"{who}-{n}" for who in range(4) for n in range(1, 10, 2))
    assert {e.state for e in found} == {"ready"}


def test_who_sees_the_state_sees_the_leases(address: str) -> None:
    """Takers and a publisher at once: a lease that was given is seen by whoever put RELEASING, or was not given."""
    publisher = StoreRegistry(address)
    for n in range(8):
        epoch = f"e{n}"
        publisher.put(entry(f"v{n}", epoch, "ready"), soon())
        given: list[str] = []

        def take(holder: str, epoch: str = epoch, given: list[str] = given) -> None:
            try:
                StoreRegistry(address).lease(epoch, holder, soon())
                given.append(holder)
            except SessionError:
                pass

        threads = [threading.Thread(target=take, args=(f"engine {i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        publisher.put(entry(f"v{n}", epoch, "releasing"), soon())
        seen = publisher.leases(epoch, soon())
        for thread in threads:
            thread.join()
        assert set(given) <= set(seen)
        assert sorted(publisher.leases(epoch, soon())) == sorted(given)
        publisher.put(entry(f"v{n}", epoch, "gone"), soon())


def test_waiting_for_leases_ends(address: str) -> None:
    registry = StoreRegistry(address)
    registry.put(entry("v1", "a", "ready"), soon())
    registry.lease("a", "engine", soon())
    assert wait_for_leases(registry, "a", time.monotonic() + 0.1) == ["engine"]
    registry.lease("a", "engine", soon(), held=False)
    assert wait_for_leases(registry, "a", time.monotonic() + 20.0) == []


def test_leases_and_replicas_end_where_nobody_renews_them(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = StoreRegistry(address)
    registry.put(entry("v1", "a", "ready"), soon())
    monkeypatch.setattr(registries, "LEASE_S", 0.3)
    for holder in ("dies", "renews"):
        registry.lease("a", holder, soon())
    registry.put(replica("e1", expires=time.time() + 0.3), soon())
    Documents(address, "e1").put(b"info", soon())
    registry.lease("e1", "renews", soon())
    assert [e.epoch for e in registry.entries(soon())] == ["a", "e1"]
    registry.put(entry("v1", "a", "releasing"), soon())
    for _ in range(5):
        time.sleep(0.1)
        registry.lease("a", "renews", soon())  # also once nobody new gets one
    assert registry.leases("a", soon()) == ["renews"]
    assert [e.epoch for e in registry.entries(soon())] == ["a"]
    registry.put(entry("v1", "a", "gone"), soon())
    with pytest.raises(SessionError, match="gone"):
        registry.lease("a", "renews", soon())
    registry.leases("a", soon())
    keys = registry.connection.call(lambda store: store.call(lambda raw: raw.num_keys(), soon()), soon())
    assert keys <= 2 + 1 + 2, "torch's own key, the entries, the counter of the last look, a document that no entry names"


def replica(epoch: str, host: str = "h", claim: int = -1, done: dict[int, str] | None = None, expires: float = 0.0) -> Entry:
    what = Replica("a", host, "m", "layout", 4, done or {}, claim)
    return msgspec.structs.replace(entry("v1", epoch, "ready"), replica=what, expires=expires, number=1)


def test_one_rank_of_a_host_reads_a_piece(address: str) -> None:
    registry = StoreRegistry(address)
    registry.put(replica("e1", claim=0), soon())
    for claim, done in ((0, {}), (2, {0: "", 3: ""})):
        registry.put(replica("e1", claim=claim, done=done), soon())
        with pytest.raises(SessionError, match="reads this piece"):
            registry.put(replica("e2", claim=claim), soon())
    with pytest.raises(SessionError, match="reads this piece"):
        registry.put(replica("e2", claim=3), soon())
    registry.put(replica("e2", claim=1), soon())
    registry.put(replica("e3", "another host", claim=2), soon())
    given: list[int] = []

    def claim(who: int) -> None:
        mine = StoreRegistry(address)
        for piece in range(4):
            try:
                mine.put(replica(f"t{who}", "third", piece, {n: "" for n in given if n < 0}), soon())
                given.append(piece)
            except SessionError:
                pass

    threads = [threading.Thread(target=claim, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(r.claim, e.epoch) for e in registry.entries(soon()) if (r := e.replica) and r.host == "third"}) == len(
        {r.claim for e in registry.entries(soon()) if (r := e.replica) and r.host == "third"}
    )


def test_a_version_lives_in_its_replicas(address: str) -> None:
    registry = StoreRegistry(address)
    whole = dict.fromkeys(range(4), "")
    registry.put(entry("v1", "a", "ready"), soon())
    registry.put(replica("e1", done={0: ""}), soon())
    registry.put(replica("e2", done=whole), soon())
    found = find(registry.entries(soon()), "v1")
    assert found is not None
    assert found.epoch == "a", "the trainer's while it is there"
    registry.put(entry("v1", "a", "gone"), soon())
    for layout in ("", "layout"):
        found = find(registry.entries(soon()), "", True, layout)
        assert found is not None
        assert (found.epoch, found.of) == ("e2", "a")
    assert find(registry.entries(soon()), "", True, "another layout") is None
    registry.put(entry("v2", "b", "ready"), soon())
    found = find(registry.entries(soon()), "", True)
    assert found is not None
    assert found.version == "v2"


def test_documents_are_what_their_digest_says(address: str) -> None:
    documents = Documents(address)
    large = bytes(range(256)) * (9 << 12)
    digest = documents.put(large, soon())
    assert Documents(address).get(digest, soon()) == large
    with pytest.raises(WireError, match="lacks what its message names"):
        Documents(address, "another epoch").get(digest, soon())


def test_a_registry_that_comes_back_is_found_again(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    first, store = serve()
    registry = StoreRegistry(first)
    registry.put(entry("v1", "a", "ready"), soon())
    del store
    with pytest.raises(RefitError, match=f"registry at {first}"):
        registry.entries(soon())
    _, again = serve(int(first.rpartition(":")[2]))
    assert registry.entries(soon()) == []
    del again


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port", "host:99999", "host:0"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a registry"):
        StoreRegistry(address)
