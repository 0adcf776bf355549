"""The sender of any trainer: several engines at once, all ranks prepared or none, and what a refit looks at."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY

from tests.support.small_engine import PlainSource, SmallEngine
from vllm_refit_ext.client import FunctionClient
from vllm_refit_ext.core.errors import ConfigError, RefitError, SessionError, VerifyError, WireError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.plan_wire import pack_plan, unpack_plan
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.sender.prequantize import Prequantised
from vllm_refit_ext.sender.residency import ResidencyConfig


@pytest.fixture
def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8, dtype=torch.bfloat16))


@pytest.fixture
def sender_of(module):
    """Makes a sender of the module to engines; closes all at the end."""
    opened = []

    def make(*engines, source=None, **config):
        sender = RefitSender(source or PlainSource(module), engines, SenderConfig(**{"deadline_s": 20.0} | config))
        opened.extend([sender, *engines])
        return sender

    yield make
    for one in opened:
        one.close()


def same(engine, module):
    return all(torch.equal(engine.weights[n], p.detach()) for n, p in module.named_parameters())


def test_a_plain_trainer_refits_and_verifies(module, sender_of):
    engine = SmallEngine()
    sender = sender_of(engine)
    said: list[str] = []
    plan = sender.prepare(said.append)
    assert said == ["describing this rank's shards", "planning with the engines", "opening wire shm"]
    report = sender.refit("a")
    assert report.nbytes == plan.nbytes.sum() == sum(p.nbytes for p in module.parameters())
    assert same(engine, module)
    assert sender.verify() == 4
    with torch.no_grad():
        module[0].bias.add_(1)
    with pytest.raises(VerifyError, match=r"engine 0 · engine rank 0: 1 tensor.s. differ, the first is '0\.bias'"):
        sender.verify()
    module[1].weight.data = module[1].weight.data + 1  # other memory
    sender.refit("b")
    assert same(engine, module)
    assert sender.verify() == 4


def together(count):
    """For `SmallEngine.before`: returns once `count` engines are in the same call."""
    barriers = {m: threading.Barrier(count) for m in ("prepare_refit_info", "update_weights", "refit_verify")}
    return lambda method: barriers[method].wait(15) if method in barriers else None


def test_engines_are_called_at_the_same_time(module, sender_of):
    meet = together(3)
    engines = [SmallEngine(before=meet) for _ in range(3)]
    sender = sender_of(*engines)
    sender.prepare()
    sender.refit("v")
    assert sender.verify() == 12
    assert all(same(e, module) and e.version == "v" for e in engines)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_engine_fails_and_the_others_serve(module, sender_of, failing):
    def fail(method):
        if method == "update_weights":
            raise ValueError("out of luck")

    engines = [SmallEngine(name) for name in ("http://a", "", "http://c")]
    engines[failing].before = fail
    names = ["engine http://a", "engine 1", "engine http://c"]
    sender = sender_of(*engines)
    sender.prepare()
    with pytest.raises(RefitError, match="out of luck") as caught:
        sender.refit("v")
    wheres = [p.where for p in caught.value.problems]
    assert wheres[0].startswith(names[failing])
    rest = [n for n in names if n != names[failing]]
    assert wheres[1] == ", ".join(rest)
    assert "serve version 'v'" in caught.value.problems[1].what
    assert [e.version for e in engines] == ["" if i == failing else "v" for i in range(3)]
    engines[failing].before = lambda method: None
    sender.refit("w")
    assert all(same(e, module) and e.version == "w" for e in engines)


def test_engines_that_all_fail_are_all_named(sender_of):
    def fail(method):
        if method == "prepare_refit_info":
            raise ValueError("no")

    sender = sender_of(SmallEngine("http://a", fail), SmallEngine("", fail))
    with pytest.raises(RefitError) as caught:
        sender.prepare()
    assert [p.where.partition(" ·")[0] for p in caught.value.problems] == ["engine http://a", "engine 1"]
    assert sender.prepared is None
    with pytest.raises(SessionError, match="before prepare"):
        sender.refit("v")
    with pytest.raises(SessionError, match="before prepare"):
        sender.verify()


def test_a_prepare_that_fails_leaves_nothing_prepared(module, sender_of, monkeypatch):
    engine = SmallEngine()
    sender = sender_of(engine)
    sender.prepare()
    engine.before = lambda method: 1 / 0
    with pytest.raises(RefitError):
        sender.prepare()
    with pytest.raises(SessionError, match="before prepare"):
        sender.refit("v")
    engine.before = lambda method: None
    sender.prepare()
    sender.refit("v")
    assert same(engine, module)


@pytest.mark.parametrize("error", [ZeroDivisionError("odd"), WireError("odd"), MemoryError("odd")])
def test_whatever_sending_raises_refuses_the_engines(module, sender_of, error):
    """Wire `collective` for real: the engines wait for the trainer's ranks and hear of the failure instead of the deadline."""
    engines = [SmallEngine("http://a"), SmallEngine()]
    sender = sender_of(*engines, wire="collective", bucket_bytes=4096, deadline_s=60.0)
    sender.prepare()
    half = sender.prepared.half
    transfer = half.transfer

    def fail(*_):
        raise error

    half.transfer = fail
    with pytest.raises(RefitError, match="odd"):
        sender.refit("never")
    assert all("odd" in str(e.failed) and "answer" not in str(e.failed) for e in engines)
    half.transfer = transfer
    sender.refit("v")
    assert all(same(e, module) for e in engines)


