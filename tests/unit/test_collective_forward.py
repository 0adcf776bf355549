"""Forwarding on wire `collective`: one copy of a box crosses to a host, every rank gets its own plan and nothing else, and no two
ranks wait for each other, whatever the geometry, the hosts and the bucket.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.geometry import Case, sources_and_engines
from tests.support.rendezvous import by_rank, own_schedule, run_transfer
from tests.support.traffic import traffic
from vllm_refit_ext.core.errors import PlanError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements, concatenate
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.core.table import pack, unpack
from vllm_refit_ext.wires.collective_forward import schedules
from vllm_refit_ext.wires.collective_move import Buffers
from vllm_refit_ext.wires.collective_schedule import schedule_alone
from vllm_refit_ext.wires.collective_table import COLUMNS, Table, pack_table, read_table
from vllm_refit_ext.wires.staging import ALIGN, rounds

BUCKETS = (4, 40, 600, 1 << 20)
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, Plan, list[torch.Tensor], Hosts, int]:
    case = draw(sources_and_engines())
    trainers = 1 + max(b.rank for b in case.source.buffers)
    names = st.sampled_from(["a", "b", "c"])
    apart = draw(st.booleans())  # often no trainer is on a host of an engine
    hosts = Hosts(
        ["t"] * trainers if apart else [draw(names) for _ in range(trainers)], [draw(names) for _ in range(case.target_ranks)]
    )
    plan, sources = by_rank(
        build_plan(case.manifest, case.sources, case.targets), [torch.from_numpy(c.copy()) for c in case.source.contents]
    )
    return case, plan, sources, hosts, draw(st.sampled_from(BUCKETS))


def must_cross(plan: Plan, hosts: Hosts) -> int:
    """Bytes that have to cross, element by element: each element that a host needs and that the plan takes from elsewhere for all
    of its ranks."""
    crossing = 0
    for host in set(hosts.engines):
        for name in plan.names:
            shape = plan.manifest.tensors[name].shape
            needed, at_home = np.zeros(shape, bool), np.zeros(shape, bool)
            for i in np.flatnonzero(plan.tensor == plan.names.index(name)).tolist():
                if hosts.engines[plan.target_rank[i]] == host:
                    box = tuple(slice(a, a + n) for a, n in zip(plan.lo[i], plan.extent[i], strict=True))[: len(shape)]
                    needed[box] = True
                    at_home[box] |= hosts.trainers[plan.source_rank[i]] == host
            crossing += 4 * int((needed & ~at_home).sum())
    return crossing


@given(cases(), st.sampled_from([1, 2, 16]))
@FEW
def test_every_rank_gets_its_plan_and_one_copy_crosses(drawn, operations):
    case, plan, sources, hosts, bucket = drawn
    trainers = len(hosts.trainers)
    memory = [torch.zeros(b.shape) for b in plan.targets]
    moved = run_transfer(plan, hosts, sources, {b.name: m for b, m in zip(plan.targets, memory, strict=True)}, bucket, operations)
    case.check_targets([m.numpy().view(np.uint8).reshape(-1) for m in memory])
    everyone = [*hosts.trainers, *hosts.engines]
    crossed = sum(n for (a, b), n in moved.items() if everyone[a] != everyone[b])
    assert crossed == must_cross(plan, hosts), "one copy a host, to the byte"
    for target in range(len(hosts.engines)):
        got = sum(n for (_, b), n in moved.items() if b == trainers + target)
        assert got == int(plan.for_target(target).nbytes.sum()), "each rank gets its plan's bytes and no more"
    report = traffic(plan, hosts, bucket)
    assert report.crossed == crossed
    for rank in range(trainers):
        assert report.sent[rank] == sum(n for (a, _), n in moved.items() if a == rank)
    for rank in range(len(hosts.engines)):
        assert report.landed[rank] == sum(n for (a, b), n in moved.items() if b == trainers + rank and a < trainers)
        assert report.forwarded[rank] == sum(n for (a, b), n in moved.items() if b == trainers + rank and a >= trainers)


@given(cases())
@MANY
def test_what_a_rank_finds_is_what_the_trainer_planned_for_it_and_within_bounds(drawn):
    _, plan, _, hosts, bucket = drawn
    planned, shared = schedules(plan, hosts, bucket)
    for rank, want in enumerate(planned):
        got = own_schedule(plan, rank, hosts, bucket, shared)
        for column in ("number", "offset", "source", "run"):
            assert np.array_equal(getattr(got, column), getattr(want, column))
        assert (got.landing, got.exchange, got.sizes, got.numbers) == (want.landing, want.exchange, want.sizes, want.numbers)
        assert np.array_equal(got.plan.lo, want.plan.lo)
        payload = np.bincount(got.number, got.plan.nbytes) if len(got.plan) else np.zeros(1)
        assert payload.max() <= max(bucket, 4)
        blocks = max((len(a) + len(b) for a, b in zip(got.landing, got.exchange, strict=True)), default=0)
        if len(got.sizes) < 100:  # it makes a plan a round
            assert Buffers(got, torch.device("cpu")).staging_bytes <= 2 * (max(bucket, 4) + ALIGN * (blocks + 1))
        for number, spans in enumerate(got.landing):
            covered = sorted((s.at, s.at + s.nbytes) for s in [*spans, *(x for x in got.exchange[number] if not x.gives)])
            assert all(b <= c for (_, b), (c, _) in pairwise(covered)), "nothing lands on anything else"
        if rank not in shared:
            alone = schedule_alone(rounds(plan.for_target(rank), bucket), len(hosts.trainers))
            assert (alone.landing, alone.exchange) == (got.landing, got.exchange), "today's path"


@given(cases())
@MANY
def test_messages_start_in_one_order_at_all_ranks(drawn):
    """The argument of `collective_schedule`, on the tables: each rank's list of messages is sorted by one key of all messages."""
    _, plan, _, hosts, bucket = drawn
    found, trainers = schedules(plan, hosts, bucket)[0], len(hosts.trainers)
    sent: dict[tuple[int, int, int], tuple[int, int]] = {}
    got: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank, schedule in enumerate(found):
        me, keys = trainers + rank, []
        for number, (landing, exchange) in enumerate(zip(schedule.landing, schedule.exchange, strict=True)):
            for phase, spans in enumerate((landing, exchange)):
                for s in spans:
                    pair = (me, s.peer) if s.gives else (s.peer, me)
                    keys.append((schedule.numbers[number], phase, pair[1], pair[0], s.tag))
                    (sent if s.gives else got)[(*pair, s.tag)] = (schedule.numbers[number], s.nbytes)
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
    assert {k: v for k, v in got.items() if k[0] >= trainers} == sent, "what one rank hands on is what the other waits for"


