"""Speeds of this machine's memory and links, as a recipe's `hardware` asks for them.

A plan's predicted seconds are bytes over these speeds, so measured ones are worth more than published peaks. Each is the best
of a few copies large enough that starting them does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import torch
from rich.table import Table

HOST_BYTES = 256 << 20
"""Size of a copy in host memory: beyond any cache."""
GPU_BYTES = 4 << 30
"""Size of a copy on a GPU, or a quarter of what is free there: 2 ms at 4 TB/s, a thousand times the start of a kernel."""
REPEATS = 5


class Speed(msgspec.Struct, frozen=True):
    """One measured speed. setting: of the recipe's `hardware`. where: which memory or link. nbytes: size of the copy. seconds:
    of the best of `REPEATS`. bytes_per_second: as the setting counts them.
    """

    setting: str
    where: str
    nbytes: int
    seconds: float
    bytes_per_second: float


class Measured(msgspec.Struct, frozen=True):
    """All speeds, and what could not be measured here, with the way to do it."""

    device: str
    speeds: list[Speed]
    missing: dict[str, str]

    def hardware(self) -> dict[str, str | float]:
        """The recipe's `hardware` with the slowest measured speed of each kind, since a refit waits for its slowest rank."""
        found: dict[str, str | float] = {"device": self.device}
        for speed in sorted(self.speeds, key=lambda s: -s.bytes_per_second):
            found[speed.setting] = float(f"{speed.bytes_per_second:.3g}")
        return found


def measure() -> Measured:
    """Copy on every GPU and between every two, or in host memory where there is no GPU."""
    missing = {"network_bytes_per_second": "needs two hosts: take what nccl-tests' sendrecv_perf prints between them"}
    if not torch.cuda.is_available():
        missing["host_bytes_per_second"] = "needs two GPUs"
        return Measured("cpu", [copy_speed(torch.device("cpu"), HOST_BYTES)], missing)
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    speeds = [copy_speed(gpu, min(GPU_BYTES, torch.cuda.mem_get_info(gpu)[0] // 4)) for gpu in gpus]
    for target in gpus:
        for source in gpus:
            if source != target and torch.cuda.can_device_access_peer(target, source):
                nbytes = min(GPU_BYTES, *(torch.cuda.mem_get_info(gpu)[0] // 4 for gpu in (source, target)))
                speeds.append(link_speed(source, target, nbytes))
    if not any(s.setting == "host_bytes_per_second" for s in speeds):
        missing["host_bytes_per_second"] = "needs two GPUs that reach each other"
    return Measured("cuda", speeds, missing)


def copy_speed(device: torch.device, nbytes: int) -> Speed:
    """A copy within one memory; bytes read and bytes written are both counted."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _best(lambda: target.copy_(source), device)
    where = "host memory" if device.type == "cpu" else f"GPU {device.index}"
    return Speed("copy_bytes_per_second", where, nbytes, seconds, 2 * nbytes / seconds)


def link_speed(source: torch.device, target: torch.device, nbytes: int) -> Speed:
    """A copy from one GPU to another; each byte is counted once."""
    values = torch.ones(nbytes, dtype=torch.uint8, device=source)
    into = torch.empty(nbytes, dtype=torch.uint8, device=target)
    seconds = _best(lambda: into.copy_(values), target)
    return Speed("host_bytes_per_second", f"GPU {source.index} to GPU {target.index}", nbytes, seconds, nbytes / seconds)


def _best(copy: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        _wait(device)
        begin = time.perf_counter()
        copy()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])  # the first one maps memory


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(measured: Measured) -> Table:
    """For people."""
    made = Table(title="measured speeds", title_justify="left")
    for column in ("setting", "where", "copy", "best of", "speed"):
        made.add_column(column)
    for s in measured.speeds:
        made.add_row(
            f"hardware.{s.setting}", s.where, f"{s.nbytes >> 20} MiB", str(REPEATS), f"{s.bytes_per_second / 1e9:.1f} GB/s"
        )
    for setting, how in measured.missing.items():
        made.add_row(f"hardware.{setting}", "", "", "", f"not measured: {how}")
    return made


def snippet(measured: Measured) -> str:
    """The `hardware` part of a recipe with these speeds, as YAML."""
    return "\n".join(["hardware:", *(f"  {name}: {_yaml(value)}" for name, value in measured.hardware().items())])


def _yaml(value: str | float) -> str:
    # YAML 1.1 readers take an exponent without a point or sign for text.
    return value if isinstance(value, str) else f"{value:.3e}"
