"""Any trainer: a transformers model on plain torch, no Megatron, refits a real engine through `RefitSender`."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.support.tiny_model import save_model
from tests.support.engines import answers, fresh_answers, open_llm
from tests.support.small_engine import PlainSource
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.sender import RefitSender, SenderConfig

pytestmark = pytest.mark.engine
EXTENSION = "vllm_refit_ext.RefitWorkerExtension"


def test_a_plain_torch_trainer_refits_a_real_engine(tmp_path):
    folder = save_model("qwen3", tmp_path / "start", seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with open_llm(folder, extension=EXTENSION) as llm:
        before = answers(llm)
        sender = RefitSender(PlainSource(model), LLMClient(llm), SenderConfig(deadline_s=120.0, hash_reloaded=True))
        sender.prepare()
        tokens = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(3))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        sender.refit("trained")
        assert sender.verify() == len(dict(model.named_parameters()))
        trained = answers(llm)
        sender.close()
    model.save_pretrained(tmp_path / "trained")
    for path in folder.glob("*token*"):
        (tmp_path / "trained" / path.name).write_bytes(path.read_bytes())
    assert trained == fresh_answers(tmp_path / "trained")
    assert trained != before
