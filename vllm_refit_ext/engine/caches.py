"""What a commit does to caches that were computed from older weights. Runs in vLLM's engine process, which owns them.

The policy is given in `update_info["caches"]`:

- `reset` (default): drop the prefix cache and the encoder cache. A request that runs has keys and values of the older weights,
  so a refit with this policy is refused before it starts while any does.
- `reset_running`: preempt running requests first; they are computed again, prompt and answer so far, with the new weights.
- `keep`: requests that run go on, and their answers mix versions. What starts after the commit reads nothing of older weights.

Requests that run hold their blocks, so `keep` can't drop the prefix cache. Instead every request that starts after the commit
gets another salt (vLLM's `cache_salt`, which goes into the hash of a request's first block and so of all of its blocks): its
blocks match none that an older request left, or has yet to leave.

vLLM's multimodal processor cache stays under every policy. It holds preprocessed inputs, not anything computed from weights,
and dropping one half of it (the other is in the API server) loses the two halves' agreement on what the other holds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_refit_ext.core.errors import ConfigError, SessionError

POLICIES = ("reset", "reset_running", "keep")
WAITING = ("WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "WAITING_FOR_FSM", "PREEMPTED")
"""States of a request that holds no blocks, in all supported versions of vLLM."""
SALT = "|refit "
DO = "wait for the requests, abort them, or choose the policy reset_running or keep"


class Refit(msgspec.Struct, frozen=True):
    """What the engine process reads of a refit's message: `policy` for caches, and the attempt's name."""

    policy: str = POLICIES[0]
    session: str = ""


def refit_of(update_info: Any) -> Refit | None:
    """What an `update_weights` argument asks for; None if the argument is not a refit. Raises `ConfigError`."""
    entries = update_info if isinstance(update_info, list) else [update_info]
    ours = [entry for entry in entries if isinstance(entry, dict) and "wire" in entry]
    if not ours:
        return None
    policy = known(ours[0].get("caches", POLICIES[0]), "update_weights, caches")
    return Refit(policy, str(ours[0].get("session", "")))


def refit_of_take(caches: Any = POLICIES[0], session: Any = "", **_: Any) -> Refit:
    """What the arguments of `refit_take` ask for. Raises `ConfigError`."""
    return Refit(known(caches, "refit_take, caches"), str(session))


def known(policy: object, where: str) -> str:
    """The policy. Raises `ConfigError` for one that is none."""
    if policy not in POLICIES:
        raise ConfigError("unknown policy for caches", where=where, got=repr(policy)[:80], wanted=", ".join(POLICIES))
    return str(policy)


def check(core: Any, policy: str) -> None:
    """Refuse a refit that would leave requests between two weights. Raises `SessionError` before anything was written."""
    running = sum(not _is_waiting(request) for request in core.scheduler.requests.values())
    if policy == "reset" and running:
        raise SessionError(
            "requests are running, so the caches can't be reset", where="update_weights, caches", got=f"{running} running", do=DO
        )


def reset(core: Any, policy: str, salt: str) -> str:
    """Apply `policy` after a commit. salt: new with each commit. Returns what was done, for `refit_status`.

    Raises `SessionError` if vLLM could not reset; even then nothing that starts from now on reads what older weights computed.
    """
    failure = ""
    if policy != "keep":
        try:
            if not core.reset_prefix_cache(reset_running_requests=policy == "reset_running", reset_connector=True):
                failure = "vLLM reports blocks in use"
        except RuntimeError as error:
            failure = str(error)
    if policy == "keep" or failure:
        core._refit_salt = salt
        for request in core.scheduler.requests.values():
            if _is_waiting(request):
                resalt(core, request)
    core.reset_encoder_cache()
    if failure:
        do = "abort the requests that hold blocks if their answers must not mix versions"
        raise SessionError(
            f"the new weights serve, but requests go on with blocks of older weights: {failure}", where="caches", do=do
        )
    return f"{policy}: prefix, encoder"


def salted(core: Any, own: str | None) -> str | None:
    """The cache salt of a request that starts now; own: the one that its caller gave, with or without ours behind it."""
    current = getattr(core, "_refit_salt", "")
    return f"{(own or '').partition(SALT)[0]}{SALT}{current}" if current else own


def resalt(core: Any, request: Any) -> None:
    """Give a request that has computed nothing yet the current salt, and its blocks their hashes."""
    salt = salted(core, request.cache_salt)
    if salt != request.cache_salt:
        request.cache_salt = salt
        request.block_hashes.clear()
        if core.request_block_hasher is not None:
            request.block_hashes.extend(core.request_block_hasher(request))


def _is_waiting(request: Any) -> bool:
    """Whether a request of the scheduler holds no keys and values. All others do, some finished ones among them."""
    return request.status.name in WAITING
