"""Refits of real engines on a GPU over wire `ipc`, BF16 and MXFP8, with captured CUDA graphs, against fresh engines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402

from examples.support.tiny_model import save_model  # noqa: E402
from tests.support.gpu_engine import GRAPHS, ROOT, Engine  # noqa: E402
from tests.support.loose_sender import LooseSender  # noqa: E402
from tests.support.mxfp8_tensors import quantize  # noqa: E402
from vllm_refit_ext.core.coded import SENT_SCALE  # noqa: E402
from vllm_refit_ext.core.errors import RefitError  # noqa: E402
from vllm_refit_ext.core.manifest import TensorSpec  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

KINDS = {"bf16": {}, "mxfp8": {"quantization": "mxfp8"}}
SIZES = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "intermediate_size": 512}
CUTS = {
    "model.layers.0.self_attn.q_proj.weight": (0, 2),
    "model.layers.0.mlp.experts.1.gate_proj.weight": (0, 4),
    "model.layers.1.mlp.experts.7.down_proj.weight": (1, 2),
    "model.layers.1.self_attn.o_proj.weight": (1, 2),
    "model.embed_tokens.weight": (0, 2),
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return {n: t.cuda() for n, t in found.items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Two checkpoints, and for each kind an engine of the first and a fresh engine of the second; all start at once."""
    base = tmp_path_factory.mktemp("gpu")
    logs = Path(os.environ.get("OUT", base))
    folders = [save_model("qwen3_moe", base / str(seed), seed=seed, dtype="bfloat16", **SIZES) for seed in (0, 1)]
    engines = {
        (kind, i): Engine(
            folders[i], logs / f"engine-{kind}-{i}.log", **GRAPHS, **more, **({"enable_sleep_mode": True} if i == 0 else {})
        )
        for kind, more in KINDS.items()
        for i in (0, 1)
    }
    yield folders, engines
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def fresh(started):
    """Bytes and answers of the fresh engine of each kind, which is then ended."""
    found = {}
    for kind in KINDS:
        engine = started[1][kind, 1]
        engine.wait()
        found[kind] = engine.tensors(), engine.answers()
        engine.close()
    return found


def differing(a, b):
    """Names whose bytes differ; workspaces are scratch of the kernels."""
    assert a.keys() == b.keys()
    return [n for n in a if a[n][0] != b[n][0] and "workspace" not in n]


def addresses(tensors):
    return {n: t[1] for n, t in tensors.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_fresh_engine(started, fresh, kind):
    """Every byte, every answer, every address; twice; 100 refits take no memory."""
    folders, engines = started
    engine = engines[kind, 0]
    client = engine.wait()
    print(kind, engine.ask("probe_kernels"))
    old = engine.answers()
    before = engine.tensors()
    given = weights(folders[1])
    sender = LooseSender(client, given, cuts=CUTS, wire_name="ipc", resident=kind == "bf16")
    reply = sender.prepare()[0]
    print(kind, "reload", reply.reload, "layouts", reply.layouts, "seconds", reply.seconds)
    for i in range(2):
        report = sender.refit(f"same-{i}")[0]
        print(kind, report)
        now = engine.tensors()
        assert differing(now, fresh[kind][0]) == []
        assert addresses(now) == addresses(before)
    assert report.writer == "in place"
    assert sender.verify() == len(given)
    assert engine.answers() == fresh[kind][1] != old
    memory = engine.ask("probe_memory")
    mine = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for i in range(100):
        report = sender.refit(f"many-{i}")[0]
    print(kind, "after 100", report.seconds)
    assert engine.ask("probe_memory") == memory
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == mine
    assert differing(engine.tensors(), fresh[kind][0]) == []
    sender.close()


@pytest.mark.parametrize("kind", KINDS)
def test_sleep_then_refit_then_generate(started, fresh, kind):
    """Level 2 drops the weights: an update while they sleep is refused, after waking them a refit makes a fresh engine."""
    folders, engines = started
    engine = engines[kind, 0]
    client = engine.wait()
    sender = LooseSender(client, weights(folders[1]), wire_name="ipc")
    sender.prepare()
    for level in (1, 2):
        engine.ask("engine:sleep", level)
        with pytest.raises(RefitError, match="asleep"):
            sender.refit("asleep")
        assert client.status()[0].state == "ready"
        engine.ask("engine:wake_up", ["weights"])
        sender.refit(f"woken-{level}")
        engine.ask("engine:wake_up", ["kv_cache"])
        engine.ask("engine:reset_prefix_cache")
        assert differing(engine.tensors(), fresh[kind][0]) == []
        assert engine.answers() == fresh[kind][1]
    sender.close()


def test_mxfp8_is_sent(started, fresh):
    """Prequantised by the ceil rule, sent as MXFP8, read back equal; then BF16 again makes the fresh engine."""
    folders, engines = started
    engine = engines["mxfp8", 0]
    client = engine.wait()
    given = weights(folders[1])
    plain = LooseSender(client, given, wire_name="ipc")
    names = plain.prepare({"prequantize": True})[0].quantise
    offered, specs = {}, {}
    for name, tensor in given.items():
        offered[name] = tensor
        if name in names:
            ((codes, scales),) = quantize([tensor])
            offered |= {name: codes.view(torch.float8_e4m3fn), name + SENT_SCALE: scales}
            specs[name] = TensorSpec(tuple(codes.shape), "float8_e4m3fn", "mxfp8", name + SENT_SCALE)
    sender = LooseSender(client, offered, specs=specs, wire_name="ipc")
    reply = sender.prepare({"prequantize": True})[0]
    assert reply.reload == {}
    sender.refit("coded")
    assert sender.verify() == len(given)
    sender.close()
    plain.prepare()
    plain.refit("plain again")
    assert differing(engine.tensors(), fresh["mxfp8"][0]) == []
    plain.close()


def test_mxfp8_is_sent_to_bf16(started):
    """An engine without MXFP8 dequantises."""
    folders, engines = started
    client = engines["bf16", 0].wait()
    given = weights(folders[1])
    name = "model.layers.0.self_attn.o_proj.weight"
    ((codes, scales),) = quantize([given[name]])
    offered = {**given, name: codes.view(torch.float8_e4m3fn), name + SENT_SCALE: scales}
    spec = TensorSpec(tuple(codes.shape), "float8_e4m3fn", "mxfp8", name + SENT_SCALE)
    sender = LooseSender(client, offered, specs={name: spec}, wire_name="ipc")
    sender.prepare({"prequantize": True})
    sender.refit("coded")
    assert sender.verify() == len(given)
    sender.close()


def test_stale_memory_is_found(started):
    """A refit that was begun and then begun anew is refused before anything is written."""
    from vllm_refit_ext.core.messages import IpcInfo
    from vllm_refit_ext.wires import wire

    folders, engines = started
    client = engines["bf16", 0].wait()
    sender = LooseSender(client, weights(folders[1]), wire_name="ipc")
    sender.prepare()
    sender.refit("good")
    old: IpcInfo = wire("ipc").info([sender._sender.begin(sender.buffers)])  # type: ignore[assignment]
    sender._sender.begin(sender.buffers)
    with pytest.raises(RefitError, match="not that of this refit"):
        sender.refit("stale", ipc=old)
    assert client.status()[0].state == "ready"
    assert client.status()[0].version == "good"
    moved = sender.buffers[5].clone()
    sender.buffers[5] = moved
    sender.refit("moved")
    assert sender.verify()
    sender.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("wire_name", "bucket"), [("ring", 64 << 20), ("ring", 100_000), ("shm", 1024)])
