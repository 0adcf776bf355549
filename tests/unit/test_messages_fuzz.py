"""A mutation of any message is a named problem, or changes nothing. Against the real reading and planning."""

from __future__ import annotations

import base64
import json

import msgspec
import numpy as np
import pytest

from tests.support.mutate import SEEDS, mutated
from vllm_refit_ext.core.errors import ManifestError, RefitError
from vllm_refit_ext.core.manifest import Manifest, Offer, TensorSpec, pack_offer, parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.messages import (
    CollectiveInfo,
    IpcInfo,
    IpcRank,
    NixlInfo,
    NixlRank,
    PrepareReply,
    RingInfo,
    RingRank,
    Segment,
    ShmInfo,
    Status,
    UpdateInfo,
    VerifyReply,
    from_rpc,
    read_digests,
    to_rpc,
)
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.protocol import PROTOCOL, check_unchanged
from vllm_refit_ext.core.table import pack, pack_placements

MANIFEST = Manifest(
    {
        "q": TensorSpec((8, 64), "bfloat16"),
        "w": TensorSpec((4, 64), "float8_e4m3fn", "mxfp8", "w_scale"),
        "w_scale": TensorSpec((4, 2), "uint8"),
        "bias": TensorSpec((8,), "float32"),
        "one": TensorSpec((), "float32"),
    },
    {"tied": "q"},
)


def cut_in_two():
    """Two trainer ranks with half of `q` each in a fused buffer; the rest whole on both."""
    buffers, rows = [], []
    for rank in range(2):
        buffers.append(Buffer("qkv", rank, "bfloat16", (6, 64)))
        rows.append(Placement("q", len(buffers) - 1, (4 * rank, 0), (4 * rank + 4, 64), 128, (128, 2)))
        for name in ("w", "w_scale", "bias", "one"):
            spec = MANIFEST.tensors[name]
            (row,) = whole_tensors(Manifest({name: spec})).rows()
            n = len(spec.shape)
            rows.append(Placement(name, len(buffers), row.lo[:n], row.hi[:n], 0, row.strides[:n]))
            buffers.append(Buffer(name, rank, spec.dtype, spec.shape))
    return Placements.from_rows(buffers, rows, list(MANIFEST.tensors))


SOURCES = cut_in_two()
TARGETS = whole_tensors(MANIFEST)
OFFER = Offer(MANIFEST, SOURCES, 0, ("a", "b"))
DIGEST = build_plan(MANIFEST, SOURCES, TARGETS).digest(0)


def plan_digest(info):
    """What an engine rank of number 0 would answer, None for a listed problem."""
    try:
        offer = parse_state_dict_info(info)
        sources = offer.sources if offer.sources is not None else whole_tensors(offer.manifest)
        return build_plan(offer.manifest, sources, TARGETS).digest(0)
    except RefitError as error:
        msgspec.msgpack.encode(error.problems)  # the problems themselves cross to the trainer
        return None


def test_the_offer_is_read():
    assert plan_digest(pack_offer(OFFER)) == DIGEST
    assert plan_digest(base64.b64encode(pack_offer(OFFER)).decode()) == DIGEST


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_offers(seeds):
    plain = msgspec.msgpack.decode(pack_offer(OFFER))
    found = [plan_digest(msgspec.msgpack.encode(mutated(plain, seed))) for seed in seeds]
    assert set(found) <= {None, DIGEST}
    assert found.count(None) > 0.9 * len(seeds)


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_offers_without_a_checksum(seeds):
    """A wrong trainer's offer has a good checksum or none. Then the plan's digest tells it from what the sender planned."""
    plain = msgspec.msgpack.decode(pack_offer(OFFER)) | {"checksum": ""}
    found = [plan_digest(msgspec.msgpack.encode(mutated(plain, seed))) for seed in seeds]
    assert {DIGEST, None} < set(found)


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_bytes_of_an_offer(seeds):
    whole = pack_offer(OFFER)
    for seed in seeds:
        (data,) = mutated([whole], seed)
        assert plan_digest(data) in (None, DIGEST)


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_mappings(seeds):
    plain = {
        n: {"shape": list(t.shape), "dtype": t.dtype, "format": t.format, "scale": t.scale} for n, t in MANIFEST.tensors.items()
    }
    good = plan_digest(plain)
    assert good
    for seed in seeds:
        plan_digest(mutated(plain, seed, python=True))


SHM = ShmInfo(segments=[Segment(rank=0, name="s", nbytes=4096, nonce=5)], offsets=pack(np.arange(4)))
IPC = IpcInfo(ranks=[IpcRank(rank=0, process="p", device="d", epoch="e", nonce=3, export=b"abc")])
NIXL = NixlInfo(ranks=[NixlRank(rank=0, epoch="e", nonce=3, export=b"abc", host="s")], bucket_bytes=4096)
RINGS = RingInfo(rings=[RingRank(rank=0, name="r", slots=[64, 64], start=64, epoch=9)], bucket_bytes=4096, engines=2)
GROUP = CollectiveInfo(host="127.0.0.1", port=29500, backend="gloo", trainers=1, engines=2, bucket_bytes=4096)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(
    "part", [{"shm": SHM}, {"ipc": IPC}, {"nixl": NIXL}, {"ring": RINGS}, {"collective": GROUP}], ids=lambda p: next(iter(p))
)
def test_mutated_updates(part, seeds):
    update = UpdateInfo(wire=next(iter(part)), version="v", session="s", digests={"0": DIGEST}, deadline_s=60, **part)
    plain = to_rpc(update)
    assert plain["checksum"]
    good = from_rpc(UpdateInfo, json.loads(json.dumps(plain)), "update_weights")
    check_unchanged(good, "update_weights")
    for seed in seeds:
        try:
            read = from_rpc(UpdateInfo, mutated(plain, seed, python=True), "update_weights")
            check_unchanged(read, "update_weights")
        except RefitError as error:
            msgspec.msgpack.encode(error.problems)
            continue
        assert msgspec.structs.replace(read, checksum=good.checksum) == good


