"""Driving an engine from a trainer: one small protocol over LLM, AsyncLLM, an HTTP server, or any function.

A trainer needs one thing of an engine: to call a method on every worker. `EngineClient` builds the refit calls on that. Each has
a deadline for the whole of it, whatever the engine does: it hangs, or it answers a byte at a time. Replies of all ranks are read;
a problem on any rank raises here, with the rank's name.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import http.client
import json
import secrets
import sys
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from vllm_refit_ext.core.compare import check_digests
from vllm_refit_ext.core.coverage import unread_parts
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
from vllm_refit_ext.core.manifest import parse_manifest
from vllm_refit_ext.core.messages import (
    DEADLINE_S,
    CachePolicy,
    PrepareReply,
    Status,
    TakeReply,
    UpdateInfo,
    UpdateReport,
    VerifyReply,
    from_rpc,
    to_rpc,
)
from vllm_refit_ext.core.placement import concatenate
from vllm_refit_ext.core.table import unpack_placements

LATE_S = 30.0
"""A call is given this much longer than its own deadline, so that the engine's error arrives rather than a bare time-out."""
LATE_DO = "see whether the engine is dead, stopped or busy; a longer deadline_s waits longer"
PIECE = 1 << 16
"""Bytes of an HTTP answer that are read at a time."""
MOST_BYTES = 1 << 30
"""The longest HTTP answer that is read. Replies with the targets of a model of 1T parameters are a tenth of it."""

T = TypeVar("T")
M = TypeVar("M", PrepareReply, Status, TakeReply, VerifyReply)


class EngineClient(ABC):
    """One engine: all ranks of one vLLM instance. name: how errors call it, such as its URL; empty where it has none.

    Data parallel replicas behind one server are one engine whose replies come replica by replica, each with all ranks.

    The methods below `call` raise DeadlineError when the engine has not answered in time. Their call may then still run in a
    thread that nobody waits for.
    """

    name = ""

    @abstractmethod
    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        """Call `method` on every worker and return the replies in rank order. Raises what a worker raised, as text.

        timeout_s: hint for whatever carries the call. An implementation need not keep to it.
        """

    def prepare(
        self,
        state_dict_info: bytes | dict[str, Any],
        fp8_config: dict[str, Any] | None = None,
        deadline_s: float = DEADLINE_S,
        keep: Sequence[str] = (),
        unused: Collection[str] = (),
    ) -> list[PrepareReply]:
        """`prepare_refit_info` on all ranks. Problems stay in the replies. keep: what the engine keeps as it is, by name or glob
        of its parameters or of checkpoint tensors.

        Tensors of which the ranks together read a part only are a problem too, but for the names in `unused` and what is kept.
        """
        call = (state_dict_info, fp8_config, list(keep)) if keep else (state_dict_info, fp8_config)
        replies = self._ask(PrepareReply, "prepare_refit_info", call, deadline_s)
        if any(reply.problems for reply in replies):
            return replies
        kept = {name for reply in replies for name in reply.kept}
        tables = [unpack_placements(r.targets) for r in replies if r.targets is not None]
        whole = len(tables) == len(replies)
        problems = unread_parts(parse_manifest(state_dict_info), concatenate(tables), {*unused, *kept}) if whole else []
        # Pipeline stages can't say by themselves that a pattern matches nothing.
        found = {pattern for reply in replies for patterns in reply.kept.values() for pattern in patterns}
        if missed := sorted(set(keep) - found):
            where = f"keep {', '.join(map(repr, missed))}"
            problems.append(Problem("it matches no engine parameter and no offered tensor on any rank", where))
        return [msgspec.structs.replace(reply, problems=problems) for reply in replies]

    def update(self, info: UpdateInfo) -> list[UpdateReport]:
        """`update_weights` on all ranks, and their reports, within `info.deadline_s` + LATE_S.

        Raises when a rank failed or reports another version.
        """
        end = time.monotonic() + info.deadline_s + LATE_S
        raw = self._within("update_weights", (to_rpc(info),), info.deadline_s + LATE_S)
        whole = bool(raw) and all(isinstance(reply, dict) for reply in raw)
        statuses = _read(Status, raw, "update_weights") if whole else self.status(max(1.0, end - time.monotonic()))
        reports = [s.last for s in statuses]
        stale = [i for i, r in enumerate(reports) if r is None or r.version != info.version]
        if stale:
            got = [getattr(reports[i], "version", None) for i in stale]
            what = "ranks report another version after the update"
            raise RefitError(what, where=f"engine ranks {stale}", got=got, wanted=info.version)
        if info.caches != "keep" and not all(s.caches.startswith(info.caches) for s in statuses):
            answer = statuses[0].caches or "no answer: the plugin `refit` is not loaded in the engine's process"
            what = "the new weights serve, but caches of older weights were not reset"
            do = "leave the plugin on (see VLLM_PLUGINS), or reset the caches yourself and pass caches='keep'"
            raise SessionError(what, where="caches", got=answer, wanted=info.caches, do=do)
        return [r for r in reports if r is not None]

    def status(self, deadline_s: float = DEADLINE_S) -> list[Status]:
        """`refit_status` of all ranks."""
        return self._ask(Status, "refit_status", (), deadline_s)

    def take(
        self,
        version: str = "latest",
        registry: str = "",
        deadline_s: float = DEADLINE_S,
        caches: CachePolicy = "reset",
        serve: str = "",
    ) -> list[TakeReply]:
        """`refit_take` on all ranks: the engine takes a published version by itself, or says that it serves the newest.

        version: a name, or `latest`. registry: its address, as the sender's `registry` says; empty for the last one. serve: the
        wire (`ipc`, `shm`) by which other engines may copy what this one has; empty for none.
        Raises SessionError where a rank could not.
        """
        call = (version, registry, deadline_s, caches, secrets.token_hex(8), serve)
        replies = self._ask(TakeReply, "refit_take", call, deadline_s + LATE_S)
        raise_problems(replies, SessionError)
        return replies

    def follow(
        self,
        registry: str,
        interval_s: float = 1.0,
        caches: CachePolicy = "reset",
        take_s: float = DEADLINE_S,
        deadline_s: float = DEADLINE_S,
        serve: str = "",
    ) -> list[Status]:
        """`refit_follow` on all ranks: from now on the engine looks into the registry every `interval_s` seconds and takes what
        is new between two steps, each within `take_s` seconds. An empty registry ends it. serve: as in `take`.

        Raises SessionError where the engine does not follow.
        """
        replies = self._ask(Status, "refit_follow", (registry, interval_s, caches, take_s, serve), deadline_s)
        if bool(registry) != all(s.following for s in replies):
            do = "leave the plugin `refit` on in the engine's process (see VLLM_PLUGINS)"
            got = "; ".join(sorted({str(p) for s in replies for p in s.problems})) or replies[0].following
            raise SessionError(
                "the engine does not follow" if registry else "the engine follows", where="refit_follow", got=got, do=do
            )
        return replies

    def abort(self, deadline_s: float = DEADLINE_S) -> list[Status]:
        """`refit_abort` on all ranks."""
        return self._ask(Status, "refit_abort", (), deadline_s)

    def verify(self, digests: Mapping[str, Mapping[str, str]] | None = None, deadline_s: float = DEADLINE_S) -> list[VerifyReply]:
        """`refit_verify` on all ranks. digests: by rank as text, by tensor, hexadecimal; None only asks what the engine holds.

        Raises VerifyError where a tensor differs, naming the first on each rank, and where digests name other ranks or other
        tensors than the engine has: less than everything is no comparison.
        """
        replies = self._ask(VerifyReply, "refit_verify", (digests,), deadline_s)
        raise_problems(replies, VerifyError)
        if digests is not None:
            check_digests(replies, digests)
        return replies

    def _ask(self, kind: type[M], method: str, args: tuple[Any, ...], deadline_s: float) -> list[M]:
        """Call `method` and read the replies of all ranks."""
        return _read(kind, self._within(method, args, deadline_s), method)

    def _within(self, method: str, args: tuple[Any, ...], deadline_s: float) -> list[Any]:
        return bounded(lambda: self.call(method, args, deadline_s), deadline_s, method)


