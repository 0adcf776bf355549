"""TRL's own sync of its AsyncGRPOTrainer, on two ranks of FSDP2, into a real server. Run by `make test-integrations`.

What is TRL's: the trainer's callbacks, `_sync_weight` with its barriers, its client of the server, and accelerate. The trainer is
not constructed: its constructor needs a dataset, a rollout worker and attention kernels of a GPU.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.support.engines import fresh_answers, open_server
from vllm_refit_ext.client import HTTPClient

pytest.importorskip("trl", reason="it is not installed; `make test-integrations` has it")
pytestmark = pytest.mark.engine


def trainer(url: str, folder: str, *bases: type) -> Any:
    """What TRL's trainer has when training begins, with a model under FSDP2."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from vllm_refit_ext.integrations.trl import RefitTransfer

    made: Any = object.__new__(type("Trainer", (*bases, AsyncGRPOTrainer), {}))
    made.accelerator, made.model = Accelerator(cpu=True), AutoModelForCausalLM.from_pretrained(folder)
    for layer in made.model.model.layers:
        fully_shard(layer)
    fully_shard(made.model)
    made._refit = RefitTransfer(url)
    made.weight_transfer = made._refit if dist.get_rank() == 0 else None
    made._lora_sync, made.rollout_worker, made.model_version = False, None, 0
    made._metrics = {"train": defaultdict(list)}
    return made


def learn(url: str, folder: str) -> dict[str, Any]:
    """Training begins, a step is made, and weights go to the server by TRL's own code."""
    import torch
    from trl.experimental.async_grpo.async_grpo_trainer import _TrainBeginCallback

    from vllm_refit_ext.core.errors import ConfigError
    from vllm_refit_ext.integrations.trl import RefitSync

    made = trainer(url, folder, RefitSync)
    _TrainBeginCallback(made).on_train_begin(None, None, None)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1.0)
    made._sync_weight()
    told = ""
    if made.weight_transfer is not None:
        try:
            made._refit.send_weights(iter([("lm_head.weight", torch.zeros(1))]))
        except ConfigError as error:
            told = str(error)
    made._refit.destroy()
    return {"version": made.model_version, "syncs": len(made._metrics["train"]["perf/weight_sync_s"]), "told": told}


def test_weights_go_to_the_server_by_trls_own_sync(tmp_path: Path) -> None:
    start, trained = (save_model("qwen3", tmp_path / str(seed), seed=seed) for seed in (0, 1))
    wanted = list(fresh_answers(trained)[0].tokens)
    with open_server(start, "--worker-extension-cls", "vllm_refit_ext.RefitWorkerExtension") as server:
        assert server.tokens()[1] != wanted
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        first, second = run_ranks(learn, 2, server.url, str(trained), timeout=280)
        assert server.tokens()[1] == wanted
        assert HTTPClient(server.url).status()[0].version == "sync-2"
    assert (first["syncs"], second["syncs"], first["version"]) == (2, 2, 2)
    assert "RefitSync" in first["told"]
