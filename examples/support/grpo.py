"""What both examples learn, and how: the task, its reward, and Megatron's side of a GRPO step.

The task is to write lower-case letters. An answer's reward is the share of its tokens that are; its advantage is the reward
standardised within the answers to one prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.support.tiny_model import build_megatron

PROMPTS = ["the ", "a re", "new ", "old ", "rank", "copy", "plan", "wire"]
"""All of four tokens (the tokenizer knows bytes), so that a batch needs no padding."""
PROMPT = 4
"""Tokens of a prompt."""
MAX_RATIO = 2.0
"""Where the correction for older weights is cut off."""
MIN_RISE = 0.15
"""The least rise of the mean reward from the first to the last quarter of the steps."""


class Trainer:
    """Megatron-core with expert parallelism over its ranks, its distributed data parallel wrapper and its optimizer."""

    def __init__(self, folder: Path, *, learning_rate: float, seed: int, dtype: str = "float32", device: str = "cpu") -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.device = torch.device(device)
        self.bridge, self.chunks = build_megatron(folder, ep=dist.get_world_size(), ddp=True, seed=seed, dtype=dtype)
        config = OptimizerConfig(
            optimizer="adam",
            lr=learning_rate,
            weight_decay=0.0,
            clip_grad=1.0,
            params_dtype=getattr(torch, dtype),
            bf16=dtype == "bfloat16",
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks)

    def step(self, tokens: torch.Tensor, advantage: torch.Tensor, sampled: torch.Tensor | None = None) -> torch.Tensor:
        """One GRPO step on this rank's share. tokens [n, length], advantage [n].

        sampled [n, answer]: the engine's log-probabilities, where older weights than these may have sampled. Each token then
        counts by the ratio of the two probabilities, cut off at `MAX_RATIO`; without it the ratio is one.
        Returns the log-probabilities of the answers' tokens before the step, [n, answer].
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        n, length = tokens.shape
        tokens, advantage = tokens.to(self.device), advantage.to(self.device)
        positions = torch.arange(length - 1, device=self.device)[None].expand(n, -1)
        mask = torch.triu(torch.ones(length - 1, length - 1, dtype=torch.bool, device=self.device), 1)[None, None]
        kept: list[torch.Tensor] = []

        def forward(batches: Any, model: Any) -> Any:
            logits = model(next(batches)[:, :-1], positions, mask)

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                value, picked = grpo_loss(output, tokens, advantage, sampled)
                kept.append(picked)
                return value, {"loss": value.detach()}

            return logits, loss

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([tokens]),
            model=self.chunks,
            num_microbatches=1,
            seq_length=length - 1,
            micro_batch_size=n,
            forward_only=False,
        )
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        self.optimizer.step()
        return kept[0].cpu()


def grpo_loss(
    logits: torch.Tensor, tokens: torch.Tensor, advantage: torch.Tensor, sampled: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the log-probabilities of the answers' tokens [n, answer]. logits [n, length - 1, vocabulary], the others as
    `Trainer.step` takes them."""
    picked = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[:, PROMPT - 1 :, 0]
    ratio = torch.ones_like(picked)
    if sampled is not None:
        ratio = (picked.detach() - sampled.to(picked.device)).exp().clamp(max=MAX_RATIO)
    return -(ratio * advantage[:, None] * picked).mean(), picked.detach()


def rewards(tokens: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
    """Share of lower-case letters in each answer, [answers]. tokens [answers, prompt + answer], letters [26]."""
    return torch.isin(tokens[:, PROMPT:], letters).float().mean(dim=1)


def advantages(reward: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards standardised within the `samples` answers to one prompt, [answers]."""
    grouped = reward.view(-1, samples)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).reshape(-1)


def mean_kl(engine: torch.Tensor, trainer: torch.Tensor) -> float:
    """KL(engine || trainer) estimated on the engine's samples by r - 1 - log r, r the ratio of probabilities. Never negative."""
    log_ratio = (trainer - engine).double()
    return float((log_ratio.exp() - 1 - log_ratio).mean())


def rise_problems(rewards: list[float]) -> list[str]:
    """What is wrong with the mean rewards of the steps; empty when they rose by `MIN_RISE`."""
    quarter = max(1, len(rewards) // 4)
    first, last = (sum(part) / quarter for part in (rewards[:quarter], rewards[-quarter:]))
    if last - first >= MIN_RISE:
        return []
    return [f"the reward did not rise: {first:.3f} in the first quarter, {last:.3f} in the last (wanted +{MIN_RISE})"]
