"""Two data parallel replicas behind one server: every call of a refit reaches both, and both answer."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.engines import open_server
from tests.support.seam_cases import pair
from tests.support.small_engine import PlainSource
from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.sender import RefitSender, SenderConfig

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_both_replicas_are_seen_and_refitted(tmp_path):
    old, new = pair("qwen3", tmp_path)
    options = ("--worker-extension-cls", "vllm_refit_ext.RefitWorkerExtension", "--data-parallel-size", "2")
    # Each replica's worker has a core of its own, as those of two ranks have.
    with open_server(old, *options, "--tensor-parallel-size", "1", ranks=2) as server:
        client = HTTPClient(server.url)
        assert [s.rank for s in client.status()] == [0, 0]
        model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
        sender = RefitSender(PlainSource(model), client, SenderConfig(deadline_s=120.0, hash_reloaded=True))
        sender.prepare()
        report = sender.refit("new")
        assert [r.version for r in report.engines[0]] == ["new", "new"]
        assert [s.version for s in client.status()] == ["new", "new"]
        assert sender.verify() == len(dict(model.named_parameters()))
        first, second = client.verify()
        assert first.digests == second.digests
        assert set(first.digests) <= set(load_file(new / "model.safetensors"))
        sender.close()
        collective = RefitSender(PlainSource(model), client, SenderConfig(wire="collective", deadline_s=60.0))
        with pytest.raises(ConfigError, match="data parallel replicas"):
            collective.prepare()
