"""What a peer may write where others read it: headers and words in shared memory, a store's keys, bodies of HTTP answers. The
outcome is a listed problem, or what was meant."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.support.mutate import SEEDS, mutated, spoilt
from tests.support.ring_ranks import Ranks, crossed
from vllm_refit_ext import client
from vllm_refit_ext.core.errors import RefitError, WireError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import (
    PrepareReply,
    Segment,
    ShmInfo,
    Status,
    TakeReply,
    UpdateInfo,
    VerifyReply,
    decoded,
    to_rpc,
)
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.core.table import pack
from vllm_refit_ext.receiver.replicas import memory_of
from vllm_refit_ext.wires import ring, ring_buffers, shared_file, shm
from vllm_refit_ext.wires.answers import Answers
from vllm_refit_ext.wires.registry import Entry
from vllm_refit_ext.wires.rendezvous import Store, Verdict, open_store


def outcomes_of(seeds: range, attempt: Callable[[int], None]) -> Counter[str]:
    """How often `attempt(seed)` was refused by a listed problem, and how often it passed. Anything else that it raises fails."""
    counts = Counter[str]()
    for seed in seeds:
        try:
            attempt(seed)
            counts["passed"] += 1
        except RefitError as error:
            msgspec.msgpack.encode(error.problems)
            counts["refused"] += 1
    return counts


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_segments_header(seeds: range) -> None:
    buffers = [Buffer("w", 0, "uint8", (1000,))]
    offsets, sizes = shm.segment_offsets(buffers, numbers(1))
    publisher = shm.ShmPublisher(0, {0: int(offsets[0])}, sizes[0], shm.seal_of(offsets))
    meant = torch.arange(1000).to(torch.uint8)
    info = shm.shm_info([publisher.publish({0: meant})], offsets)
    memory, kept = publisher._file.memory, shm.ShmReader(info, buffers, numbers(1))
    whole = bytes(memory[: shm.HEADER.size])

    def attempt(seed: int) -> None:
        memory[: shm.HEADER.size] = spoilt(whole, seed)
        reader = shm.ShmReader(info, buffers, numbers(1), kept.maps)
        reader.confirm()
        assert torch.equal(reader.memory(0), meant)

    counts = outcomes_of(seeds, attempt)
    assert min(counts["refused"], counts["passed"]) > len(seeds) // 20, "the process's number and what pads the header are free"
    publisher.close()


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_rings_header_and_words(seeds: range) -> None:
    """Bytes that are read too early are caught by the digest; here they must lie within the mapping, in the right number."""
    plan, tensors, _ = crossed(1, 1, rows=8)
    ranks = Ranks(plan, Hosts("a", "a"), 256, tensors)
    (owner,) = (s._ring for s in ranks.senders)
    report = ring.info([s.begin(t) for s, t in zip(ranks.senders, ranks.tensors, strict=True)])
    update = UpdateInfo(wire="ring", version="v", session="s", ring=report)
    size = ring_buffers.words_bytes(1)
    for count in range(4):
        owner.words.write(0, ring_buffers.READY, owner.info.epoch, count)
    memory, whole = owner._file.memory, bytes(owner._file.memory[:size])
    places = [*range(ring_buffers.HEADER.size), *range(ring_buffers.WORDS, size)]
    picked = bytes(whole[i] for i in places)

    def attempt(seed: int) -> None:
        changed = bytearray(whole)
        for place, byte in zip(places, spoilt(picked, seed), strict=True):
            changed[place] = byte
        memory[:size] = bytes(changed)
        reader = ring.open_reader(update, ranks.plans[0], {} if seed % 4 == 0 else ranks.kept[0])
        reader.start(time.monotonic())
        try:
            for step in reader.steps:
                for buffer in set(step.source.tolist()):
                    found = reader.memory(buffer)
                    assert owner.memory.numel() >= found.numel() > 0
            reader.confirm()
        finally:
            reader.close()

    counts = outcomes_of(seeds, attempt)
    assert counts["refused"] > len(seeds) // 10
    memory[:size] = whole
    ranks.close()


def test_a_pipe_or_a_folder_in_a_files_place_keeps_nobody_waiting() -> None:
    name = f"refit-{os.geteuid()}-1-{os.urandom(8).hex()}-r0"
    path = shared_file.FOLDER / name
    for make, end in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(path)
        try:
            with pytest.raises(WireError):
                shared_file.open_file(name, 0, 64, "a test", "")
            shared_file.remove_leftovers()
        finally:
            if path.exists():
                end(path)


@pytest.mark.parametrize("seeds", SEEDS)
def test_what_a_replica_says_of_its_memory(seeds: range) -> None:
    part = ShmInfo(segments=[Segment(rank=0, name="s", nbytes=4096, nonce=5)], offsets=pack(numbers(4)))
    meant = UpdateInfo(wire="shm", version="v", session="s", shm=part)
    plain, entry = msgspec.msgpack.decode(msgspec.msgpack.encode(meant)), Entry("v", "e", "ready", "shm", publisher="a replica")

    def attempt(seed: int) -> None:
        memory = memory_of(entry, msgspec.msgpack.encode(mutated(plain, seed)))
        assert memory.wire == "shm"

    counts = outcomes_of(seeds, attempt)
    assert min(counts.values()) > len(seeds) // 20
    for wire in ("collective", "nixl", "ring", "ipc"):
        with pytest.raises(WireError, match="is not its entry's"):
            memory_of(entry, msgspec.msgpack.encode(msgspec.structs.replace(meant, wire=wire)))


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91" * 5000, b"\xff\xfe", b"\xa2\xff\xfe"])
def test_bytes_that_are_no_message(raw: bytes) -> None:
    with pytest.raises(WireError, match="can't be read"):
        decoded(Verdict, raw, "a test")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    host, port, served = open_store()
    yield Store(host, port, time.monotonic() + 20)
    del served


@pytest.mark.parametrize("seeds", SEEDS)
def test_verdicts_of_a_rendezvous(store: Store, seeds: range) -> None:
    problem = {"what": "it failed", "where": "rank 1"}
    plain = [{"words": [], "problems": [problem], "kind": "WireError"}]
    deadline = time.monotonic() + 3600

    def attempt(seed: int) -> None:
        raw = msgspec.msgpack.encode(mutated(plain, seed)[0])
        store.call(lambda s: s.set("k/verdict", raw), deadline)
        if (error := store.stopped("k", deadline)) is not None:
            raise error

    assert outcomes_of(seeds, attempt)["refused"] == len(seeds)
    short = msgspec.msgpack.encode(Verdict(words=[b"w"]))
    store.call(lambda s: s.set("two/verdict", short), deadline)
    with pytest.raises(WireError, match="not a word of each rank"):
        store.rendezvous("two", 0, ["trainer rank 0", "engine rank 0"], b"w", time.monotonic() + 1)


@pytest.mark.parametrize("name", ["", "-", "0-1", "0-1-x", f"1-1-{0:016}", f"0-999999-{0:016}", f"0-2-{0:016}", "\ud800"])
def test_names_of_replies(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    answers = Answers()
    to = answers.ask()
    host, _, port = answers.address.rpartition(":")
    connection, deadline = Store(host, int(port), time.monotonic() + 20), time.monotonic() + 20
    raw = name.encode(errors="surrogatepass")
    connection.call(lambda s: s.append(to.rpartition("/")[2], (raw + b" ").decode(errors="replace")), deadline)
    with pytest.raises(WireError):
        answers.take(to)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers every POST with `body`."""

    protocol_version = "HTTP/1.1"
    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[tuple[type[Server], client.HTTPClient]]:
    kind = type("Handler", (Server,), {})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield kind, client.HTTPClient(f"http://127.0.0.1:{httpd.server_address[1]}")
    httpd.shutdown()
    httpd.server_close()


