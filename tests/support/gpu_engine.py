"""Real vLLM engines on a GPU for tests, each in a process of its own, reachable through the product's HTTP client.

    python -m tests.support.gpu_engine FOLDER SETTINGS      serves until its standard input closes; prints its URL

`Engine` starts one and talks to it. Several may start at once: their KV caches have a fixed size.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_refit_ext.client import HTTPClient

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "worker_extension_cls": "tests.support.gpu_probe.ProbeExtension",
    "seed": 0,
}
GRAPHS: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
}
EAGER: dict[str, Any] = {"enforce_eager": True}


class Engine:
    """One engine process. `log` holds what it printed."""

    def __init__(self, folder: str | Path, log: Path, **settings: Any) -> None:
        """Start it and return at once; `wait` until it serves."""
        self.log = log
        command = [sys.executable, "-m", "tests.support.gpu_engine", str(folder), json.dumps(SETTINGS | settings)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])}
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=sink, stderr=subprocess.STDOUT
            )
        self._client: HTTPClient | None = None

    def wait(self, seconds: float = 240.0) -> HTTPClient:
        """Its client, once it serves."""
        end = time.monotonic() + seconds
        while self._client is None:
            lines = [x for x in self.log.read_text(errors="replace").splitlines() if x.startswith("SERVING ")]
            if lines:
                self._client = HTTPClient(lines[0].split()[1])
            elif self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the engine did not start:\n" + self.log.read_text(errors="replace")[-3000:])
            else:
                time.sleep(0.2)
        return self._client

    def ask(self, method: str, *args: Any) -> Any:
        """The first rank's answer to a method of the worker, or of the engine itself with `engine:` before its name."""
        return self.wait().call(method, args, 300)[0]

    def answers(self) -> Any:
        """Greedy answers with log-probabilities."""
        return self.wait().post("/answers", {}, 300)

    def tensors(self) -> dict[str, list[Any]]:
        """Name -> [sha256 of its bytes, address] of every tensor that the model holds."""
        found: dict[str, list[Any]] = self.ask("probe_tensors")
        return found

    def close(self) -> None:
        """End it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def sha(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's elements in row-major order."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:24]


class _Whole:
    """An `LLM` whose own methods answer by RPC too."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        if method.startswith("engine:"):
            answer = getattr(self._llm, method.removeprefix("engine:"))(*args, **(kwargs or {}))
            return [answer if isinstance(answer, bool | int | str | type(None)) else str(answer)]
        found: list[Any] = self._llm.collective_rpc(method, timeout=timeout, args=args, kwargs=kwargs)
        return found


def main(folder: str, settings: str) -> None:
    """Serve an engine until standard input ends."""
    from vllm import LLM

    from tests.support.engine_bridge import bridge

    begin = time.monotonic()
    llm = LLM(model=folder, **json.loads(settings))
    with bridge(_Whole(llm)) as url:
        print(f"\nSERVING {url} after {time.monotonic() - begin:.0f} s", flush=True)
        sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
