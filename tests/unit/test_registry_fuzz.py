"""A registry that says anything: an engine that takes gets a listed problem, or the bytes that were published."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.support.mutate import SEEDS, mutated
from tests.support.small_engine import PlainSource, SmallTaker
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.wires.registry import VERSIONS, Documents, StoreRegistry

DEADLINE_S = 0.3
"""An address that is not there takes all of it."""


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[RefitSender]:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4, dtype=torch.bfloat16))
    made = RefitSender(PlainSource(module), None, SenderConfig(registry_port=0, deadline_s=20.0))
    made.prepare()
    made.publish("v1")
    yield made
    made.close()


class Registry:
    """The store behind a sender's registry, and an engine that takes from it."""

    def __init__(self, sender: RefitSender) -> None:
        self.address, self.outcomes = sender.registry, Counter[str]()
        self.registry, self.engine = StoreRegistry(sender.registry), SmallTaker(sender.registry)
        assert self.engine.take() == "v1"
        self.wanted = {n: t.clone() for n, t in self.engine.weights.items()}
        self.entries: list[Any] = json.loads(self.raw(lambda store: bytes(store.get(VERSIONS))))

    def raw(self, work: Any) -> Any:
        deadline = time.monotonic() + 20
        return self.registry.connection.call(lambda store: store.call(work, deadline), deadline)

    def say(self, entries: Any) -> None:
        text = entries if isinstance(entries, bytes) else json.dumps(entries, default=lambda odd: odd.hex())
        self.raw(lambda store: store.set(VERSIONS, text))

    def take(self) -> None:
        """A take of what the registry says now: nothing but a listed problem, and no other bytes."""
        try:
            self.engine.take("v1", DEADLINE_S)
            self.outcomes["taken"] += 1
        except RefitError as error:
            msgspec.msgpack.encode(error.problems)
            self.outcomes["refused"] += 1
        assert all(torch.equal(t, self.engine.weights[n]) for n, t in self.wanted.items())
        try:
            assert isinstance(self.registry.leases("an epoch", time.monotonic() + 5), list)
        except RefitError as error:
            msgspec.msgpack.encode(error.problems)


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_entries(sender: RefitSender, seeds: range) -> None:
    registry = Registry(sender)
    for seed in seeds:
        registry.say(mutated(registry.entries, seed))
        registry.take()
    for odd in (b"", b"[", b"\xff\xfe", b"[" * 5000, b"[{}]", b"{}"):
        registry.say(odd)
        registry.take()
    assert min(registry.outcomes["taken"], registry.outcomes["refused"]) > len(seeds) // 10
    registry.say(registry.entries)
    assert registry.engine.take("v1") == "v1", "what was said changed nothing that is kept"


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_messages_of_a_publisher(sender: RefitSender, seeds: range) -> None:
    """The message itself is another one, and its entry has the digest of that."""
    registry = Registry(sender)
    (entry,) = registry.entries
    documents = Documents(entry["documents"], entry["epoch"])
    plain = msgspec.msgpack.decode(documents.get(entry["message"], time.monotonic() + 5))
    for seed in seeds:
        raw = msgspec.msgpack.encode(mutated(plain, seed))
        digest = documents.put(raw, time.monotonic() + 5)
        assert digest == hashlib.sha256(raw).hexdigest()
        registry.say([entry | {"message": digest}])
        registry.take()
        registry.raw(
            lambda store, digest=digest: [store.delete_key(f"document/{entry['epoch']}/{digest}{e}") for e in ("", "/0")]
        )
    assert min(registry.outcomes["taken"], registry.outcomes["refused"]) > len(seeds) // 20


@pytest.mark.parametrize("value", ["", "x", "-1", "99999", "9" * 400, "\ud800"])
def test_a_document_or_a_lease_that_is_none(sender: RefitSender, value: str) -> None:
    registry = Registry(sender)
    (entry,) = registry.entries
    odd = value.encode(errors="surrogatepass")
    key = f"document/{entry['epoch']}/{entry['message']}"
    whole = registry.raw(lambda store: bytes(store.get(key)))
    registry.raw(lambda store: store.set(key, odd))
    registry.take()
    assert registry.outcomes["refused"] == 1
    registry.raw(lambda store: store.set(key, whole))
    epoch = entry["epoch"]
    registry.raw(lambda store: [store.add(f"leases/{epoch}", 1), store.set(f"lease/{epoch}/2", odd)])
    held = registry.registry.leases(epoch, time.monotonic() + 5)
    assert isinstance(held, list)
    registry.raw(lambda store: store.delete_key(f"lease/{epoch}/2"))


def test_more_leases_than_there_can_be(sender: RefitSender) -> None:
    registry = Registry(sender)
    epoch = registry.entries[0]["epoch"]
    registry.raw(lambda store: store.add(f"leases/{epoch}", 1 << 40))
    with pytest.raises(RefitError, match="more leases than there can be"):
        registry.registry.leases(epoch, time.monotonic() + 5)
    registry.raw(lambda store: store.add(f"leases/{epoch}", -(1 << 40)))
