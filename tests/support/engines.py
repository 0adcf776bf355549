"""Start real vLLM engines on a CPU for tests, ask them for tokens, and compare with a fresh engine of the same checkpoint.

Every engine has a bounded KV cache and runs eagerly in float32, where answers are exact.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from examples.support.server import vllm_server

ROOT = Path(__file__).resolve().parents[2]
Engine = TypeVar("Engine")
PROMPTS = ("Hello refit", "abc", "1 2 3 4 5")
SETTINGS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their log-probabilities, and those of the prompt's tokens after the first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]


def environment(in_process: bool = False, **more: str) -> dict[str, str]:
    """What a vLLM process on a small CPU machine needs in its environment."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **more,
    }


@contextlib.contextmanager
def set_environment(values: dict[str, str]) -> Iterator[None]:
    """`values` in os.environ, and what was there before afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def open_llm(
    folder: str | Path, *, extension: str = "", ranks: int = 1, stages: int = 1, in_process: bool = False, **settings: Any
) -> Iterator[Any]:
    """An offline `LLM` of the checkpoint in `folder`, shut down on exit.

    `extension`: the worker extension's dotted name. `ranks`: tensor parallel size. `stages`: pipeline
    parallel size; above 1 the extension must be one of `plain_cpu`. `in_process`: no processes of vLLM's own
    (one rank, and one such engine at a time: vLLM's parallel groups belong to the process). `settings`: further arguments of
    `LLM`.
    """
    from vllm import LLM

    choose_layouts(extension)
    arguments = SETTINGS | {"tensor_parallel_size": ranks} | ({"worker_extension_cls": extension} if extension else {}) | settings
    arguments["pipeline_parallel_size"] = stages
    with set_environment(environment(in_process)), unmixed():
        llm = LLM(model=str(folder), **arguments)
        try:
            if stages > 1:
                llm.collective_rpc("make_intermediate_tensors")
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


@contextlib.contextmanager
def one_at_a_time(start: Callable[[str], contextlib.AbstractContextManager[Engine]]) -> Iterator[Callable[[str], Engine]]:
    """A function that gives the engine of a name, and ends it when another is asked for. For a fixture of the module, which a
    fixture of each test asks: pytest itself would start an engine anew for each test that has other parameters beside it."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Engine] = {}

        def get(name: str) -> Engine:
            if name not in running:
                stack.close()
                running.clear()
                running[name] = stack.enter_context(start(name))
            return running[name]

        yield get


def choose_layouts(extension: str) -> None:
    """Give this process plain or packed CPU layouts: an engine before it may have left the other. Workers choose by importing."""
    if extension.startswith("tests.support."):
        from tests.support import plain_cpu

        plain_cpu.keep_plain_layouts()
    elif "tests.support.plain_cpu" in sys.modules:
        sys.modules["tests.support.plain_cpu"].pack_again()


@contextlib.contextmanager
def unmixed() -> Iterator[None]:
    """Take an extension off vLLM's worker classes afterwards.

    vLLM adds the extension to the bases of the class itself, where the next engine of the same process would meet it.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    before = {worker: worker.__bases__ for worker in (CPUWorker, Worker)}
    try:
        yield
    finally:
        for worker, bases in before.items():
            if worker.__bases__ != bases:
                worker.__bases__ = bases


def answers(llm: Any, prompts: tuple[str, ...] = PROMPTS, tokens: int = 8) -> list[Answer]:
    """Greedy answers with log-probabilities, exact."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    return [_answer(output) for output in llm.generate(list(prompts), params, use_tqdm=False)]


def fresh_answers(folder: str | Path, prompts: tuple[str, ...] = PROMPTS, tokens: int = 8, **settings: Any) -> list[Answer]:
    """What a new engine of the checkpoint in `folder` answers; `settings` as for `open_llm`."""
    with open_llm(folder, **settings) as llm:
        return answers(llm, prompts, tokens)


def _answer(output: Any) -> Answer:
    first = output.outputs[0]
    tokens = tuple(first.token_ids)
    prompt = tuple(
        table[token].logprob for token, table in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    )
    return Answer(tokens, tuple(table[token].logprob for token, table in zip(tokens, first.logprobs, strict=True)), prompt)


class Server:
    """A running OpenAI-compatible server of vLLM on loopback."""

    def __init__(self, url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.log = log
        self.process = process

    def call(self, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, Any]:
        """Status and decoded answer of a request; POST with a JSON body unless `body` is None."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"content-type": "application/json"}, method="GET" if body is None else "POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, _decode(answer.read())
        except urllib.error.HTTPError as refused:
            return refused.code, _decode(refused.read())

    def rpc(self, method: str, *arguments: Any, **named: Any) -> tuple[int, Any]:
        """`collective_rpc` over HTTP."""
        return self.call("/collective_rpc", {"method": method, "args": list(arguments), "kwargs": named})

    def tokens(self, prompt: str = PROMPTS[0], count: int = 8) -> tuple[int, Any]:
        """Status, and greedy tokens or the error."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        status, answer = self.call("/v1/completions", body)
        return status, answer["choices"][0]["token_ids"] if status == 200 else answer

    @contextlib.contextmanager
    def stream(self, prompt: str = PROMPTS[0], count: int = 8) -> Iterator[Any]:
        """A streamed completion; read it line by line."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            yield answer


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


@contextlib.contextmanager
def open_server(folder: str | Path, *options: str, ranks: int = 1, start_s: float = 400.0) -> Iterator[Server]:
    """`vllm serve` of the checkpoint in `folder` with vLLM's development routes, ended on exit. `options`: more of its
    options.
    """
    bounded = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(32 << 20)]
    bounded += ["--tensor-parallel-size", str(ranks)]
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "server.log"
        with vllm_server(folder, log, [*bounded, *options], environment(), start_s) as (url, process):
            yield Server(url, log, process)
