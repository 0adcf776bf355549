"""Clients: a deadline for the whole of every call, answers of every form, and digests of everything or an error."""

from __future__ import annotations

import asyncio
import http.server
import threading
import time
from types import SimpleNamespace

import pytest

from vllm_refit_ext import client as module
from vllm_refit_ext.client import AsyncLLMClient, FunctionClient, HTTPClient, LLMClient
from vllm_refit_ext.core.errors import ConfigError, DeadlineError, RefitError, VerifyError, WireError
from vllm_refit_ext.core.messages import PrepareReply, Status, UpdateInfo, UpdateReport, VerifyReply, to_rpc
from vllm_refit_ext.engine import frontend

INFO = UpdateInfo(wire="shm", version="v", session="s", deadline_s=0.3)
CALLS = {
    "prepare": lambda client, s: client.prepare({}, deadline_s=s),
    "update": lambda client, s: client.update(UpdateInfo(wire="shm", version="v", session="s", deadline_s=s)),
    "status": lambda client, s: client.status(s),
    "abort": lambda client, s: client.abort(s),
    "verify": lambda client, s: client.verify(None, s),
}


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with `body`, or a byte at a time without end where that is None."""

    body: bytes | None = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        if self.body is not None:
            self.wfile.write(self.body)
            return
        try:
            while True:
                self.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server():
    """Starts a server that answers with a body; returns its URL."""
    started = []

    def start(body: bytes | None) -> str:
        httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Server,), {"body": body}))
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        started.append(httpd)
        return f"http://127.0.0.1:{httpd.server_address[1]}"

    yield start
    for httpd in started:
        httpd.shutdown()
        httpd.server_close()


@pytest.fixture
def silent(server, request, monkeypatch):
    """A client of an engine that never answers."""
    monkeypatch.setattr(module, "LATE_S", 0.1)
    stop = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        stop.wait(60)
        return []

    loop = asyncio.new_event_loop()
    if request.param == "http":
        yield HTTPClient(server(None))
    elif request.param == "llm":
        yield LLMClient(SimpleNamespace(collective_rpc=hang))
    elif request.param == "async":

        async def sleep(*_: object, **__: object) -> list[object]:
            await asyncio.sleep(60)
            return []

        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        yield AsyncLLMClient(SimpleNamespace(collective_rpc=sleep), loop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
    else:
        yield FunctionClient(hang)
    loop.close()
    stop.set()


@pytest.mark.parametrize("silent", ["http", "llm", "async", "function"], indirect=True)
@pytest.mark.parametrize("call", CALLS)
def test_a_silent_engine_is_an_error_at_the_deadline(silent, call):
    with pytest.raises(DeadlineError, match=r"answer.*within 0\.[34] s"):
        CALLS[call](silent, 0.3)


def test_the_status_inside_an_update_has_a_deadline_too(monkeypatch):
    monkeypatch.setattr(module, "LATE_S", 0.1)
    stop = threading.Event()

    def answers_once(method: str, *_: object) -> list[object]:
        if method == "refit_status":
            stop.wait(60)
        return [None]

    with pytest.raises(DeadlineError, match="refit_status"):
        FunctionClient(answers_once).update(INFO)
    stop.set()


@pytest.mark.parametrize(
    "body", [b"<html>Bad gateway</html>", b"[]", b"{}", b'{"results": null}', b'{"results": 3}', b"", b"\xff\xfe", b"null"]
)
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_is_not_vllms_is_one_error(server, body, call):
    with pytest.raises(WireError, match="not one of vLLM's"):
        CALLS[call](HTTPClient(server(body)), 60.0)


@pytest.mark.parametrize("body", [b'{"results": []}', b'{"results": [null]}', b'{"results": ["text"]}', b'{"results": [{}]}'])
@pytest.mark.parametrize("call", ["prepare", "status", "abort", "verify"])
def test_replies_that_no_rank_gives_are_one_error(server, body, call):
    with pytest.raises(WireError):
        CALLS[call](HTTPClient(server(body)), 60.0)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(WireError, match=r"127\.0\.0\.1:9"):
        HTTPClient("http://127.0.0.1:9").status(5.0)


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 0, 1)])
def test_every_rank_of_every_replica_is_read(ranks):
    replies = [to_rpc(PrepareReply(rank=rank)) for rank in ranks]
    assert [r.rank for r in FunctionClient(lambda *_: replies).prepare({})] == list(ranks)


@pytest.mark.parametrize("ranks", [(), (1,), (0, 2), (0, 1, 0), (0, 0, 1, 2)])
def test_a_rank_that_does_not_answer_is_missed(ranks):
    with pytest.raises(WireError, match="not every rank"):
        FunctionClient(lambda *_: [to_rpc(Status(rank=rank)) for rank in ranks]).status()


def test_a_front_returns_the_replies_of_every_replica():
    class Client:
        core_engines = (b"0", b"1")

        async def _call_utility_async(self, method, *args, engine):
            return [(args[0], engine)]

        async def call_utility_async(self, method, *args):
            return await self._call_utility_async(method, *args, engine=b"0")

    frontend.wrap_client(SimpleNamespace(DPLBAsyncMPClient=Client))
    frontend.wrap_client(SimpleNamespace(DPLBAsyncMPClient=Client))
    ask = lambda method, *args: asyncio.run(Client().call_utility_async(method, *args))  # noqa: E731
    for name in ("refit_status", "prepare_refit_info"):
        assert ask("collective_rpc", name, None, (), None) == [(name, b"0"), (name, b"1")]
    assert ask("collective_rpc", "update_weights", None, (), None) == [("update_weights", b"0")]
    assert ask("pause", "x") == [("x", b"0")]
    with pytest.raises(ConfigError, match="_call_utility_async"):
        frontend.wrap_client(SimpleNamespace(DPLBAsyncMPClient=type("Other", (), {})))


STORED = [{"a": "01", "b": "02"}, {"c": "03"}]


@pytest.mark.parametrize(
    ("digests", "said"),
    [
        ({0: STORED[0], 1: STORED[1]}, "no digests were given for it"),
        ({"0": STORED[0]}, "no digests were given for it"),
        ({}, "no digests were given for it"),
        ({"0": STORED[0], "1": STORED[1], "2": {}}, "rank that the engine does not have"),
        ({"0": {"a": "01"}, "1": STORED[1]}, r"1 tensor\(s\) were not compared: its digest was not given"),
        ({"0": STORED[0] | {"d": "04"}, "1": STORED[1]}, "holds no such tensor"),
        ({"0": STORED[0] | {"b": "00"}, "1": STORED[1]}, "1 tensor.s. differ, the first is 'b'"),
    ],
)
def test_less_than_everything_is_no_comparison(digests, said):
    client = FunctionClient(lambda *_: [to_rpc(VerifyReply(rank=r, digests=d)) for r, d in enumerate(STORED)])
    with pytest.raises(VerifyError, match=said):
        client.verify(digests)
    assert len(client.verify({str(r): d for r, d in enumerate(STORED)})) == 2


def test_an_update_returns_every_ranks_report():
    report = UpdateReport(rank=0, version="v", writer="in place")
    answers = {"update_weights": [None], "refit_status": [to_rpc(Status(rank=0, last=report, caches="reset"))]}
    assert FunctionClient(lambda method, *_: answers[method]).update(INFO) == [report]
    with pytest.raises(RefitError, match="another version"):
        FunctionClient(lambda method, *_: answers[method]).update(UpdateInfo(wire="shm", version="w", session="s"))
    asked: list[str] = []

    def statuses(method: str, *_: object) -> list[object]:
        asked.append(method)
        return answers["refit_status"]

    assert FunctionClient(statuses).update(INFO) == [report]
    assert asked == ["update_weights"], "replies that are statuses need no second call"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
def test_a_deadline_is_a_finite_number_of_seconds(call, seconds):
    with pytest.raises(ConfigError, match="not a deadline"):
        CALLS[call](FunctionClient(lambda *_: []), seconds)