@pytest.mark.parametrize("wire", ["shm", "ring", "collective"])
@pytest.mark.parametrize("change", ["transposed", "expanded", "smaller", "cast", "gone"])
def test_memory_that_no_longer_fits_is_named_on_every_wire(module, sender_of, wire, change):
    engine = SmallEngine()
    sender = sender_of(engine, wire=wire, bucket_bytes=4096)
    sender.prepare()
    sender.refit("v")
    weight = module[1].weight
    if change == "transposed":
        weight.data = weight.data.t().contiguous().t()  # the same values and shape
    elif change == "expanded":
        weight.data = weight.data[:1].expand(8, 32)
    elif change == "smaller":
        weight.data = weight.data[:4]
    elif change == "cast":
        weight.data = weight.data.float()
    else:
        weight.untyped_storage().resize_(0)
    with pytest.raises(WireError, match=r"1\.weight"):
        sender.refit("w")
    assert engine.version == "v"


class Replicas(FunctionClient):
    """Several engines behind one client, as vLLM's data parallel replicas are."""

    def __init__(self, *engines):
        super().__init__(lambda method, args, timeout: [r for e in engines for r in e.call(method, args, timeout)])
        self.engines = engines

    def close(self):
        for engine in self.engines:
            engine.close()


def test_replicas_behind_one_client_all_get_the_weights(module, sender_of):
    pair = Replicas(SmallEngine(), SmallEngine())
    sender = sender_of(pair, SmallEngine())
    sender.prepare()
    sender.refit("v")
    assert all(same(e, module) for e in pair.engines)
    assert sender.verify() == 8
    pair.engines[1].weights["0.bias"].add_(1)
    with pytest.raises(VerifyError, match=r"engine 0 .*'0\.bias'"):
        sender.verify()
    with pytest.raises(ConfigError, match="data parallel replicas"):
        sender_of(pair, wire="collective").prepare()


@pytest.mark.parametrize("bad", ["", None, 3])
def test_a_version_is_a_text(sender_of, bad):
    sender = sender_of(SmallEngine())
    sender.prepare()
    with pytest.raises(SessionError, match="needs a version"):
        sender.refit(bad)


def test_a_source_that_does_not_hold_together_is_refused(module, sender_of):
    source = PlainSource(module)
    del source.specs["0.bias"]
    with pytest.raises(ConfigError, match="no entry in specs"):
        sender_of(SmallEngine(), source=source).prepare()
    with pytest.raises(ConfigError, match="needs an engine client"):
        sender_of().prepare()


