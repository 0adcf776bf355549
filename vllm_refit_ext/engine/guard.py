"""A torn engine generates nothing: the worker's side of it.

Torn means that a refit failed after its first write, so the live weights mix two versions. The worker keeps the mark; who
refuses requests is the engine process, which asks its workers for it after every call that may have changed it (`core_hook`,
installed by the plugin there). Behind it stands a backstop here: a marked worker raises `TornError` instead of running a
batch with tokens. Where the plugin is switched off (`VLLM_PLUGINS` names others only) that backstop ends vLLM's engine
process: dying is better than wrong tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_refit_ext.core.errors import TornError

DO = "run a full refit; generation is refused until one succeeds"


class WorkerMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker tells the engine process. `torn`: why, or empty. `commits`: refits committed so far in this worker. `nonce`:
    that of the question, so that no other reply can be taken for this one."""

    torn: str
    commits: int
    nonce: str


def mark_torn(worker: Any, reason: str) -> None:
    """Mark this worker's weights as mixed. `reason` is shown to every caller that is refused. May be called again."""
    worker._refit_torn = reason
    execute = type(worker).execute_model

    def refuse(scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        # without tokens a batch only tells the worker which requests ended; that must still get through
        if scheduler_output.total_num_scheduled_tokens:
            raise TornError(
                "this worker's weights mix two versions and it was asked to generate",
                where=f"rank {worker.rank}",
                got=reason,
                do=DO,
            )
        return execute(worker, scheduler_output, *rest, **named)

    worker.execute_model = refuse


def commit(worker: Any) -> None:
    """Count a committed refit, which tells the engine process that its caches are old, and take the mark off.

    Part of the commit itself: whatever fails after it, the engine process learns that the weights are new.
    """
    worker._refit_commits = getattr(worker, "_refit_commits", 0) + 1
    worker._refit_torn, worker._refit_asked = "", False
    worker.__dict__.pop("execute_model", None)


def report(worker: Any, nonce: str = "") -> dict[str, Any]:
    """The worker's mark as plain values. Sent to every worker by the engine process, so it takes vLLM's wrapper too."""
    getattr(worker, "worker", worker)._refit_asked = True
    return {"torn": getattr(worker, "_refit_torn", ""), "commits": getattr(worker, "_refit_commits", 0), "nonce": nonce}


def asked(worker: Any) -> bool:
    """Whether the engine process has asked for this worker's mark since the last commit, so that it knows of it."""
    return bool(getattr(worker, "_refit_asked", False))