def replicas(trainers: int, engines: int, tensors: int = 24, rows: int = 64) -> tuple[Plan, Manifest]:
    """Whole tensors on every trainer rank, whole tensors on every engine rank."""
    manifest = Manifest({f"t{i}": TensorSpec((rows, 4), "float32") for i in range(tensors)})

    def side(ranks: int) -> Placements:
        buffers = [Buffer(f"{n} of {r}", r, "float32", (rows, 4)) for r in range(ranks) for n in manifest.tensors]
        places = [
            Placement(n, r * tensors + i, (0, 0), (rows, 4), 0, (16, 4))
            for r in range(ranks)
            for i, n in enumerate(manifest.tensors)
        ]
        return Placements.from_rows(buffers, places, list(manifest.tensors))

    return build_plan(manifest, side(trainers), side(engines)), manifest


def test_egress_and_what_lands_are_even():
    plan, _ = replicas(4, 8)
    whole = 24 * 64 * 16
    for hosts, copies in (
        (Hosts("tttt", "aaaaaaaa"), 1),
        (Hosts("tttt", "aaaabbbb"), 2),
        (Hosts("tttt", "abcdefgh"), 8),
        (Hosts("tttt", "aaaabcdd"), 4),
    ):
        report = traffic(plan, hosts, 8 * 1024)
        assert sum(report.sent) == report.crossed == copies * whole
        assert max(report.sent) - min(report.sent) <= 1024 * copies, report
        for host in set(hosts.engines):
            landed = [n for n, s in zip(report.landed, hosts.engines, strict=True) if s == host]
            assert sum(landed) == whole
            assert max(landed) - min(landed) <= 1024


