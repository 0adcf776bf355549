"""An engine of this test process, reachable for the trainer's ranks through the product's own HTTP client.

The engine is started once for a test module; the ranks come and go. The bridge answers `/collective_rpc` like vLLM's server does
and `/answers` with the engine's greedy answers.
"""

from __future__ import annotations

import contextlib
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.engines import PROMPTS, Answer, answers


def one_by_one(llm: Any) -> list[Answer]:
    """Greedy answers, a prompt at a time: what shares a batch changes the last bits of a CPU kernel's sums."""
    return [answers(llm, (prompt,))[0] for prompt in PROMPTS]


@contextlib.contextmanager
def bridge(llm: Any) -> Iterator[str]:
    """Serve `llm` on loopback; yields the URL."""
    lock = threading.Lock()

    def rpc(body: dict[str, Any]) -> Any:
        replies = llm.collective_rpc(
            body["method"], timeout=body.get("timeout"), args=tuple(body.get("args", ())), kwargs=body.get("kwargs")
        )
        return {"results": replies}

    paths: dict[str, Callable[[dict[str, Any]], Any]] = {
        "/collective_rpc": rpc,
        "/answers": lambda _: [asdict(a) for a in one_by_one(llm)],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            try:
                with lock:
                    status, answer = 200, paths[self.path](body)
                text = json.dumps(answer).encode()
            except Exception as error:  # noqa: BLE001 - the caller gets it as the server's refusal
                status, text = 500, f"{type(error).__name__}: {error}\n{traceback.format_exc()}".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
