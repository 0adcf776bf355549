"""A part of the weights: checkpoint tensors by name or glob. A partial refit moves their bytes and leaves all else bit for bit.

Both sides resolve the same patterns against the same manifest, so a message carries patterns and not thousands of names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import numpy as np

from vllm_refit_ext.core.errors import ConfigError, ManifestError, Problem
from vllm_refit_ext.core.manifest import Manifest, suggest
from vllm_refit_ext.core.plan import Plan


def layers(*numbers: int) -> tuple[str, ...]:
    """Patterns of all tensors of these layers, as checkpoints number them (`model.layers.3.mlp...`)."""
    return tuple(f"*.layers.{number}.*" for number in numbers)


def patterns_of(part: object) -> tuple[str, ...]:
    """The patterns that a caller gave. Raises ConfigError for anything but a sequence of texts that are not empty."""
    if isinstance(part, str) or not isinstance(part, Sequence) or not all(isinstance(p, str) and p for p in part):
        wanted = "a sequence of names or globs of checkpoint tensors"
        raise ConfigError("the part can't be read", where="part", got=repr(part)[:120], wanted=wanted)
    return tuple(part)


def names_in(manifest: Manifest, patterns: Iterable[str]) -> set[str]:
    """The tensors that `patterns` match, with the scales of what is coded; a tied tensor by any of its names.

    Raises ManifestError with every pattern that matches nothing.
    """
    found: set[str] = set()
    problems = []
    known = [*manifest.tensors, *manifest.aliases]
    for pattern in patterns:
        matched = fnmatch.filter(known, pattern) if pattern not in known else [pattern]
        if not matched:
            what = "it matches no offered tensor"
            problems.append(Problem(what, f"part {pattern!r}", do=suggest(pattern, known) or "correct the name or the glob"))
        found |= {manifest.aliases.get(name, name) for name in matched}
    if problems:
        raise ManifestError.of(problems)
    return found | {scale for name in found if (scale := manifest.tensors[name].scale)}


def mixed(manifest: Manifest, parts: dict[str, str], patterns: Sequence[str], old: str, new: str) -> dict[str, str]:
    """What an engine's `Status.parts` is after a refit. parts: before it. patterns: that were sent, none for all. old, new: the
    versions. Empty where all is of one version again."""
    if not patterns:
        return {}
    names = names_in(manifest, patterns)
    kept = {p: v for p, v in (parts or {"*": old}).items() if p == "*" or not names_in(manifest, [p]) <= names}
    found = {p: v for p, v in kept.items() if p not in patterns} | dict.fromkeys(patterns, new)
    if names_in(manifest, [p for p in found if p != "*"]) >= set(manifest.tensors):
        found.pop("*", None)  # nothing of it is left
    return {} if names >= set(manifest.tensors) else found


def part_of(plan: Plan, names: Iterable[str]) -> Plan:
    """The moves of `plan` that are of these tensors."""
    chosen = set(names)
    return plan.select(np.array([name in chosen for name in plan.names], bool)[plan.tensor] if len(plan) else np.zeros(0, bool))