def test_egress_is_even_where_one_trainer_rank_alone_holds_what_comes_last():
    """Two trainer ranks hold `d`, each holds experts of its own, and those of rank 1 stand last in the manifest."""
    names = [f"d{i}" for i in range(16)] + [f"a{i}" for i in range(16)] + [f"b{i}" for i in range(16)]
    manifest = Manifest({n: TensorSpec((64, 4), "float32") for n in names})

    def side(ranks: int, holds) -> Placements:
        held = [(n, r) for r in range(ranks) for n in names if holds(n, r)]
        buffers = [Buffer(f"{n} of {r}", r, "float32", (64, 4)) for n, r in held]
        return Placements.from_rows(
            buffers, [Placement(n, i, (0, 0), (64, 4), 0, (16, 4)) for i, (n, _) in enumerate(held)], names
        )

    plan = build_plan(manifest, side(2, lambda n, r: n[0] in ("d", "ab"[r])), side(2, lambda n, r: True))
    for hosts in ("hh", "gh"):
        report = traffic(plan, Hosts("tt", hosts), 1 << 20)
        assert report.sent[0] == report.sent[1] == 24 * 1024 * (1 if hosts == "hh" else 2)


def test_nothing_is_handed_on_where_nothing_crosses():
    plan, _ = replicas(2, 2)
    for hosts in (Hosts.single(2, 2), Hosts("ab", "cd"), Hosts("aa", "aa")):
        assert schedules(plan, hosts, 1024)[1] == {}
    # Trainer rank 0 is at home: what the plan takes from it for some rank crosses for none.
    report = traffic(plan, Hosts("ab", "aa"), 1024)
    assert report.crossed == 0
    assert sum(report.forwarded) > 0


def test_a_tensor_larger_than_a_bucket_lands_on_all_ranks():
    plan, _ = replicas(1, 4, tensors=1, rows=4096)
    report = traffic(plan, Hosts("t", "aaaa"), 16 * 1024)
    assert report.sent == [4096 * 16]
    assert report.landed == [4096 * 4] * 4
    assert report.forwarded == [4096 * 12] * 4


def test_boxes_for_the_reload_and_in_place_are_shared_apart():
    """Engine ranks 0 and 1 reload `a`, ranks 2 and 3 write it in place: a copy for each pair. `b` is in place everywhere."""
    manifest = Manifest({"a": TensorSpec((8,), "float32"), "b": TensorSpec((8,), "float32")})
    table = Placements.from_rows(
        [Buffer(n, 0, "float32", (8,)) for n in "ab"],
        [Placement(n, i, (0,), (8,), 0, (4,)) for i, n in enumerate("ab")],
    )
    targets = []
    for rank in range(4):
        buffers = [Buffer("a", rank, "float32", (8,), "checkpoint" if rank < 2 else "plain"), Buffer("b", rank, "float32", (8,))]
        targets.append(Placements.from_rows(buffers, [Placement(n, i, (0,), (8,), 0, (4,)) for i, n in enumerate("ab")]))
    plan = build_plan(manifest, table, concatenate(targets))
    hosts = Hosts("t", "hhhh")
    assert traffic(plan, hosts, 1024).sent == [32 + 32 + 32]
    for rank in range(4):
        schedule = own_schedule(plan, rank, hosts, 1024, schedules(plan, hosts, 1024)[1])
        assert (schedule.kept, schedule.reloads) == (0, 1 if rank < 2 else 0)
        first = {schedule.plan.names[t] for t in schedule.plan.tensor[schedule.number == 0].tolist()}
        assert first == ({"a"} if rank < 2 else {"a", "b"})


