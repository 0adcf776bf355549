"""What can't work on the engines' side: sizes that vLLM can't cut, formats and kernels that do not go together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from megatron_sender.config import Engine, Recipe
from megatron_sender.preflight_ignore import is_ignored, modules
from megatron_sender.preflight_model import FAMILIES, Matrix, ModelShape
from megatron_sender.preflight_trainer import divides, tensor_cuts
from vllm_refit_ext.core.errors import Problem

BLOCK = 32
"""Elements along K that share one MXFP8 scale."""
VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it."""


def check_engine(recipe: Recipe, index: int, model: ModelShape) -> list[Problem]:
    """Every violation of `engines[index]`, for `model`."""
    engine, at = recipe.engines[index], f"engines[{index}]"
    problems = _check_cuts(engine, at, model)
    if engine.eplb:
        what = "expert load balancing moves experts after the plan is made"
        problems.append(Problem(what, where=f"{at}.eplb", got="true", wanted="false"))
    if engine.draft == "mtp" and not model.mtp_layers:
        problems.append(Problem("the model has no MTP layers to draft with", where=f"{at}.draft", got="mtp", wanted="none"))
    if recipe.hardware.device == "cpu" and engine.sleep_level:
        what = "vLLM has no sleep mode on a CPU"
        problems.append(Problem(what, where=f"{at}.sleep_level", got=str(engine.sleep_level), wanted="0"))
    problems += _check_backend(recipe, engine, at, model)
    if engine.quantization is not None:
        problems += _check_quantization(recipe, engine, at, model)
    return problems


