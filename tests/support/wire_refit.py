"""One refit over any wire in one process, between a trainer rank and an engine rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import Sender, wire

WAIT_S = 20.0


def refit(name: str, sender: Sender, plan: Plan, tensors: list[torch.Tensor], kept: dict[str, Any], session: str) -> Any:
    """Send `tensors` and write them; the target buffers by name. kept: the engine rank's, from refit to refit."""
    message = wire(name).info([sender.begin(tensors)])
    end, failures = time.monotonic() + WAIT_S, []

    def send() -> None:
        try:
            sender.transfer(session, message, end)
        except RefitError as error:
            failures.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    targets = {b.name: torch.zeros(b.shape) for b in plan.targets}
    update = UpdateInfo(wire=name, version="v", session=session, deadline_s=WAIT_S, **{name: message})  # type: ignore[arg-type]
    reader = wire(name).open_reader(update, plan, kept)
    try:
        reader.start(end)
        for step in reader.steps:
            InPlaceWriter(step, targets).write(reader)
        reader.confirm()
    finally:
        reader.close()
        thread.join()
    assert not failures
    return targets