CALLS: dict[str, tuple[Any, Callable[[client.HTTPClient], Any]]] = {
    "prepare": (PrepareReply(rank=0), lambda c: c.prepare({}, deadline_s=60)),
    "status": (Status(rank=0), lambda c: c.status(60)),
    "take": (TakeReply(rank=0, version="v"), lambda c: c.take(deadline_s=60)),
    "verify": (VerifyReply(rank=0, digests={"w": "0" * 16}), lambda c: c.verify({"0": {"w": "0" * 16}}, 60)),
}


class Body(client.HTTPClient):
    """Reads `body` in place of what comes from a server, 10^5 connections being too many."""

    body = b""

    def _text(self, *_: object) -> str:
        return self.body.decode(errors="replace")


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("call", CALLS)
def test_bodies_of_http_answers(call: str, seeds: range) -> None:
    """Half of them are other JSON, half other bytes."""
    engine = Body("http://127.0.0.1:9")
    reply, ask = CALLS[call]
    plain = {"results": [to_rpc(reply)]}
    text = json.dumps(plain).encode()

    def attempt(seed: int) -> None:
        other = json.dumps(mutated(plain, seed), default=lambda odd: odd.hex()).encode()
        engine.body = other if seed % 2 else spoilt(text, seed)
        ask(engine)

    assert outcomes_of(seeds, attempt)["refused"] > len(seeds) // 3
    engine.body = text
    ask(engine)


def test_a_body_without_end_or_of_endless_depth(
    server: tuple[type[Server], client.HTTPClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, engine = server
    handler.body = b"[" * 200_000
    with pytest.raises(WireError, match="not one of vLLM's"):
        engine.status(60)
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    handler.body = b" " * (1 << 20 | 1)
    with pytest.raises(WireError, match="too long"):
        engine.status(60)


def numbers(n: int) -> Any:
    """int64 [n], 0 to n - 1."""
    return torch.arange(n).numpy()
