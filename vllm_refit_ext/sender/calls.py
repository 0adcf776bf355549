"""Update calls of several engines at once, while the trainer's ranks send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from vllm_refit_ext.client import EngineClient
from vllm_refit_ext.core.errors import DeadlineError, Problem, RefitError
from vllm_refit_ext.core.messages import UpdateInfo, UpdateReport


class Calls:
    """One thread an engine. All engines take part in one transfer, so none of their calls returns before all have begun."""

    def __init__(
        self, engines: Sequence[EngineClient], messages: Sequence[UpdateInfo], refused: Callable[[RefitError], None]
    ) -> None:
        """Start the calls. refused: called at once, in the thread of the call, with the error of a call that fails."""
        self._refused = refused
        self._outcomes: list[list[UpdateReport] | RefitError | None] = [None] * len(engines)
        self._threads = [
            threading.Thread(target=self._run, args=(i, engine, message), name=f"refit-engine-{i}", daemon=True)
            for i, (engine, message) in enumerate(zip(engines, messages, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, engine: EngineClient, message: UpdateInfo) -> None:
        try:
            self._outcomes[index] = engine.update(message)
        except RefitError as error:
            self._outcomes[index] = error
            self._refused(error)
        except Exception as error:  # noqa: BLE001 - the thread that waits must learn of it
            wrapped = RefitError(f"the engine failed: {type(error).__name__}: {error}", where="update_weights")
            self._outcomes[index] = wrapped
            self._refused(wrapped)

    def reports(self, transfer: RefitError | None, timeout_s: float) -> list[list[UpdateReport]]:
        """Every engine's reports. transfer: what this rank's own sending failed with.

        Raises one error with the problems of `transfer` and of all calls, in the class of the first; a call that has not returned
        after `timeout_s` seconds counts as DeadlineError.
        """
        end = time.monotonic() + timeout_s
        errors = [transfer] if transfer is not None else []
        reports = []
        for index, thread in enumerate(self._threads):
            thread.join(max(0.0, end - time.monotonic()))
            outcome = self._outcomes[index]
            if isinstance(outcome, RefitError):
                errors.append(outcome)
            elif outcome is None:
                errors.append(
                    DeadlineError("no answer to update_weights", where=f"engine {index}", wanted=f"within {timeout_s:g} s")
                )
            else:
                reports.append(outcome)
        if errors:
            problems: dict[Problem, None] = {p: None for error in errors for p in error.problems}
            raise type(errors[0]).of(list(problems))
        return reports