@pytest.mark.parametrize(
    ("layout", "copies"), [("plain", 1), ("checkpoint", 1), ("mxfp8:linear_128x4:floor", 2), ("dequantised:bfloat16", 2)]
)
def test_boxes_with_blocks_are_not_cut_to_be_shared(layout, copies):
    """Engine rank 0 needs the whole, ranks 1 and 2 a half each, cut at 24, inside a block of 32; ranks 3 and 4 as 1 and 2."""
    manifest = Manifest({"w": TensorSpec((2, 64), "float32")})
    table = Placements.from_rows([Buffer("w", 0, "float32", (2, 64))], [Placement("w", 0, (0, 0), (2, 64), 0, (256, 4))])
    targets = []
    for rank, (a, b) in enumerate([(0, 64), (0, 24), (24, 64), (0, 24), (24, 64)]):
        row = Placement("w", 0, (0, a), (2, b), 0, (4 * (b - a), 4))
        targets.append(Placements.from_rows([Buffer("w", rank, "float32", (2, b - a), layout)], [row]))
    plan = build_plan(manifest, table, concatenate(targets))
    assert traffic(plan, Hosts("t", "hhhhh"), 1 << 20).sent == [copies * 512], "equal boxes are shared in any layout"
    for rank, schedule in enumerate(schedules(plan, Hosts("t", "hhhhh"), 1 << 20)[0]):
        assert len(schedule.plan) == (2 if rank == 0 and copies == 1 else 1)


