"""Routes are recorded once for what is asked twice: a trainer that quantises, and one that prepares again."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vllm_refit_ext.core.coded import SENT_SCALE
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.receiver import recording


def test_what_was_recorded_is_kept_until_something_differs(monkeypatch):
    asked = []

    def record(self, entries, rank):
        asked.append(entries)
        return SimpleNamespace(computed={})

    monkeypatch.setattr(EngineRank, "record", record)
    model = torch.nn.Linear(64, 2, dtype=torch.bfloat16)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    view = EngineRank(model, config, torch.device("cpu"), 0, 1)
    plain = Manifest({"w": TensorSpec((2, 64), "bfloat16"), "b": TensorSpec((2,), "bfloat16")})
    scales = "w" + SENT_SCALE
    coded = Manifest(
        {
            "w": TensorSpec((2, 64), "float8_e4m3fn", "mxfp8", scales),
            scales: TensorSpec((2, 2), "uint8"),
            "b": TensorSpec((2,), "bfloat16"),
        }
    )
    first = recording.record(view, plain, 0)
    second = recording.record(view, coded, 0)
    assert first.routes is second.routes
    assert (first.partners, second.partners) == ({}, {"w": scales})
    assert len(asked) == 1
    recording.record(view, plain, 1)  # another number in the plan
    recording.record(view, Manifest({"w": TensorSpec((2, 64), "float32")}), 1)
    model.weight.data = model.weight.data.clone()  # what a reload leaves
    recording.record(view, Manifest({"w": TensorSpec((2, 64), "float32")}), 1)
    assert len(asked) == 4
