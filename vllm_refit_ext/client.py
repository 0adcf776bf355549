"""Driving an engine from a trainer: one small protocol over LLM, AsyncLLM, an HTTP server, or any function.

A trainer needs two things of an engine: to call a method on every worker, and to reset caches. `EngineClient` builds the refit
calls on those two. Replies of all ranks are read; a problem on any rank raises here, with the rank's name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from vllm_refit_ext.core.errors import (
    ConfigError,
    DeadlineError,
    PlanError,
    Problem,
    RefitError,
    SessionError,
    VerifyError,
    WireError,
)
from vllm_refit_ext.core.messages import Message, PrepareReply, Status, UpdateInfo, UpdateReport, VerifyReply, from_rpc, to_rpc

LATE_S = 30.0
"""A call is given this much longer than its own deadline, so that the engine's error arrives rather than a bare time-out."""


class EngineClient(ABC):
    """One engine: all ranks of one vLLM instance."""

    @abstractmethod
    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every worker and return the replies in rank order. Raises what a worker raised, as text."""

    def prepare(self, state_dict_info: bytes | dict[str, Any], fp8_config: dict[str, Any] | None = None) -> list[PrepareReply]:
        """`prepare_refit_info` on all ranks. Problems stay in the replies."""
        return _read(PrepareReply, self.call("prepare_refit_info", (state_dict_info, fp8_config)), "prepare_refit_info")

    def update(self, info: UpdateInfo) -> list[UpdateReport]:
        """`update_weights` on all ranks, then their reports. Raises when a rank failed or reports another version."""
        self.call("update_weights", (to_rpc(info),), info.deadline_s + LATE_S)
        statuses = self.status()
        reports = [s.last for s in statuses]
        stale = [i for i, r in enumerate(reports) if r is None or r.version != info.version]
        if stale:
            got = [getattr(reports[i], "version", None) for i in stale]
            raise RefitError(
                "ranks report another version after the update", where=f"engine ranks {stale}", got=got, wanted=info.version
            )
        if info.caches != "keep" and not all(s.caches.startswith(info.caches) for s in statuses):
            answer = statuses[0].caches or "no answer: the plugin `refit` is not loaded in the engine's process"
            do = "leave the plugin on (see VLLM_PLUGINS), or reset the caches yourself and pass caches='keep'"
            raise SessionError(
                "the new weights serve, but caches of older weights were not reset",
                where="caches",
                got=answer,
                wanted=info.caches,
                do=do,
            )
        return [r for r in reports if r is not None]

    def status(self) -> list[Status]:
        """`refit_status` of all ranks."""
        return _read(Status, self.call("refit_status"), "refit_status")

    def abort(self) -> list[Status]:
        """`refit_abort` on all ranks."""
        return _read(Status, self.call("refit_abort"), "refit_abort")

    def verify(self, digests: dict[str, dict[str, str]] | None = None) -> list[VerifyReply]:
        """`refit_verify` on all ranks. Raises VerifyError naming the first tensor that differs on each rank."""
        replies = _read(VerifyReply, self.call("refit_verify", (digests,)), "refit_verify")
        raise_problems(replies, VerifyError)
        problems = [
            Problem(
                f"{len(r.differs)} tensor(s) differ, the first is {r.differs[0]!r}",
                f"engine rank {r.rank}",
                do="run a full refit",
            )
            for r in replies
            if r.differs
        ]
        if problems:
            raise VerifyError.of(problems, "the engine does not hold what the trainer offers")
        return replies


class LLMClient(EngineClient):
    """An offline `vllm.LLM` in this process, whatever executor it uses."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        return _translated(method, lambda: list(self._llm.collective_rpc(method, timeout=timeout_s, args=args)))


class AsyncLLMClient(EngineClient):
    """An `AsyncLLM` whose event loop runs in another thread. With data parallelism vLLM answers for the first engine only."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        def run() -> list[Any]:
            rpc: Coroutine[Any, Any, list[Any]] = self._llm.collective_rpc(method, timeout=timeout_s, args=args)
            return list(asyncio.run_coroutine_threadsafe(rpc, self._loop).result())

        return _translated(method, run)


class HTTPClient(EngineClient):
    """A `vllm serve` process with VLLM_SERVER_DEV_MODE=1, by its `/collective_rpc` route. `url` such as http://127.0.0.1:8000."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("not a URL of an HTTP server", where="HTTPClient", got=url, wanted="http://host:port")
        self._url, self._key = url.rstrip("/"), api_key

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        body = {"method": method, "args": [_json(a) for a in args]} | ({"timeout": timeout_s} if timeout_s else {})
        answer = self.post("/collective_rpc", body, timeout_s)
        results: list[Any] = answer["results"]
        return results

    def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """POST a JSON body and return the JSON answer, {} for an empty one. Raises WireError or DeadlineError."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        where = f"POST {path}"
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise WireError(
                "the server refused", where=where, got=f"{error.code} {error.read().decode(errors='replace')[:2000]}"
            ) from None
        except TimeoutError:
            raise DeadlineError("no answer", where=where, wanted=f"within {timeout_s} s") from None
        except urllib.error.URLError as error:
            raise WireError("the server can't be reached", where=f"{self._url}{path}", got=error.reason) from None
        return json.loads(text) if text.strip() else {}


class FunctionClient(EngineClient):
    """Any way of calling all workers: `function(method, args, timeout_s) -> replies`, for a Ray actor for instance."""

    def __init__(self, function: Callable[[str, tuple[Any, ...], float | None], list[Any]]) -> None:
        self._function = function

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        return _translated(method, lambda: list(self._function(method, args, timeout_s)))


def raise_problems(replies: list[PrepareReply] | list[VerifyReply], kind: type[RefitError] = PlanError) -> None:
    """Raise one error with the problems of all ranks; a problem that several ranks have is told once, with their numbers."""
    ranks: dict[Problem, list[int]] = {}
    for reply in replies:
        for problem in reply.problems:
            ranks.setdefault(problem, []).append(reply.rank)
    if ranks:
        told = []
        for p, who in ranks.items():
            label = f"engine rank {', '.join(map(str, who))}"
            told.append(Problem(p.what, f"{label} · {p.where}" if p.where else label, p.got, p.wanted, p.do))
        raise kind.of(told, f"the engine can't take part: {len(told)} problem(s)")


def _translated(method: str, call: Callable[[], list[Any]]) -> list[Any]:
    try:
        return call()
    except RefitError:
        raise
    except TimeoutError as error:
        raise DeadlineError("no answer from the engine", where=method, got=error) from error
    except Exception as error:
        raise RefitError(f"the engine failed: {error}", where=method) from error


def _json(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


M = TypeVar("M", bound=Message)


def _read(kind: type[M], replies: list[Any], where: str) -> list[M]:
    return [from_rpc(kind, reply, where) for reply in replies]
