"""What a commit does to caches that were computed from older weights. Runs in vLLM's engine process, which owns them.

The policy travels in `update_info["caches"]`:

- `reset` (default): drop the prefix cache and the encoder cache. Requests that run hold cache blocks, so a refit with this
  policy is refused before it starts while any do: their next tokens would come from old keys and values.
- `reset_running`: preempt running requests first; they are computed again, prompt and answer so far, with the new weights.
- `keep`: touch nothing. Running requests go on and new ones may hit old blocks: the caller accepts answers that mix versions.

vLLM's multimodal processor cache stays under every policy. It holds preprocessed inputs, not anything computed from weights,
and dropping one half of it (the other is in the API server) loses the two halves' agreement on what the other holds.
"""

from __future__ import annotations

from typing import Any

from vllm_refit_ext.core.errors import ConfigError, SessionError

POLICIES = ("reset", "reset_running", "keep")
DO = "pause generation, wait for the requests, or choose the policy reset_running or keep"


def policy_of(update_info: Any) -> str | None:
    """The policy that an `update_weights` argument asks for; None if the argument is not a refit. Raises `ConfigError`."""
    entries = update_info if isinstance(update_info, list) else [update_info]
    ours = [entry for entry in entries if isinstance(entry, dict) and "wire" in entry]
    if not ours:
        return None
    policy = ours[0].get("caches", POLICIES[0])
    if policy not in POLICIES:
        raise ConfigError(
            "unknown policy for caches", where="update_weights, caches", got=repr(policy), wanted=", ".join(POLICIES)
        )
    return str(policy)


def check(core: Any, policy: str) -> None:
    """Refuse a refit whose caches could not be reset afterwards. Raises `SessionError` before anything was written."""
    running = len(core.scheduler.running)
    if policy == "reset" and running and _prefix_caching(core):
        raise SessionError(
            "requests are running, so the caches can't be reset", where="update_weights, caches", got=f"{running} running", do=DO
        )


def reset(core: Any, policy: str) -> str:
    """Apply `policy` after a commit. Returns what was done, for `refit_status`. Raises `SessionError` if vLLM could not do it."""
    if policy == "keep":
        return "kept"
    preempt = policy == "reset_running"
    done = []
    if preempt or _prefix_caching(core):
        try:
            good = core.reset_prefix_cache(reset_running_requests=preempt, reset_connector=True)
        except RuntimeError as error:
            raise SessionError(f"the new weights serve, but the prefix cache is old: {error}", where="caches", do=DO) from error
        if not good:
            do = "end the requests that hold blocks, then call reset_prefix_cache and see that it returns true"
            raise SessionError(
                "the new weights serve, but the prefix cache is old: vLLM reports blocks in use", where="caches", do=do
            )
        done.append("prefix")
    core.reset_encoder_cache()
    done.append("encoder")
    return f"{policy}: {', '.join(done)}"


def _prefix_caching(core: Any) -> bool:
    return bool(core.vllm_config.cache_config.enable_prefix_caching)
