"""One tree of exceptions. Every message says what, where, got, wanted, and what to do; several problems are returned together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

MAX_LISTED = 20
"""Problems printed in one message. All of them stay in `RefitError.problems`."""


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong. It crosses process borders inside replies, so it is plain data.

    Fields: `what` happened (a sentence), `where` (tensor, rank, wire, setting), `got`, `wanted`, and `do`, the next step.
    """

    what: str
    where: str = ""
    got: str = ""
    wanted: str = ""
    do: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        detail = "; ".join(f"{label} {text}" for label, text in (("got", self.got), ("wanted", self.wanted)) if text)
        text = f"{head} ({detail})" if detail else head
        if not self.do:
            return text
        return f"{text}. {self.do[0].upper()}{self.do[1:]}{'' if self.do[-1] in '.?' else '.'}"


E = TypeVar("E", bound="RefitError")


class RefitError(Exception):
    """Base of every error that this project raises on purpose. `problems` holds one or more `Problem`."""

    def __init__(self, what: str, *, where: str = "", got: object = "", wanted: object = "", do: str = "") -> None:
        self.problems: list[Problem] = [Problem(what, where, str(got), str(wanted), do)]
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls: type[E], problems: Sequence[Problem], summary: str = "") -> E:
        """An error of this class that carries all of `problems` (at least one)."""
        if not problems:
            raise ValueError("an error needs at least one problem")
        error = cls.__new__(cls)
        error.problems = list(problems)
        lines = [f"- {problem}" for problem in error.problems[:MAX_LISTED]]
        if len(error.problems) > MAX_LISTED:
            lines.append(f"- and {len(error.problems) - MAX_LISTED} more")
        head = summary or f"{len(error.problems)} problem(s)"
        text = "\n".join([head, *lines]) if summary or len(error.problems) > 1 else str(error.problems[0])
        Exception.__init__(error, text)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # vLLM pickles a worker's exception on its way to the engine process; rebuild it from the problems.
        return _rebuild, (type(self), self.problems, str(self))


def _rebuild(cls: type[RefitError], problems: list[Problem], text: str) -> RefitError:
    error = cls.__new__(cls)
    error.problems = problems
    Exception.__init__(error, text)
    return error


class ConfigError(RefitError):
    """A setting, an argument or a version that can't work."""


class ManifestError(RefitError):
    """What was offered is not what the manifest or the engine knows: names, shapes, dtypes, formats."""


class PlanError(RefitError):
    """No complete plan exists, or two ranks hold different plans."""


class RouteError(RefitError):
    """A weight loader did something that can't be recorded as copies."""


class LayoutError(RefitError):
    """A shape, dtype or alignment that a layout or a kernel does not take."""


class WireError(RefitError):
    """Bytes were not transferred: a missing, stale or broken source."""


class SessionError(RefitError):
    """A call that does not fit the state of the refit session."""


class DeadlineError(RefitError):
    """A wait passed its deadline."""


class TornError(RefitError):
    """A refit failed after its first write; the engine must not generate until a full refit succeeds."""


class VerifyError(RefitError):
    """Digests or bytes of the two sides differ."""


def gave_up(where: str) -> Problem:
    """What every rank says of a peer that ended a refit for itself. where: the wire and the peer."""
    return Problem("it gave up this refit", where, do="see its error; refit once more")


def class_of(name: str, otherwise: type[RefitError] = RefitError) -> type[RefitError]:
    """The class of errors that a peer calls `name`; `otherwise` where there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, RefitError) else otherwise


def as_refit_error(error: BaseException, where: str = "", do: str = "") -> RefitError:
    """`error`, or one of ours with its class and text where it is not: peers wait for this rank and must learn of it."""
    if isinstance(error, RefitError):
        return error
    unforeseen = RefitError(f"{type(error).__name__}: {error}", where=where, do=do)
    unforeseen.__cause__ = error
    return unforeseen
