"""A `vllm serve` process on loopback, ended with its context."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SERVED_AS = "tiny"
"""The name of the model in requests."""


@contextlib.contextmanager
def vllm_server(
    folder: str | Path, log: Path, options: Iterable[str], environment: Mapping[str, str], start_s: float = 900.0
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of the checkpoint in `folder` with vLLM's development routes; yields its URL and its process.

    options: more of vLLM's command line. environment: added to this process's. The server's output goes to `log`, and it runs in
    that folder. Raises RuntimeError with the end of the log when it is not up within `start_s` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(folder).resolve())]
    command += ["--served-model-name", SERVED_AS, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += options
    values = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | environment
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=values, cwd=log.resolve().parent)
    try:
        _wait_until_up(url, process, log, start_s)
        yield url, process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    end = time.monotonic() + start_s
    while True:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not come up:\n{log.read_text(errors='replace')[-4000:]}")
        # A server that is starting refuses, resets or does not answer in time.
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
