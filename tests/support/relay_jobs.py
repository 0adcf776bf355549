"""What trainer ranks do in the tests of wire `ring` over played hosts. Engines are behind URLs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from examples.support.tiny_model import build_megatron
from megatron_sender.sender import MegatronSender, SenderConfig
from tests.support.relay_ranks import at_message
from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.hosts import HOST_ID
from vllm_refit_ext.core.table import unpack
from vllm_refit_ext.wires.ring_relay import Pending


class Trainer:
    """Megatron on played hosts, one letter a rank, with a sender to the engines at `urls`."""

    def __init__(self, folder: str, geometry: dict[str, Any], urls: list[str], hosts: str, bucket: int, **config: Any) -> None:
        self.bridge, self.chunks = build_megatron(folder, **geometry)
        self.rank = dist.get_rank()
        os.environ[HOST_ID] = hosts[self.rank]
        self.clients = [HTTPClient(url) for url in urls]
        settings = SenderConfig(wire="ring", bucket_bytes=bucket, hash_reloaded=True, **config)
        self.sender = MegatronSender(self.chunks, self.bridge, self.clients if self.rank == 0 else None, settings)
        self.sent_between: dict[int, int] = {}
        self._count()

    def _count(self) -> None:
        original = Pending.send

        def send(pending: Pending, task: Any, data: torch.Tensor) -> None:
            self.sent_between[task.peer] = self.sent_between.get(task.peer, 0) + data.nbytes
            original(pending, task, data)

        Pending.send = send  # type: ignore[method-assign]

    def scale(self, factor: float) -> None:
        for chunk in self.chunks:
            for p in chunk.parameters():
                p.data.mul_(factor)

    def answers(self) -> Any:
        return [client.post("/answers", {}, 300) for client in self.clients] if self.rank == 0 else None


def cycle(folder: str, geometry: dict[str, Any], urls: list[str], hosts: str, bucket: int) -> dict[str, Any]:
    """Other weights, then the checkpoint's twice. Each rank tells what it sent to other trainer ranks in the last refit."""
    trainer = Trainer(folder, geometry, urls, hosts, bucket)
    plan = trainer.sender.prepare()
    trainer.scale(2.0)
    trainer.sender.refit("other")
    other = trainer.answers()
    trainer.scale(0.5)
    reports, repeated = [], []
    for version in ("a", "b"):
        trainer.sent_between.clear()
        reports.append(trainer.sender.refit(version))
        repeated.append(trainer.answers())
    compared = trainer.sender.verify()
    sender: Any = trainer.sender.prepared.half
    relays, group = sender._table.relays, sender._communicator and sender._communicator._link.group
    found = {
        "other": other,
        "repeated": repeated,
        "compared": compared,
        "edges": [msgspec.to_builtins(e) for e in plan.edges()],
        "report": msgspec.to_builtins(reports[-1]),
        "sent_between": dict(trainer.sent_between),
        "relays": unpack(relays).tolist() if relays is not None else [],
        "group": group.names if group else [],
    }
    trainer.sender.close()
    return found


def check_transfer(found: list[dict[str, Any]], hosts: str, engine_hosts: str) -> dict[tuple[int, int], int]:
    """Hold what all ranks report in `cycle` to the plan: bytes of every edge, relays, and bytes between trainer ranks.

    Returns the bytes of the edges between hosts.
    """
    first, ranks = found[0], range(len(found))
    planned = {(e["source"], e["target"]): e["nbytes"] for e in first["edges"]}
    (reports,) = first["report"]["engines"]
    received = {(int(s), r["rank"]): n for r in reports for s, n in r["received"].items()}
    assert received == planned, "an engine rank counts a byte by the rank that held it, relayed or not"
    far = {(s, t): n for (s, t), n in planned.items() if hosts[s] != engine_hosts[t]}
    assert {(s, t) for s, t, _ in first["relays"]} == set(far)
    want: dict[int, dict[int, int]] = {r: {} for r in ranks}
    for source, target, relay in first["relays"]:
        assert hosts[relay] == engine_hosts[target]
        want[source][relay] = want[source].get(relay, 0) + far[source, target]
    assert [f["sent_between"] for f in found] == [want[r] for r in ranks], "between trainer ranks: these bytes and no others"
    assert all(f["group"] == ([f"trainer rank {r}" for r in ranks] if far else []) for f in found)
    return far


def simple(folder: str, geometry: dict[str, Any], urls: list[str], hosts: str, bucket: int, version: str) -> Any:
    """Prepare, refit, verify. Rank 0 returns the engines' answers."""
    trainer = Trainer(folder, geometry, urls, hosts, bucket)
    trainer.sender.prepare()
    trainer.sender.refit(version)
    trainer.sender.verify()
    found = trainer.answers()
    trainer.sender.close()
    return found


def dies(folder: str, geometry: dict[str, Any], urls: list[str], hosts: str, bucket: int, victim: int, kind: str) -> None:
    """After a good refit, a rank is killed before its third message that it is to `send` or `receive`."""
    trainer = Trainer(folder, geometry, urls, hosts, bucket, deadline_s=10.0)
    trainer.sender.prepare()
    trainer.sender.refit("good")
    trainer.scale(2.0)
    if trainer.rank == victim:
        at_message(kind, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer.sender.refit("late")


def stalls(folder: str, geometry: dict[str, Any], urls: list[str], hosts: str, bucket: int, victim: int) -> list[Any]:
    """A relay is stopped in the middle of a transfer and goes on 10 s later; then the next refit."""
    trainer = Trainer(folder, geometry, urls, hosts, bucket, deadline_s=6.0)
    trainer.sender.prepare()
    trainer.sender.refit("good")
    trainer.scale(2.0)
    if trainer.rank == victim:
        at_message("receive", 3, _stop_for_10_s)
    begin = time.monotonic()
    try:
        trainer.sender.refit("never")
    except RefitError as error:
        failed = (type(error).__name__, str(error), time.monotonic() - begin)
    trainer.scale(0.5)
    time.sleep(6.0)
    trainer.sender.refit("again")
    trainer.sender.verify()
    found = [failed, trainer.answers()]
    trainer.sender.close()
    return found


def _stop_for_10_s() -> None:
    pid = os.getpid()
    waker = os.fork()
    if waker == 0:
        time.sleep(10.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def stranded(folder: str, geometry: dict[str, Any], urls: list[str], hosts: str) -> tuple[str, str]:
    """A prepare that must fail."""
    trainer = Trainer(folder, geometry, urls, hosts, 100_000)
    try:
        trainer.sender.prepare()
    except RefitError as error:
        return type(error).__name__, str(error)
    raise AssertionError("prepare did not fail")
