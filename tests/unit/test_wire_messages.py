"""A mutation of what a wire receives is refused by name, or changes nothing: the readers of real files and a real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.mutate import mutated
from tests.support.ring_ranks import crossed
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.wires import Reader, wire

CASES = [("shm", range(1000)), ("ring", range(1000)), ("collective", range(60))]
"""An address that is not there takes its time."""
LONG = [(name, range(1000, 100_000)) for name in ("shm", "ring")]
DEADLINE_S = 0.3


def seen(name: str, reader: Any) -> Any:
    """All that a reader would read with, as far as no byte has to come."""
    if name == "ring":
        where = {o: (r._file.name, r.memory.shape, r.memory.data_ptr() % 4096) for o, r in reader._rings.items()}
        return where, reader._epochs, reader._laid.messages
    if name == "collective":
        return reader._link.store.port, reader._link.names, reader.buffers.messages, reader.buffers.sizes
    return [reader.memory(i).tolist() for i in np.unique(reader.whole.source).tolist()]


@pytest.mark.parametrize(("name", "seeds"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_mutated_messages(name, seeds):
    plan, tensors, _ = crossed(2, 1)
    chosen = wire(name)
    mine = [[t for t, b in zip(tensors, plan.sources, strict=True) if b.rank == r] for r in range(2)]
    senders = [chosen.open_sender(r, share, mine[r]) for r, share in enumerate(chosen.send_tables(plan, Hosts("aa", "a"), 512))]
    report = chosen.info([s.begin(mine[r]) for r, s in enumerate(senders)])
    plain = msgspec.to_builtins(report, builtin_types=(bytes,))
    kept: dict[str, Any] = {}

    def opened(message: Any) -> Reader:
        return chosen.open_reader(update(message), plan, kept)

    def update(message: Any) -> UpdateInfo:
        return UpdateInfo(wire=name, version="v", session="s", deadline_s=DEADLINE_S, **{name: message})

    wanted, outcomes = seen(name, opened(report)), {"refused": 0, "same": 0}
    before = torch.cat([t.reshape(-1) for t in tensors]).clone()
    for seed in seeds:
        outcomes[outcome(lambda s=seed: seen(name, opened(msgspec.convert(mutated(plain, s), type(report)))), wanted)] += 1
    assert seen(name, opened(report)) == wanted, "what is kept is what it was"
    assert outcomes["refused"] > len(seeds) // 2
    assert torch.equal(before, torch.cat([t.reshape(-1) for t in tensors]))
    for held in kept.values():
        held.close()
    for sender in senders:
        sender.close()


def outcome(read: Callable[[], Any], wanted: Any) -> str:
    """Anything but a listed problem or the same reading fails the test."""
    try:
        found = read()
    except (RefitError, msgspec.ValidationError):
        return "refused"
    assert found == wanted
    return "same"
