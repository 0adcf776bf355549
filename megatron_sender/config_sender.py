"""From a recipe to the sender: what the `refit` part of a recipe means for `SenderConfig`."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_sender.config import Recipe, Refit
from megatron_sender.sender import SenderConfig
from vllm_refit_ext.core.messages import WireName


def sender_config(recipe: Recipe, *, unused: Iterable[str] = (), resident: bool = False) -> SenderConfig:
    """The sender's settings for `recipe`, which `check_refit_support` accepted.

    unused: checkpoint names that no engine reads, such as those that `vllm-refit plan --json` lists as `unread`. resident: the
    trainer's memory is never freed between refits; a recipe does not say so.
    """
    refit = recipe.refit
    return SenderConfig(
        wire=wire_name(refit),
        unused=tuple(unused),
        caches=refit.caches,
        deadline_s=refit.deadline_s,
        resident=resident,
        prequantize=refit.prequantize,
        bucket_bytes=refit.bucket_bytes,
    )


def wire_name(refit: Refit) -> WireName:
    """The wire's name in messages and in `SenderConfig`: a recipe's `ipc` is two wires there, by its mode."""
    if refit.wire == "ipc":
        return "ipc" if refit.effective_mode() == "direct" else "ring"
    return refit.wire
