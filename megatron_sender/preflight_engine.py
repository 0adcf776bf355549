"""What can't work on the engines' side: sizes that vLLM can't cut, formats and kernels that do not go together."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron_sender.config import Engine, Recipe
from megatron_sender.preflight_model import FAMILIES, Matrix, ModelShape, ignored
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
    problems: list[Problem] = []
    tp = engine.tp

    def refuse(setting: str, what: str, got: object, wanted: str) -> None:
        problems.append(Problem(what, where=f"{at}.{setting}", got=str(got), wanted=wanted))

    if model.heads % tp:
        refuse("tp", "attention heads can't be cut evenly", f"{tp} for {model.heads}", f"a divisor of {model.heads}")
    if not model.mla and model.kv_heads % tp and tp % model.kv_heads:
        refuse("tp", "KV heads can't be cut or repeated evenly", tp, f"a divisor or a multiple of {model.kv_heads}")
    padded = -(-model.vocab // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp:
        refuse("tp", "the padded vocabulary can't be cut evenly", f"{tp} for {padded}", f"a divisor of {padded}")
    rows = {m.columns for m in model.matrices if m.cut == "row" and not m.name.endswith(".o_proj")}
    for size in sorted(size for size in rows if size % tp):
        refuse("tp", "a feed-forward or inner size can't be cut evenly", f"{tp} for {size}", f"a divisor of {size}")
    if model.mamba_heads and model.mamba_heads % tp:
        refuse("tp", "Mamba heads can't be cut evenly", f"{tp} for {model.mamba_heads}", f"a divisor of {model.mamba_heads}")
    if model.mamba_groups > 1 and model.mamba_groups % tp:
        refuse("tp", "Mamba groups can't be cut evenly", f"{tp} for {model.mamba_groups}", f"a divisor of {model.mamba_groups}")
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
    """The matrices that `engine` holds quantised: all linear ones that no ignore pattern names. Embeddings never are."""
    if engine.quantization is None:
        return []
    patterns = engine.quantization.ignore
    linear = [m for m in model.matrices if m.cut != "vocab" or m.name == "lm_head"]
    if engine.draft == "none":
        linear = [m for m in linear if m.layer is None or m.layer < model.layers]
    return [m for m in linear if not ignored(m.name, patterns)]


def split_blocks(matrices: list[Matrix], cut: Callable[[Matrix], int]) -> list[tuple[Matrix, int]]:
    """The matrices whose K, in `cut(matrix)` equal parts, splits an MXFP8 block, with the part's length; one of each size."""
    found: dict[tuple[int, int], tuple[Matrix, int]] = {}
    for matrix in matrices:
        parts = cut(matrix)
        if matrix.columns % parts == 0 and matrix.columns // parts % BLOCK:
            found.setdefault((matrix.columns, parts), (matrix, matrix.columns // parts))
    return list(found.values())


def _check_quantization(recipe: Recipe, engine: Engine, at: str, model: ModelShape) -> list[Problem]:
    assert engine.quantization is not None
    where, patterns = f"{at}.quantization", engine.quantization.ignore
    problems = []
    names = [m.name for m in model.matrices]
    for i, pattern in enumerate(patterns):
        if not pattern or (model.model_type in FAMILIES and not any(ignored(name, [pattern]) for name in names)):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
            do = f"A module is called {near[0]}." if near else "Modules are called like " + names[len(names) // 2] + "."
            what = "the pattern matches no module of this model"
            problems.append(Problem(what, where=f"{where}.ignore[{i}]", got=repr(pattern), do=do))
    held = quantized(engine, model)
    kept = {m.name for m in held}
    for fused in sorted({m.fused for m in held if m.fused}):
        parts = [m.name for m in model.matrices if m.fused == fused]
        left_out = [name for name in parts if name not in kept]
        if left_out and not ignored(fused, patterns):
            what = f"the engine joins these into {fused}, so all or none of them are quantised"
            got = f"{left_out[0]} ignored, {next(name for name in parts if name in kept)} not"
            problems.append(Problem(what, where=f"{where}.ignore", got=got, wanted="the same for " + ", ".join(parts)))
            break
    if not held:
        what = "the ignore patterns leave nothing to quantise"
        wanted = "quantization null, or fewer patterns"
        problems.append(Problem(what, where=f"{where}.ignore", got=", ".join(patterns), wanted=wanted))

    def cut(m: Matrix) -> int:
        return engine.tp if m.cut == "row" else expert_cut(engine) if m.cut == "expert_row" else 1

    for matrix, part in split_blocks(held, cut):
        setting = "tp" if cut(matrix) > 1 else "quantization.ignore"
        what = f"an MXFP8 block of {BLOCK} would be split: K of {matrix.name} is {matrix.columns}"
        got = f"{part} elements a rank ({matrix.columns} / {cut(matrix)})"
        do = "Cut it into fewer parts, or name it in quantization.ignore."
        problems.append(Problem(what, where=f"{at}.{setting}", got=got, wanted=f"a multiple of {BLOCK}", do=do))
    return problems


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