@pytest.mark.parametrize("seeds", SEEDS)
def test_mutated_digests_of_verify(seeds):
    plain = {"0": {"q": "0" * 16, "bias": "f" * 16}, "1": {"q": "1" * 16}}
    for value in (7, "text", [1, 2], {"0": 3}, {0: {"q": "1"}}, {"0": {"q": 1}}, {"0": {"\ud800": "1"}}):
        with pytest.raises(RefitError, match="digests it can't read"):
            read_digests(value)
    for seed in seeds:
        try:
            read_digests(mutated(plain, seed, python=True))
        except RefitError as error:
            msgspec.msgpack.encode(error.problems)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("kind", [PrepareReply, Status, VerifyReply])
def test_mutated_replies(kind, seeds):
    targets = {"targets": pack_placements(TARGETS)} if kind is PrepareReply else {}
    plain = to_rpc(kind(rank=0, **targets))
    for seed in seeds:
        try:
            from_rpc(kind, mutated(plain, seed, python=True), "a call")
        except RefitError as error:
            msgspec.msgpack.encode(error.problems)


@pytest.mark.parametrize("number", [1, PROTOCOL + 1, None])
def test_another_protocol_is_refused_with_both_numbers(number):
    """None: an offer of the first protocol, which carried no number. Other messages without one are written by hand."""
    shown = rf"got {number or 1}; wanted {PROTOCOL}"

    def of(message):
        rest = {k: v for k, v in message.items() if k != "protocol"} | {"a field of that protocol": 1}
        return rest if number is None else rest | {"protocol": number}

    with pytest.raises(RefitError, match=shown):
        parse_state_dict_info(msgspec.msgpack.encode(of(msgspec.msgpack.decode(pack_offer(OFFER)))))
    for message in (
        ()
        if number is None
        else (UpdateInfo(wire="shm", version="v", session="s"), PrepareReply(rank=0), Status(rank=0), VerifyReply(rank=0))
    ):
        with pytest.raises(RefitError, match=shown):
            from_rpc(type(message), of(to_rpc(message)), "a call")


def test_a_name_twice_in_a_packed_offer_is_refused_and_both_are_shown():
    encode = msgspec.msgpack.encode
    first, second = {"shape": [8], "dtype": "float32"}, {"shape": [9], "dtype": "float32"}
    tensors = b"\x82" + encode("w") + encode(first) + encode("w") + encode(second)
    whole = encode({"manifest": {"tensors": 0, "aliases": {}}, "sources": None, "first_rank": 0, "protocol": PROTOCOL})
    with pytest.raises(ManifestError, match=r"tensor 'w': the packed offer holds a tensor twice .*\[8\].*\[9\]"):
        parse_state_dict_info(whole.replace(encode("tensors") + b"\x00", encode("tensors") + tensors))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"names": ["q", "w", "w_scale", "bias", "bias"]}, "stands twice"),
        ({"offset": pack(np.full(10, 2**62))}, "outside its buffer"),
        ({"offset": pack(SOURCES.offset + 1)}, "between elements"),
        ({"strides": pack(np.where(SOURCES.strides == 128, 0, SOURCES.strides))}, "at the same bytes"),
        ({"strides": pack(np.where(SOURCES.strides == 128, 2**62, SOURCES.strides))}, "outside its buffer"),
        ({"tensor": pack(np.int64(3))}, "don't fit"),
        ({"hi": pack(np.where(SOURCES.hi == 64, -1, SOURCES.hi))}, "lo > hi"),
    ],
)
def test_tables_that_do_not_hold_together(change, match):
    packed = msgspec.structs.replace(pack_placements(SOURCES), **change)
    plain = msgspec.msgpack.decode(pack_offer(OFFER)) | {
        "checksum": "",
        "sources": msgspec.to_builtins(packed, builtin_types=(bytes,)),
    }
    with pytest.raises(ManifestError, match=match):
        parse_state_dict_info(msgspec.msgpack.encode(plain))


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        ({"dtype": "torch.bfloat16"}, "unknown dtype"),
        ({"shape": [2**40, 2**40]}, "at most 256 TiB"),
        ({"shape": [-6, -64]}, "zero or more"),
        ({"rank": 2**40}, "no rank has this number"),
        ({"rank": -1}, "no rank has this number"),
        ({"layout": "marlin"}, "must be plain"),
    ],
)
def test_buffers_that_can_not_be(buffer, match):
    plain = msgspec.msgpack.decode(pack_offer(OFFER)) | {"checksum": ""}
    plain["sources"]["buffers"][0] |= buffer
    with pytest.raises(ManifestError, match=match):
        parse_state_dict_info(msgspec.msgpack.encode(plain))
