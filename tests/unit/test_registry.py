"""The registry: states, leases and documents in a real store, over loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError, WireError
from vllm_refit_ext.wires.registry import Documents, Entry, StoreRegistry, find, serve, wait_for_leases


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
    registry, documents = StoreRegistry(address), Documents(address)
    for n in range(20):
        registry.put(entry(f"v{n}", f"e{n}", "ready"), soon())
        digest = documents.put(b"x" * n, soon())
        for holder in range(3):
            registry.lease(f"e{n}", f"engine {holder}", soon())
        registry.lease(f"e{n}", "engine 1", soon(), held=False)
        documents.drop(digest, soon())
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


def test_documents_are_what_their_digest_says(address: str) -> None:
    documents = Documents(address)
    large = bytes(range(256)) * (9 << 12)
    digest = documents.put(large, soon())
    assert Documents(address).get(digest, soon()) == large
    documents.drop(digest, soon())
    with pytest.raises(WireError, match="lacks what its message names"):
        documents.get(digest, soon())


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
