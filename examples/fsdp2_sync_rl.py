"""Colocated synchronous reinforcement learning with FSDP2: two ranks train a transformers model, and hand it to vLLM on a CPU.

    python examples/fsdp2_sync_rl.py      # about two minutes

The task, the loop and the verdict are those of `colocated_sync_rl.py`. Both ranks hold half the rows of every parameter, experts
fused as transformers keeps them; nothing is gathered for a refit.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
import torch.distributed as dist
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from examples.colocated_sync_rl import Engine, Settings, judge, train
from examples.support.grpo import grpo_loss
from examples.support.launch import run_ranks
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.sender.dtensor import DTensorSource


class Trainer:
    """A transformers model under FSDP2, and Adam."""

    def __init__(self, folder: Path, *, learning_rate: float, seed: int) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)

    def step(self, tokens: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """One GRPO step on this rank's share. tokens [n, length], advantage [n].

        Returns the log-probabilities of the answers' tokens before the step, [n, answer].
        """
        self.optimizer.zero_grad()
        loss, picked = grpo_loss(self.model(input_ids=tokens[:, :-1]).logits, tokens, advantage)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return picked


def run_rank(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """What each trainer rank does. `values` are those of `Settings`. Returns the steps."""
    settings = Settings(**values)
    trainer = Trainer(folder, learning_rate=settings.learning_rate, seed=settings.seed)
    engine = Engine(folder, settings) if dist.get_rank() == 0 else None
    try:
        client = LLMClient(engine.llm) if engine else None
        sender = RefitSender(DTensorSource(trainer.model), client, SenderConfig(wire="shm", hash_reloaded=True))
        return train(trainer, sender, engine, folder, settings)
    finally:
        if engine:
            engine.close()


def main(settings: Settings | None = None) -> int:
    """Run, record, judge."""
    settings = settings or replace(Settings(), out=Path("out/fsdp2"))
    if settings.device != "cpu" or settings.mxfp8:
        raise SystemExit("this example runs on a CPU; see colocated_sync_rl.py for a GPU")
    ranks = {"preload": ("transformers.models.qwen3_moe.modeling_qwen3_moe", "torch.distributed.fsdp"), "timeout": 1200}
    return judge(settings, "FSDP2 on two ranks", lambda folder: run_ranks(run_rank, 2, folder, asdict(settings), **ranks)[0])


app = cyclopts.App(help=(__doc__ or "").partition("\n")[0])


@app.default
def cli(settings: Annotated[Settings | None, Parameter()] = None) -> None:
    """Train the tiny model and judge the run."""
    sys.exit(main(settings))


if __name__ == "__main__":
    app()