def _check_cuts(engine: Engine, at: str, model: ModelShape) -> list[Problem]:
    tp, where = engine.tp, f"{at}.tp"
    # vLLM repeats a single Mamba group on every rank, and pads the vocabulary.
    problems = tensor_cuts(model, tp, where, model.mamba_groups if model.mamba_groups > 1 else 0)
    problems += divides(tp, -(-model.vocab // VOCAB_PADDING) * VOCAB_PADDING, where, "the padded vocabulary")

    def refuse(setting: str, what: str, got: object, wanted: str) -> None:
        problems.append(Problem(what, where=f"{at}.{setting}", got=str(got), wanted=wanted))

    if engine.pp > model.layers:
        refuse("pp", "more pipeline stages than layers", engine.pp, f"at most {model.layers}")
    if engine.ep not in (1, tp * engine.dp):
        refuse("ep", "vLLM shares experts over all of tp * dp or not at all", engine.ep, f"1 or {tp * engine.dp}")
    if not model.experts:
        if engine.ep > 1:
            refuse("ep", "the model has no experts to share out", engine.ep, "1")
        return problems
    if engine.ep > model.experts:
        refuse("ep", "more expert ranks than experts", engine.ep, f"at most {model.experts}")
    cut = expert_cut(engine)
    if model.expert_ffn % cut:
        name = "tp" if engine.dp == 1 else "dp"
        got = f"tp {tp} * dp {engine.dp} for {model.expert_ffn}"
        refuse(name, "the experts' feed-forward size can't be cut evenly", got, f"a divisor of {model.expert_ffn}, or ep > 1")
    if tp > model.experts:
        refuse("tp", "vLLM wants at least as many experts as tensor parallel ranks", tp, f"at most {model.experts}")
    return problems


def expert_cut(engine: Engine) -> int:
    """Parts that vLLM cuts each expert into: without expert parallelism, all of tp * dp share each expert."""
    return 1 if engine.ep > 1 else engine.tp * engine.dp


def quantized(engine: Engine, model: ModelShape) -> list[Matrix]:
    """The matrices that `engine` holds quantised: those of all linear modules that no ignore pattern names.

    Of a family whose module names are not known here, patterns say nothing, so all count: a lower bound of the bytes.
    """
    if engine.quantization is None:
        return []
    patterns = engine.quantization.ignore if model.model_type in FAMILIES else []
    held = []
    for module, matrices in modules(model).items():
        layer = matrices[0].layer
        drafting = layer is not None and layer >= model.layers
        left_out = is_ignored(module, [m.name for m in matrices], patterns)
        if not left_out and (engine.draft == "mtp" or not drafting):
            held += matrices
    return held


def split_blocks(model: ModelShape, matrices: Iterable[Matrix], cut: Callable[[Matrix], int]) -> list[tuple[Matrix, int]]:
    """Those of `matrices` whose K, in `cut(matrix)` equal parts, splits an MXFP8 block, with the part's length; one of each size.

    Nothing for a family whose module names are not known here: which modules are quantised is then left to the plan.
    """
    found: dict[tuple[int, int], tuple[Matrix, int]] = {}
    for matrix in matrices if model.model_type in FAMILIES else ():
        parts = cut(matrix)
        if matrix.columns % parts == 0 and matrix.columns // parts % BLOCK:
            found.setdefault((matrix.columns, parts), (matrix, matrix.columns // parts))
    return list(found.values())


def _check_quantization(recipe: Recipe, engine: Engine, at: str, model: ModelShape) -> list[Problem]:
    assert engine.quantization is not None
    where, patterns = f"{at}.quantization", engine.quantization.ignore
    problems = _check_patterns(patterns, where, model)
    held = quantized(engine, model)
    if not held:
        what = "the ignore patterns leave nothing to quantise"
        wanted = "quantization null, or fewer patterns"
        problems.append(Problem(what, where=f"{where}.ignore", got=", ".join(patterns), wanted=wanted))

    def cut(m: Matrix) -> int:
        return engine.tp if m.cut == "row" else expert_cut(engine) if m.cut == "expert_row" else 1

    for matrix, part in split_blocks(model, held, cut):
        setting = "tp" if cut(matrix) > 1 else "quantization.ignore"
        what = f"an MXFP8 block of {BLOCK} would be split: K of {matrix.name} is {matrix.columns}"
        got = f"{part} elements a rank ({matrix.columns} / {cut(matrix)})"
        do = "Cut it into fewer parts, or name it in quantization.ignore."
        problems.append(Problem(what, where=f"{at}.{setting}", got=got, wanted=f"a multiple of {BLOCK}", do=do))
    return problems


def _check_patterns(patterns: list[str], where: str, model: ModelShape) -> list[Problem]:
    problems = []
    held = modules(model)
    for i, pattern in enumerate(patterns):
        if pattern and (model.model_type not in FAMILIES or _has_effect(pattern, held)):
            continue
        what, do = "the pattern matches no module of the engine", ""
        joined = next(
            (m for ms in held.values() for m in ms if pattern and m.module != m.name and _matches(pattern, m.name)), None
        )
        if joined is not None:
            do = f"The engine joins {joined.name} into {joined.module}: name that."
        elif near := difflib.get_close_matches(pattern, held, n=1, cutoff=0.5):
            do = f"A module is called {near[0]}."
        problems.append(
            Problem(what, where=f"{where}.ignore[{i}]", got=repr(pattern), wanted="a name that the engine has", do=do)
        )
    for module, matrices in held.items():
        names = [m.name for m in matrices]
        if is_ignored(module, names, patterns) is None:
            what = f"the engine joins these into {module}, so all or none of them are quantised"
            got = ", ".join(name for name in names if name in patterns)
            problems.append(Problem(what, where=f"{where}.ignore", got=got, wanted="all of " + ", ".join(names)))
    return problems


def _has_effect(pattern: str, held: dict[str, list[Matrix]]) -> bool:
    # Naming one part of a joined module has an effect too, if a wrong one: vLLM refuses it.
    return any(is_ignored(module, [m.name for m in matrices], [pattern]) is not False for module, matrices in held.items())


def _matches(pattern: str, name: str) -> bool:
    return is_ignored(name, [name], [pattern]) is True


def _check_backend(recipe: Recipe, engine: Engine, at: str, model: ModelShape) -> list[Problem]:
    problems = []
    backend, where = engine.moe_backend, f"{at}.moe_backend"
    mxfp8 = engine.quantization is not None
    written = recipe.hardware.compute_capability
    capability = tuple(map(int, written.split("."))) if written and recipe.hardware.device == "cuda" else None
    if backend != "auto" and not model.experts:
        problems.append(Problem("the model has no experts", where=where, got=backend, wanted="auto"))
    if backend != "auto" and recipe.hardware.device == "cpu":
        problems.append(Problem("a CPU engine has none of these kernels", where=where, got=backend, wanted="auto"))
    if mxfp8 and backend in ("triton", "flashinfer_cutlass"):
        wanted = "auto, flashinfer_trtllm, deep_gemm or marlin"
        problems.append(Problem("these kernels don't take MXFP8 weights", where=where, got=backend, wanted=wanted))
    if mxfp8 and backend == "deep_gemm" and not model.gated:
        wanted = "flashinfer_trtllm or marlin"
        problems.append(Problem("these kernels want gated experts", where=where, got=backend, wanted=wanted))
    if capability is not None and mxfp8:
        if backend in ("flashinfer_trtllm", "deep_gemm") and capability[0] != 10:
            got = f"{backend} on compute capability {written}"
            problems.append(Problem("these kernels need compute capability 10.x", where=where, got=got, wanted="auto or marlin"))
        if capability < (7, 5):
            what = "no MXFP8 kernel runs on these GPUs"
            problems.append(Problem(what, where="hardware.compute_capability", got=str(written), wanted="7.5 or later"))
    marlin = backend == "marlin" or (backend == "auto" and (capability is None or capability[0] != 10))
    if mxfp8 and engine.dtype == "float16" and marlin and recipe.hardware.device == "cuda":
        what = "with FP16 as default type vLLM's Marlin path destroys scale bytes (1 becomes 0, 254 becomes 255)"
        problems.append(Problem(what, where=f"{at}.dtype", got="float16", wanted="bfloat16"))
    return problems