class LLMClient(EngineClient):
    """An offline `vllm.LLM` in this process, whatever executor it uses."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        return _translated(method, timeout_s, lambda: list(self._llm.collective_rpc(method, timeout=timeout_s, args=args)))


class AsyncLLMClient(EngineClient):
    """An `AsyncLLM` whose event loop runs in another thread."""

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        def run() -> list[Any]:
            rpc: Coroutine[Any, Any, list[Any]] = self._llm.collective_rpc(method, timeout=timeout_s, args=args)
            future = asyncio.run_coroutine_threadsafe(rpc, self._loop)
            try:
                return list(future.result(timeout_s))
            finally:
                future.cancel()

        return _translated(method, timeout_s, run)


class HTTPClient(EngineClient):
    """A `vllm serve` process with VLLM_SERVER_DEV_MODE=1, by its `/collective_rpc` route. `url` such as http://127.0.0.1:8000."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("not a URL of an HTTP server", where="HTTPClient", got=url, wanted="http://host:port")
        self.name, self._key = url.rstrip("/"), api_key

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        body = {"method": method, "args": [base64.b64encode(a).decode() if isinstance(a, bytes) else a for a in args]} | (
            {"timeout": timeout_s} if timeout_s else {}
        )
        answer = self.post("/collective_rpc", body, timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise _not_vllm(f"POST /collective_rpc, {method}", answer)
        return results

    def post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """POST a JSON body and return the JSON answer, {} for an empty one. timeout_s: for the whole of it, DEADLINE_S when None.

        Raises DeadlineError, and WireError for a server that can't be reached, refuses, or answers something else than JSON.
        """
        timeout_s = DEADLINE_S if timeout_s is None else timeout_s
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self.name + path, json.dumps(body).encode(), headers)
        where = f"POST {path}"
        text = bounded(lambda: self._text(request, where, timeout_s), timeout_s, where)
        try:
            return json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            raise _not_vllm(where, text) from None

    def _text(self, request: urllib.request.Request, where: str, timeout_s: float) -> str:
        """The answer's body. Runs in a thread that may be given up: it ends itself at the deadline."""
        end, body = time.monotonic() + timeout_s, bytearray()
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                while piece := reply.read1(PIECE):
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise WireError("the server's answer is too long", where=where, wanted=f"{MOST_BYTES} bytes at most")
                    if time.monotonic() > end:
                        raise TimeoutError
                return body.decode(errors="replace")
        except urllib.error.HTTPError as error:
            text = error.read1(PIECE).decode(errors="replace")[:2000]
            raise WireError("the server refused", where=where, got=f"{error.code} {text}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise DeadlineError("no answer", where=where, wanted=f"within {timeout_s:g} s", do=LATE_DO) from None
            got = f"{type(reason).__name__}: {reason}"
            raise WireError("the server can't be reached", where=request.full_url, got=got) from None


class FunctionClient(EngineClient):
    """Any way of calling all workers: `function(method, args, timeout_s) -> replies`, for a Ray actor for instance."""

    def __init__(self, function: Callable[[str, tuple[Any, ...], float | None], list[Any]]) -> None:
        self._function = function

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        return _translated(method, timeout_s, lambda: list(self._function(method, args, timeout_s)))


def raise_problems(
    replies: Sequence[PrepareReply] | Sequence[TakeReply] | Sequence[VerifyReply], kind: type[RefitError] = PlanError
) -> None:
    """Raise one error with the problems of all ranks; a problem that several ranks have is listed once, with their numbers."""
    ranks: dict[Problem, list[int]] = {}
    for reply in replies:
        for problem in reply.problems:
            ranks.setdefault(problem, []).append(reply.rank)
    if ranks:
        listed = []
        for p, who in ranks.items():
            label = f"engine rank {', '.join(map(str, who))}"
            listed.append(Problem(p.what, f"{label} · {p.where}" if p.where else label, p.got, p.wanted, p.do))
        raise kind.of(listed, f"the engine can't take part: {len(listed)} problem(s)")


def start(work: Callable[[], T], where: str) -> concurrent.futures.Future[T]:
    """Run `work` in a thread that ends with the process if nobody waits for it."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    torch = sys.modules.get("torch")
    # An engine in this process works on the caller's GPU; a new thread would begin on the first.
    device = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                sys.modules["torch"].cuda.set_device(device)
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised by whoever waits
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"refit {where}", daemon=True).start()
    return outcome


def bounded(work: Callable[[], T], timeout_s: float, where: str) -> T:
    """What `work` returns or raises, in a thread of its own: DeadlineError once `timeout_s` seconds have passed, and then the
    thread is left behind."""
    if not 0 < timeout_s < threading.TIMEOUT_MAX:
        raise ConfigError("not a deadline", where=where, got=timeout_s, wanted="seconds, more than 0 and finite")
    outcome = start(work, where)
    if not concurrent.futures.wait([outcome], timeout_s).done:
        raise DeadlineError("the engine did not answer", where=where, wanted=f"within {timeout_s:g} s", do=LATE_DO)
    return outcome.result()


def _read(kind: type[M], raw: Sequence[Any], method: str) -> list[M]:
    """The replies of all ranks. Raises WireError where one can't be read, and where ranks are missing."""
    try:
        replies = [from_rpc(kind, reply, method) for reply in raw]
    except ConfigError as error:
        raise WireError.of(error.problems) from None
    ranks = Counter(r.rank for r in replies)
    if sorted(ranks) != list(range(max(1, len(ranks)))) or len(set(ranks.values())) > 1:
        got = ", ".join(f"rank {rank} {count} time(s)" for rank, count in sorted(ranks.items())) or "no reply"
        wanted = "each rank from 0 on, once or once a data parallel replica"
        raise WireError("not every rank of the engine answered", where=method, got=got, wanted=wanted)
    return replies


def _translated(method: str, timeout_s: float | None, call: Callable[[], list[Any]]) -> list[Any]:
    try:
        return call()
    except RefitError:
        raise
    except (TimeoutError, concurrent.futures.TimeoutError) as error:
        wanted = f"within {timeout_s:g} s" if timeout_s else ""
        raise DeadlineError("no answer from the engine", where=method, got=error, wanted=wanted, do=LATE_DO) from error
    except Exception as error:
        raise RefitError(f"the engine failed: {error}", where=method) from error


def _not_vllm(where: str, answer: object) -> WireError:
    return WireError(
        "the server's answer is not one of vLLM's",
        where=where,
        got=repr(answer)[:200],
        wanted='{"results": [one reply a worker]}',
        do="see whether a proxy answers, and whether the server runs with VLLM_SERVER_DEV_MODE=1",
    )
