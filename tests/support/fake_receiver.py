"""A worker extension with a handler that fails where a test asks it to, so that the seam is tested without wires and plans.

`update_info` for it: `wire: "fake"`, `file`, a safetensors file that is loaded by vLLM's own reload, and `fail`: `""`,
`"early"` (refused before the first write), `"torn"` (fails after the file was loaded), `"crash"` (an exception that is not
ours); `rank`: fail on that rank only; `stall_s`: seconds between the commit and the end of the call.
"""

from __future__ import annotations

import time
from typing import Any

from safetensors.torch import load_file
from vllm.v1.worker.gpu_worker import Worker

from vllm_refit_ext import RefitWorkerExtension
from vllm_refit_ext.core.errors import RefitError, SessionError, TornError
from vllm_refit_ext.engine import guard, weight_transfer
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.engine.reload import reload_weights
from vllm_refit_ext.receiver import agree
from vllm_refit_ext.receiver.session import part_of, session_of


class FakeHandler:
    """Loads a file; fails on demand."""

    def __init__(self, view: EngineRank) -> None:
        self.view = view
        self.refused = None
        self.prepared = False
        self.updates = 0
        self.blob = b""

    def prepare(self, state_dict_info: dict[str, Any], note: str = "") -> None:
        """Accept anything but an empty manifest."""
        if not state_dict_info:
            raise SessionError("the manifest is empty", where="prepare")
        self.prepared = True

    def update(self, update_info: Any, /) -> dict[str, Any]:
        """Load `file`, failing as asked; all ranks agree before it and at its end."""
        agree.begin(self.view, session_of(update_info))
        errors: list[RefitError] = []
        with agree.collect(errors, "update"):
            if not self.prepared:
                raise SessionError("update_weights was called before prepare_refit_info", do="call prepare_refit_info first")
            update_info = part_of(update_info, self.view)
            fail = update_info.get("fail", "") if update_info.get("rank", self.view.rank) == self.view.rank else ""
            if fail == "crash":
                raise ZeroDivisionError("nobody foresaw this")
            if fail == "early":
                raise SessionError("refused as the test asked", where="fake wire")
        agree.agree(self.view, "begin", None, agree.merged(errors), 20.0)
        self.blob = update_info.get("blob", b"")
        if "file" in update_info:
            reload_weights(self.view, iter(load_file(update_info["file"]).items()))
        torn = TornError("torn as the test asked", where="fake wire", do="run a full refit") if fail == "torn" else None
        try:
            agree.agree(self.view, "commit", None, torn, 20.0)
        except TornError as error:
            guard.mark_torn(self.view.worker, str(error))
            raise
        guard.commit(self.view.worker)
        time.sleep(update_info.get("stall_s", 0.0))
        self.updates += 1
        return {"updates": self.updates}

    def status(self) -> dict[str, Any]:
        """How many updates committed, and the last blob as hexadecimal text."""
        state = "ready" if self.prepared else "unprepared"
        return {"rank": self.view.rank, "state": state, "updates": self.updates, "blob": self.blob.hex()}

    def abort(self) -> None:
        """Nothing to give up."""


class FakeExtension(RefitWorkerExtension):
    """The RPCs that a test needs. vLLM mixes it into its worker."""

    def refit_prepare(self) -> dict[str, Any]:
        """What the product's `prepare_refit_info` does at its end."""
        handler = FakeHandler(EngineRank.of_worker(self))
        handler.prepared = True
        weight_transfer.install(self, handler)
        return handler.status()

    def refit_status(self) -> dict[str, Any]:
        """Status with the guard's mark."""
        seam = weight_transfer.seam_of(self)
        return dict(seam.handler.status() if seam is not None else {}) | {"mark": guard.report(self)}

    def refit_reload(self, path: str) -> list[str]:
        """Reload a file; the names of layers that got nothing."""
        return reload_weights(EngineRank.of_worker(self), iter(load_file(path).items())).untouched


weight_transfer.answer_early(Worker)
weight_transfer.open_handler = FakeHandler
