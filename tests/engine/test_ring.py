"""Wire `ring` to real engines: buckets of any size, cut tensors, scales apart from their codes; the result is the same
bytes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from examples.support.tiny_model import save_model
from tests.engine.test_mxfp8 import SETTINGS, live, same, weights
from tests.support.engines import open_llm
from tests.support.loose_sender import LooseSender
from tests.support.mxfp8_tensors import quantize
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.coded import SENT_SCALE
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.manifest import TensorSpec

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = save_model("qwen3_moe", tmp_path_factory.mktemp("staged"), seed=0, dtype="bfloat16")
    with open_llm(folder, **SETTINGS) as llm:
        yield folder, llm


@pytest.mark.parametrize("bucket", [64 << 20, 50_000, 4096])
def test_buckets_change_nothing(engine, bucket):
    """BF16 and MXFP8, in one bucket, in many, in buckets smaller than most tensors."""
    folder, llm = engine
    before = live(llm)
    given = weights(folder)
    sender = LooseSender(LLMClient(llm), {n: t * 1.5 for n, t in given.items()}, wire_name="ring", bucket_bytes=bucket)
    sender.prepare()
    sender.refit("other")
    assert same(live(llm), before)
    sender.close()
    cuts = {"model.layers.0.self_attn.o_proj.weight": (1, 2)}
    sender = LooseSender(LLMClient(llm), given, wire_name="ring", cuts=cuts, bucket_bytes=bucket)
    names = sender.prepare({"prequantize": True})[0].quantise
    for i in range(2):
        report = sender.refit(f"same-{i}")[0]
        assert report.received == {"0": sum(t.nbytes for t in given.values())}
        assert same(live(llm), before) == []
    assert sender.verify() == len(given)
    sender.close()
    offered, specs = dict(given), {}
    for name in names:
        ((codes, scales),) = quantize([given[name]])
        offered |= {name: codes.view(torch.float8_e4m3fn), name + SENT_SCALE: scales}
        specs[name] = TensorSpec(tuple(codes.shape), "float8_e4m3fn", "mxfp8", name + SENT_SCALE)
    sender = LooseSender(LLMClient(llm), dict(sorted(offered.items())), specs=specs, wire_name="ring", bucket_bytes=bucket)
    sender.prepare({"prequantize": True})
    sender.refit("coded")
    assert sender.verify() == len(given)
    sender.close()


def test_a_trainer_that_stops_is_noticed(engine):
    """The trainer gives up between buckets: the engine says so at once, and a later refit heals it."""
    folder, llm = engine
    sender = LooseSender(LLMClient(llm), weights(folder), wire_name="ring", bucket_bytes=50_000)
    sender.prepare()
    pack = sender._sender._gather.pack

    def stop_at_four(number, message):
        if number == 4:
            sender._sender._ring.words.stop(sender._sender._ring.info.epoch)
            raise RefitError("the trainer fails here")
        pack(number, message)

    sender._sender._gather.pack = stop_at_four
    begin = time.monotonic()
    with pytest.raises(RefitError, match=r"gave up|fails here"):
        sender.refit("broken")
    assert time.monotonic() - begin < 60
    assert LLMClient(llm).status()[0].state == "torn"
    sender._sender._gather.pack = pack
    sender.refit("healed")
    assert LLMClient(llm).status()[0].state == "ready"
    assert sender.verify()
    sender.close()
    assert threading.active_count() < 50
