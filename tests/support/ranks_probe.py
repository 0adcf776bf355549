"""Functions for the launcher's own tests. They run in forked ranks."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist


def add_up(value: int) -> tuple[int, int]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def sleep_forever() -> int:
    time.sleep(600)
    return os.getpid()


def without_group() -> tuple[bool, str]:
    return dist.is_initialized(), os.environ["MASTER_PORT"]
