"""The front end's side: the reason of a torn engine reaches whoever asked for tokens, and every replica's replies whoever refits.

The engine process ends a request with finish reason "error" and the reason as text (`core_hook`). vLLM's front ends would turn
that into an empty answer (the offline `LLM`) or a bare "Internal server error" (the server). The plugin wraps
`OutputProcessor.process_outputs`, which every front end runs: `LLM.generate` and `AsyncLLM.generate` raise, and the OpenAI routes
answer 503 (400 in vLLM 0.24, which has no class for it) with the reason.

A front end with data parallel replicas calls all of them, and returns what the first one answered. For the calls of a refit the
plugin has it return the replies of all, replica by replica.
"""

from __future__ import annotations

import asyncio
import functools
from http import HTTPStatus
from typing import Any

from vllm_refit_ext.core.errors import Problem, TornError
from vllm_refit_ext.engine import needed
from vllm_refit_ext.engine.core_hook import MARK
from vllm_refit_ext.engine.guard import DO

WHAT = "this engine's weights mix two versions, so it refuses to generate"


@functools.cache
def refusal_class() -> type[TornError]:
    """A `TornError` that vLLM's front ends let through as it is, instead of wrapping it without its text."""
    import vllm.exceptions

    polite = getattr(vllm.exceptions, "GracefulHTTPError", None)
    base: type[Exception] = polite if polite is not None else ValueError

    class EngineTornError(TornError, base):  # type: ignore[valid-type,misc]
        """A request was refused because the engine is torn."""

        http_status = HTTPStatus.SERVICE_UNAVAILABLE

        @property
        def message(self) -> str:
            return str(self)

        def __reduce__(self) -> tuple[object, ...]:
            # this class is made per process; elsewhere (a Ray driver, say) it arrives as its base
            return TornError.of, (self.problems,)

    return EngineTornError


def refusal(reason: str) -> TornError:
    """The error that a refused request gets."""
    # `of` sets the text by itself; the constructor would go through that of vLLM's class
    error = refusal_class().of([Problem(WHAT, "engine", reason, do=DO)])
    assert isinstance(error, TornError)
    return error


def wrap(module: Any) -> None:
    """Wrap `OutputProcessor` of vLLM's `v1.engine.output_processor`. Idempotent. Raises `ConfigError` if it is not the class
    that we know.
    """
    processor_class = module.OutputProcessor
    if hasattr(processor_class, "_refit_wrapped"):
        return
    needed.require(needed.OUTPUT_PROCESSOR, module)
    native = processor_class.process_outputs

    @functools.wraps(native)
    def process_outputs(self: Any, engine_core_outputs: Any, *rest: Any, **named: Any) -> Any:
        refused = {
            output.request_id: output.stop_reason[len(MARK) :]
            for output in engine_core_outputs
            if isinstance(output.stop_reason, str) and output.stop_reason.startswith(MARK)
        }
        if not refused:
            return native(self, engine_core_outputs, *rest, **named)
        processed = native(self, [output for output in engine_core_outputs if output.request_id not in refused], *rest, **named)
        offline = ""
        for name, reason in refused.items():
            state = self.request_states.get(name)
            if state is None:
                continue
            self.abort_requests([name], internal=True)
            if state.queue is not None:
                state.queue.put(refusal(reason))
            else:
                offline = reason
        if offline:
            # the caller of the offline engine gets one exception for all its requests, and none may stay behind
            self.abort_requests(list(self.request_states), internal=True)
            raise refusal(offline)
        return processed

    processor_class.process_outputs = process_outputs
    processor_class._refit_wrapped = True


def wrap_client(module: Any) -> None:
    """Wrap `DPLBAsyncMPClient` of vLLM's `v1.engine.core_client`. Idempotent. Raises `ConfigError` if it is not the class that we
    know.
    """
    client_class = module.DPLBAsyncMPClient
    if hasattr(client_class, "_refit_wrapped"):
        return
    needed.require(needed.CORE_CLIENT, module)
    native = client_class.call_utility_async

    @functools.wraps(native)
    async def call_utility_async(self: Any, method: str, *args: Any) -> Any:
        called = args[0] if method == "collective_rpc" and args else ""
        if not (isinstance(called, str) and (called.startswith("refit_") or called == "prepare_refit_info")):
            return await native(self, method, *args)
        calls = [self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines]
        return [reply for replies in await asyncio.gather(*calls) for reply in replies]

    client_class.call_utility_async = call_utility_async
    client_class._refit_wrapped = True
