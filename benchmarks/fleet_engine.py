"""What an engine of the scenarios is asked, and what its worker answers.

The worker's extension is the product's, with more questions. What a take read and wrote is counted at the copies themselves, by
an observer of torch's operations, and not taken from any report: of every copy out of a file in shared memory that another
process made, the bytes by file and the bytes that came to lie here. In the middle of a take the process can be stopped, killed or
slowed. And weights can be spoilt, and summed up byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engine_bridge import one_by_one
from tests.support.plain_cpu import PlainCpuExtension
from vllm_refit_ext.engine.extension import receiver_of
from vllm_refit_ext.wires.boxes import as_bytes

COPY, COPIES = torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default
FAULTS = ("stop", "kill", "slow")


class Meter(TorchDispatchMode):
    """read: bytes by the name of the shared file that copies read from. written: bytes that these copies wrote. fault: what
    happens when the first of them is about to run: one of `FAULTS`, or nothing. slow_s: how long `slow` sleeps."""

    def __init__(self, fault: str = "", slow_s: float = 0.0) -> None:
        super().__init__()
        self.read, self.written = Counter[str](), 0
        self._fault, self._slow_s = fault, slow_s
        self._files: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if func in (COPY, COPIES):
            both = [(args[0], args[1])] if func is COPY else zip(args[0], args[1], strict=True)
            pairs = [pair for pair in both if self._file(pair[1])]
        if pairs and self._fault:
            self._fail()
        result = func(*args, **(kwargs or {}))
        for into, source in pairs:
            self.read[self._file(source)] += source.numel() * source.element_size()
            self.written += into.numel() * into.element_size()
        return result

    def _fail(self) -> None:
        fault, self._fault = self._fault, ""
        if fault == "slow":
            time.sleep(self._slow_s)
        else:
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

    def _file(self, tensor: torch.Tensor) -> str:
        """The shared file that a tensor lies in; empty for other memory and for files of this process."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._files:
            self._files[address] = file_at(address)
        return self._files[address]


def file_at(address: int) -> str:
    """The name of the product's shared file at an address of this process, if another process made it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            name = Path(path).name
            return name if name.startswith("refit-") and name.split("-")[2] != str(os.getpid()) else ""
    return ""


class ScenarioExtension(PlainCpuExtension):
    """The product's extension on a CPU engine with plain layouts, and the questions of the scenarios."""

    def scenario_arm(self, fault: str = "", slow_s: float = 0.0) -> None:
        """Count what the next take reads and writes; one of `FAULTS` happens in its middle."""
        self._scenario_next = Meter(fault, slow_s)

    def scenario_counted(self) -> dict[str, Any]:
        """What the last counted take read, by file, and wrote."""
        meter: Meter = self._scenario_last
        return {"read": dict(meter.read), "written": meter.written}

    def refit_take(self, *args: Any, **kwargs: Any) -> Any:
        """The product's, counted where that was asked for."""
        meter = self.__dict__.pop("_scenario_next", None)
        if meter is None:
            return super().refit_take(*args, **kwargs)
        with meter:
            reply = super().refit_take(*args, **kwargs)
        self._scenario_last = meter
        return reply

    def scenario_planned(self) -> dict[str, int]:
        """Bytes by source rank of this rank's plan of all weights."""
        prepared = receiver_of(self).prepared
        return {} if prepared is None else {str(rank): n for rank, n in prepared.plan.by_source.items()}

    def scenario_spoil(self) -> None:
        """Change every weight."""
        generator = torch.Generator().manual_seed(99)
        with torch.no_grad():
            for parameter in self.model_runner.model.parameters():  # type: ignore[attr-defined]
                parameter.add_(torch.rand(parameter.shape, generator=generator).to(parameter.dtype))

    def scenario_weights(self) -> dict[str, str]:
        """sha256 of the bytes of every parameter and buffer."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        held = [*model.named_parameters(), *model.named_buffers()]
        return {n: hashlib.sha256(as_bytes(t.contiguous()).numpy().tobytes()).hexdigest() for n, t in held}


def questions(llm: Any) -> dict[str, Callable[..., Any]]:
    """What `Engine.ask` may ask beside the worker's calls."""
    return {"answers": lambda: [asdict(answer) for answer in one_by_one(llm)]}