BAD = {
    "deadline_s": [0, -1.0, float("nan"), float("inf"), 1e9, "5", None],
    "wire": ["carrier pigeon", "", None],
    "caches": ["forget", None],
    "bucket_bytes": [0, 1023, -1, 2.5, True],
    "registry_port": [-1, 65536, 1.5, "80"],
    "sample": [-1, 1.5, True],
    "unused": ["name", [1], None],
    "keep": ["name", [1], None],
    "quantise": ["name", ("name",)],
} | {f.name: ["no", 1] for f in msgspec.structs.fields(SenderConfig) if f.type is bool}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_a_configuration_is_checked_when_it_is_made(field, value):
    with pytest.raises(ConfigError, match=f"SenderConfig.{field}"):
        SenderConfig(**{field: value})


def test_every_field_of_the_configuration_is_checked():
    assert set(BAD) == {f.name for f in msgspec.structs.fields(SenderConfig)}
    with pytest.raises(ConfigError) as caught:
        SenderConfig(wire="x", deadline_s=float("nan"), sample=-1)
    assert len(caught.value.problems) == 3
    assert SenderConfig(unused=["a"]).unused == ("a",)
    for field in msgspec.structs.fields(ResidencyConfig):
        with pytest.raises(ConfigError, match=f"ResidencyConfig.{field.name}"):
            ResidencyConfig(**{field.name: "no"})


@pytest.mark.parametrize("names", [[], ["w"]])
def test_parameters_beside_quantised_ones_are_offered_where_they_lie_now(names):
    tensors = [torch.randn(4, 64), torch.randn(5)]
    buffers = [Buffer("w", 0, "float32", (4, 64)), Buffer("n", 0, "float32", (5,))]
    rows = [Placement("w", 0, (0, 0), (4, 64), 0, (256, 4)), Placement("n", 1, (0,), (5,), 0, (4,))]
    specs = {b.name: TensorSpec(b.shape, b.dtype) for b in buffers}
    offered = Prequantised(specs, Placements.from_rows(buffers, rows, list(specs)), tensors, names)
    offered.fill(tensors)
    moved = [tensors[0], torch.randn(5)]
    assert torch.equal(offered.fill(moved)[1], moved[1])
    assert torch.equal(offered.tensors[1], moved[1])


def test_a_rank_is_sent_its_own_part_of_the_plan(module):
    specs = {f"t{i}": TensorSpec((4, 2), "float32") for i in range(3)}
    buffers = [Buffer(n, rank, "float32", (4, 2)) for rank, n in enumerate(specs)]
    rows = [Placement(n, i, (0, 0), (4, 2), 0, (8, 4)) for i, n in enumerate(specs)]
    sources = Placements.from_rows(buffers, rows, list(specs))
    plan = build_plan(Manifest(specs), sources, sources.as_rank(0))
    packed = pack_plan(plan.for_source(1))
    assert [b.name for b in packed.sources] == [b.name for b in packed.targets] == ["t1"]
    mine = unpack_plan(packed, plan.manifest)
    assert (mine.source_rank.tolist(), mine.target_rank.tolist(), mine.tensor.tolist()) == ([1], [0], [1])


def test_refits_are_counted(module, sender_of):
    def count(result):
        return REGISTRY.get_sample_value("refit_total", {"result": result}) or 0.0

    before, nbytes = count("ok"), REGISTRY.get_sample_value("refit_bytes_total") or 0.0
    engine = SmallEngine()
    sender = sender_of(engine)
    sender.prepare()
    report = sender.refit("v")
    assert count("ok") == before + 1
    assert REGISTRY.get_sample_value("refit_bytes_total") == nbytes + report.nbytes
    assert REGISTRY.get_sample_value("refit_seconds_count", {"phase": "total"}) >= 1
    failed = count("RefitError")
    engine.before = lambda method: 1 / 0
    with pytest.raises(RefitError):
        sender.refit("w")
    assert count("RefitError") == failed + 1