def test_mixed_widths_and_kept_scales_arrive():
    """Two ranks of one host need codes with their scales, bfloat16 and float32 of odd sizes, from two trainer ranks elsewhere."""
    specs = {
        "codes": TensorSpec((3, 64), "float8_e4m3fn", "mxfp8", "codes_scale"),
        "codes_scale": TensorSpec((3, 2), "uint8"),
        "odd": TensorSpec((5,), "bfloat16"),
        "wide": TensorSpec((3,), "float32"),
        "byte": TensorSpec((7,), "uint8"),
        "double": TensorSpec((2,), "float64"),
    }
    manifest = Manifest(specs)
    item = {"float8_e4m3fn": 1, "uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}

    def side(ranks: int, holds) -> Placements:
        buffers, rows = [], []
        for rank in range(ranks):
            for i, (name, spec) in enumerate(specs.items()):
                if holds(rank, i):
                    width = item[spec.dtype]
                    strides = (spec.shape[1] * width, width) if len(spec.shape) == 2 else (width,)
                    rows.append(Placement(name, len(buffers), (0,) * len(spec.shape), spec.shape, 0, strides))
                    buffers.append(Buffer(f"{name} of {rank}", rank, spec.dtype, spec.shape))
        return Placements.from_rows(buffers, rows, list(specs))

    plan = build_plan(manifest, side(2, lambda rank, i: i % 2 == rank), side(3, lambda rank, i: True))
    generator = torch.Generator().manual_seed(0)
    contents = {
        n: torch.randint(0, 120, s.shape, dtype=torch.uint8, generator=generator).to(getattr(torch, s.dtype))
        for n, s in specs.items()
    }
    plan, sources = by_rank(plan, [contents[b.name.partition(" ")[0]] for b in plan.sources])
    names = [
        b.name.partition(" ")[0]
        for b in build_plan(manifest, side(2, lambda rank, i: i % 2 == rank), side(3, lambda r, i: True)).targets
    ]
    hosts = Hosts("tt", "hhx")
    for bucket in (64, 100, 4096):
        memory = {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in plan.targets}
        moved = run_transfer(plan, hosts, sources, memory, bucket)
        for buffer, name in zip(plan.targets, names, strict=True):
            assert torch.equal(memory[buffer.name].view(torch.uint8), contents[name].view(torch.uint8)), (name, bucket)
        whole = sum(t.nbytes for t in contents.values())
        assert sum(n for (a, b), n in moved.items() if a < 2 and b < 4) == whole, "one copy to the host of two"
        assert sum(n for (a, b), n in moved.items() if b == 4) == whole
        schedule = own_schedule(plan, 0, hosts, bucket, schedules(plan, hosts, bucket)[1])
        assert schedule.kept == 1
        reader = Buffers(schedule, torch.device("cpu"))
        for step in reader.steps:
            names_of_step = {step.names[t] for t in step.tensor.tolist()}
            assert ("codes_scale" in names_of_step) == ("codes" in names_of_step), "codes find their scales in the same plan"


def table_of(rank: int = 0) -> tuple[Plan, Table]:
    """A rank's own plan and its table, as it comes: two engine ranks of one host share everything, in several rounds."""
    joint, manifest = replicas(1, 2, tensors=3)
    shared = schedules(joint, Hosts("t", "hh"), 1024)[1][rank]
    mine = build_plan(
        manifest,
        Placements.from_rows(
            joint.sources, [Placement(n, i, (0, 0), (64, 4), 0, (16, 4)) for i, n in enumerate(joint.names)], joint.names
        ),
        Placements.from_rows(
            [b for b in joint.targets if b.rank == rank],
            [Placement(n, i, (0, 0), (64, 4), 0, (16, 4)) for i, n in enumerate(joint.names)],
        ),
    )
    return mine, msgspec.msgpack.decode(pack_table(shared, rank, joint.digest(rank)), type=Table)


def changed(table: Table, column: str, change) -> bytes:
    values = unpack(getattr(table, column)).copy()
    found = change(values)
    return msgspec.msgpack.encode(msgspec.structs.replace(table, **{column: pack(values if found is None else found)}))


def put(index, value):
    def change(values):
        values[index] = value

    return change


REFUSED = {
    "another rank": (lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, rank=1)), "another rank"),
    "another plan": (lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, digest="0" * 64)), "another plan"),
    "not a table": (lambda t: b"\xc1", "can't be read"),
    "a field more": (
        lambda t: msgspec.msgpack.encode(msgspec.to_builtins(t, builtin_types=(bytes,)) | {"x": 1}),
        "can't be read",
    ),
    "a column cut short": (lambda t: changed(t, "run", lambda v: v[:-1]), "differ in length"),
    "a move that is not there": (lambda t: changed(t, "move", put(0, 99)), "moves don't have"),
    "a negative move": (lambda t: changed(t, "move", put(0, -1)), "moves don't have"),
    "a box outside its move": (lambda t: changed(t, "start", put((0, 0), 60)), "moves don't have"),
    "an empty box": (lambda t: changed(t, "extent", put((0, 0), 0)), "moves don't have"),
    "a box twice": (lambda t: changed(t, "start", put((0, 0), 16)), "exactly once"),
    "a box left out": (
        lambda t: msgspec.msgpack.encode(
            msgspec.structs.replace(t, **{c: pack(unpack(getattr(t, c))[1:]) for c in COLUMNS[:-1]})
        ),
        "exactly once",
    ),
    "a move twice": (lambda t: changed(t, "move", put(0, 1)), "exactly once"),
    "an engine rank too high": (lambda t: changed(t, "holder", put(0, 2)), "take no part"),
    "a negative trainer rank": (lambda t: changed(t, "origin", put(0, -1)), "take no part"),
    "handing on to itself": (lambda t: changed(t, "gives", put((0, 2), 0)), "hands on run"),
    "handing on what does not land": (lambda t: changed(t, "gives", put((0, 0), 77)), "hands on run"),
    "handing on twice": (lambda t: changed(t, "gives", lambda v: np.concatenate([v, v[:1]])), "hands on run"),
    "all in one round": (lambda t: changed(t, "number", put(slice(None), 0)), "hands on run|larger than a bucket"),
    "a round too large": (
        lambda t: msgspec.msgpack.encode(
            msgspec.structs.replace(
                t,
                number=pack(np.zeros(len(unpack(t.number)), np.int64)),
                gives=pack(np.zeros((0, 3), np.int64)),
            )
        ),
        "larger than a bucket",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_table_that_does_not_fit_is_refused(what):
    plan, table = table_of()
    raw = msgspec.msgpack.encode(table)
    assert read_table(raw, plan, 0, 1, 2, 1024).sizes, "the table as it came is taken"
    change, text = REFUSED[what]
    with pytest.raises(PlanError, match=text) as caught:
        read_table(change(table), plan, 0, 1, 2, 1024)
    assert "engine rank 0" in str(caught.value)
