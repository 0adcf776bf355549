"""What trainer ranks do in the tests of wire `collective`. Engines are behind URLs, one for each engine of the refit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from examples.support.tiny_model import build_megatron
from megatron_sender.sender import MegatronSender, SenderConfig
from tests.support.plain_cpu import PlainCpuExtension
from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.hosts import HOST_ID
from vllm_refit_ext.wires.collective_group import Group

Failure = tuple[str, str, float]
"""Class, text and seconds of an error."""


class PidExtension(PlainCpuExtension):
    """The plain CPU engine, whose workers also say who they are, so that a test can stop them."""

    def refit_pid(self) -> int:
        """Process of this worker."""
        return os.getpid()


class HostExtension(PidExtension):
    """A plain CPU engine that can be placed on any host it is."""

    def refit_move_to(self, host: str) -> None:
        """From the next prepare on, this worker is on `host`."""
        os.environ[HOST_ID] = host


class Trainer:
    """Megatron with a sender to the engines at `urls`, in rounds of `bucket` bytes."""

    def __init__(self, folder: str, geometry: dict[str, Any], urls: Sequence[str], bucket: int, **config: Any) -> None:
        self.bridge, self.chunks = build_megatron(folder, **geometry)
        self.rank = dist.get_rank()
        self.config = SenderConfig(wire="collective", bucket_bytes=bucket, hash_reloaded=True, **config)
        self.connect(urls)

    def connect(self, urls: Sequence[str]) -> None:
        """A sender to these engines; collective."""
        self.clients = [HTTPClient(url) for url in urls]
        self.sender = MegatronSender(self.chunks, self.bridge, self.clients if self.rank == 0 else None, self.config)

    def scale(self, factor: float) -> None:
        for chunk in self.chunks:
            for p in chunk.parameters():
                p.data.mul_(factor)

    def answers(self) -> Any:
        return [client.post("/answers", {}, 300) for client in self.clients] if self.rank == 0 else None

    def failure(self, version: str) -> Failure:
        """A refit that must fail."""
        begin = time.monotonic()
        try:
            self.sender.refit(version)
        except RefitError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        raise AssertionError("the refit did not fail")


def cycle(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int) -> dict[str, Any]:
    """Other weights, every tensor of which is compared, then the checkpoint's twice. Rank 0 tells what the engines answered and
    received."""
    trainer = Trainer(folder, geometry, urls, bucket)
    plan = trainer.sender.prepare()
    trainer.scale(2.0)
    trainer.sender.refit("other")
    other = trainer.answers()
    trainer.sender.verify()
    trainer.scale(0.5)
    reports, repeated = [], []
    for version in ("a", "b"):
        reports.append(trainer.sender.refit(version))
        repeated.append(trainer.answers())
    compared = trainer.sender.verify()
    rounds = len(trainer.sender.prepared.half._packer._messages)  # type: ignore[union-attr]
    trainer.sender.close()
    return {
        "other": other,
        "repeated": repeated,
        "compared": compared,
        "rounds": rounds,
        "edges": [msgspec.to_builtins(e) for e in plan.edges()],
        "report": msgspec.to_builtins(reports[-1]),
    }


def cycle_apart(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int) -> dict[str, Any]:
    """`cycle` with trainers on a host of their own."""
    os.environ[HOST_ID] = "trainers"
    return cycle(folder, geometry, urls, bucket)


def simple(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int, version: str) -> Any:
    """Prepare, refit, verify. Rank 0 returns the engines' answers."""
    trainer = Trainer(folder, geometry, urls, bucket)
    trainer.sender.prepare()
    trainer.sender.refit(version)
    trainer.sender.verify()
    found = trainer.answers()
    trainer.sender.close()
    return found


def at_post(number: int, act: Callable[[], None]) -> None:
    """Run `act` before this rank starts its batch number `number` from now on."""
    original, count = Group.post, [0]

    def post(self: Group, sends: Any, receives: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            Group.post = original  # type: ignore[method-assign]
            act()
        return original(self, sends, receives)

    Group.post = post  # type: ignore[method-assign]


def dies(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int, when: str) -> None:
    """After a good refit, rank 1 is killed `before` it meets the engines, `during` its sending, or `after` it."""
    trainer = Trainer(folder, geometry, urls, bucket, deadline_s=10.0)
    trainer.sender.prepare()
    trainer.sender.refit("good")
    trainer.scale(2.0)
    if trainer.rank == 1:
        sender: Any = trainer.sender.prepared.half
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if when == "before":
            sender.transfer = die
        elif when == "during":
            at_post(3, die)
        else:
            transfer = sender.transfer
            sender.transfer = lambda *a: (transfer(*a), time.sleep(1.0), die())
    trainer.sender.refit("late")


def stalls(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int, pid: int, host: str = "") -> list[Any]:
    """Process `pid` (0: trainer rank 1 itself) is stopped in the middle of a transfer and goes on 10 s later. The trainer is on
    `host`."""
    os.environ[HOST_ID] = host
    trainer = Trainer(folder, geometry, urls, bucket, deadline_s=6.0)
    trainer.sender.prepare()
    trainer.sender.refit("good")
    trainer.scale(2.0)
    if trainer.rank == 1:
        at_post(3, lambda: _stop(pid or os.getpid(), 10.0))
    failed = trainer.failure("never")
    trainer.scale(0.5)
    time.sleep(6.0)  # whoever was stopped is awake now
    trainer.sender.refit("again")
    trainer.sender.verify()
    found = [failed, trainer.answers()]
    trainer.sender.close()
    return found


def _stop(pid: int, seconds: float) -> None:
    waker = os.fork()
    if waker == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def disagrees(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int) -> list[Any]:
    """The last engine's last rank gets another plan than it holds; then the truth."""
    trainer = Trainer(folder, geometry, urls, bucket, deadline_s=60.0)
    trainer.sender.prepare()
    trainer.sender.refit("good")
    if trainer.rank == 0:
        assert trainer.sender.prepared is not None
        replies = trainer.sender.prepared.engines[-1].replies
        truth = replies[-1]
        replies[-1] = msgspec.structs.replace(truth, digest="0" * 64)
    failed = trainer.failure("never")
    versions = [s.version for client in trainer.clients for s in client.status()] if trainer.rank == 0 else []
    if trainer.rank == 0:
        replies[-1] = truth
    trainer.sender.refit("again")
    trainer.sender.verify()
    trainer.sender.close()
    return [failed, versions]


def loses_engine(folder: str, geometry: dict[str, Any], urls: list[str], bucket: int, pid: int, host: str = "") -> list[Any]:
    """An engine worker is killed in the middle of a transfer; the trainer, on `host`, goes on with the engine that is left."""
    os.environ[HOST_ID] = host
    trainer = Trainer(folder, geometry, urls, bucket, deadline_s=15.0)
    trainer.sender.prepare()
    trainer.sender.refit("good")
    if trainer.rank == 1:
        at_post(3, lambda: os.kill(pid, signal.SIGKILL))
    failed = trainer.failure("never")
    trainer.sender.close()
    trainer.connect(urls[:1])
    trainer.sender.prepare()
    trainer.sender.refit("again")
    trainer.sender.verify()
    found = [failed, trainer.answers()]
    trainer.sender.close()
    return found