def test_other_wires_give_the_same_bytes(started, fresh, kind, wire_name, bucket):
    """Staged in one bucket and in many, and uploaded from the host's shared memory."""
    folders, engines = started
    engine = engines[kind, 0]
    client = engine.wait()
    given = weights(folders[1])
    other = LooseSender(client, {n: 1.5 * t for n, t in given.items()}, wire_name="ipc")
    other.prepare()
    other.refit("other")
    other.close()
    assert differing(engine.tensors(), fresh[kind][0])
    sender = LooseSender(client, given, cuts=CUTS, wire_name=wire_name, bucket_bytes=bucket)
    sender.prepare()
    for i in range(3):
        report = sender.refit(f"{wire_name}-{i}")[0]
    print(kind, wire_name, bucket, report)
    assert differing(engine.tensors(), fresh[kind][0]) == []
    assert engine.answers() == fresh[kind][1]
    sender.close()


def test_the_engines_own_reload_in_between(started, fresh):
    """vLLM reloads from its folder: the next refit asks to prepare anew, and then also writes what the reload left in a second
    copy."""
    folders, engines = started
    engine = engines["mxfp8", 0]
    client = engine.wait()
    sender = LooseSender(client, weights(folders[1]), wire_name="ipc")
    sender.prepare()
    sender.refit("before")
    engine.ask("reload_weights")
    asked = ""
    try:
        sender.refit("after")
    except RefitError as error:
        print("after the engine's own reload:", error)
        asked = str(error)
        assert client.status()[0].state == "ready"
        sender.prepare()
        sender.refit("prepared anew")
    assert not asked or "prepare" in asked
    engine.ask("engine:reset_prefix_cache")
    assert engine.answers() == fresh["mxfp8"][1]
    now = engine.tensors()
    shared = now.keys() & fresh["mxfp8"][0].keys()
    assert [n for n in shared if now[n][0] != fresh["mxfp8"][0][n][0] and "workspace" not in n] == []
    sender.close()


def test_a_trainer_that_dies_is_noticed(started, fresh):
    """Killed between two buckets: the engine says so, is torn and lives; the next trainer heals it."""
    folders, engines = started
    engine = engines["bf16", 0]
    client = engine.wait()
    command = [sys.executable, "-m", "tests.support.gpu_jobs", client.name, str(folders[1])]
    assert subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode == 9
    end = time.monotonic() + 60
    while client.status()[0].state != "torn" and time.monotonic() < end:
        time.sleep(0.1)
    status = client.status()[0]
    assert status.state == "torn"
    assert any("ended" in p.what for p in status.problems)
    sender = LooseSender(client, weights(folders[1]), wire_name="ipc")
    sender.prepare()
    sender.refit("healed")
    assert differing(engine.tensors(), fresh["bf16"][0]) == []
    sender.close()
