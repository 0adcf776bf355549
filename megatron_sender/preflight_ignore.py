"""Which modules an engine leaves unquantised: vLLM's reading of ModelOpt's ignore list."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from megatron_sender.preflight_model import Matrix, ModelShape


def expand(patterns: Sequence[str]) -> list[str]:
    """The patterns after vLLM's own rewriting: a `*` at the end means the module itself or what is below it."""
    result = []
    for pattern in patterns:
        ends_open = len(pattern) >= 2 and pattern.endswith("*") and not pattern.endswith(".*")
        result += [pattern[:-1], pattern[:-1] + ".*"] if ends_open else [pattern]
    return result


def is_ignored(module: str, shards: Sequence[str], patterns: Sequence[str]) -> bool | None:
    """Whether vLLM leaves the engine's `module` unquantised; None when it refuses, because only some of its parts are named.

    `shards` are the checkpoint's names of its parts. A full name of a part counts; otherwise a pattern must be a part of the
    module's own name, or match it as a shell pattern. So `*.q_proj` does nothing to a `qkv_proj`.
    """
    known = expand(patterns)
    if module not in known and list(shards) != [module]:
        named = [shard in known for shard in shards]
        if module.endswith(".experts"):
            if any(module in pattern for pattern in known if "experts" in pattern):
                return True
        elif any(named):
            return True if all(named) else None
    return any(pattern and (pattern in module or fnmatchcase(module, pattern)) for pattern in known)


def modules(model: ModelShape) -> dict[str, list[Matrix]]:
    """The engine's linear modules with the matrices that each holds, in order. Embeddings are not linear; `lm_head` is."""
    result: dict[str, list[Matrix]] = {}
    for matrix in model.matrices:
        if matrix.cut != "vocab" or matrix.name == "lm_head":
            result.setdefault(matrix.module, []).append(matrix)
    return result
