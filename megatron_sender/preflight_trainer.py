"""What can't work on the trainer's side: sizes that Megatron can't cut, and storage that can't be sent."""

from __future__ import annotations

from megatron_sender.config import Recipe
from megatron_sender.preflight_model import ModelShape
from megatron_sender.preflight_pipeline import stage_layers
from vllm_refit_ext.core.errors import Problem

P = "trainer.parallelism"


def divides(parts: int, size: int, where: str, what: str) -> list[Problem]:
    """A violation when `size` can't be cut into `parts` equal ones."""
    if size % parts == 0:
        return []
    got, wanted = f"{parts} for {size}", f"a divisor of {size}"
    return [Problem(f"{what} can't be cut evenly", where=where, got=got, wanted=wanted)]


def tensor_cuts(model: ModelShape, tp: int, where: str, groups: int) -> list[Problem]:
    """What `tp` can't cut evenly, which is the same for Megatron and vLLM but for the Mamba groups: `groups` of them are cut."""
    problems = divides(tp, model.heads, where, "attention heads")
    if not model.mla and model.kv_heads % tp and tp % model.kv_heads:
        wanted = f"a divisor or a multiple of {model.kv_heads}"
        problems.append(Problem("KV heads can't be cut or repeated evenly", where=where, got=str(tp), wanted=wanted))
    inner = {m.columns for m in model.matrices if m.cut == "row" and not m.name.endswith((".o_proj", ".out_proj"))}
    for size in sorted(inner):
        problems += divides(tp, size, where, "a feed-forward size")
    return problems + divides(tp, model.mamba_heads, where, "Mamba heads") + divides(tp, groups, where, "Mamba groups")


def check_trainer(recipe: Recipe, model: ModelShape) -> list[Problem]:
    """Every violation of the trainer's part of `recipe`, for `model`."""
    trainer = recipe.trainer
    p = trainer.parallelism
    problems = _check_worlds(recipe)
    problems += tensor_cuts(model, p.tp, f"{P}.tp", model.mamba_groups)
    if model.experts:
        problems += divides(p.ep, model.experts, f"{P}.ep", "the experts")
        problems += divides(p.etp, model.expert_ffn, f"{P}.etp", "the experts' feed-forward size")
    else:
        for name, value in (("ep", p.ep), ("etp", p.etp)):
            if value > 1:
                problems.append(Problem("the model has no experts to share out", where=f"{P}.{name}", got=str(value), wanted="1"))
    problems += stage_layers(p, model.layers, model.mtp_layers)[1]
    return problems + _check_storage(recipe)


def _check_worlds(recipe: Recipe) -> list[Problem]:
    world, p = recipe.trainer.world_size, recipe.trainer.parallelism
    problems = []
    dense, expert = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
    for name, size in (("tp * cp * pp", dense), ("etp * ep * pp", expert)):
        if world % size:
            what = "the trainer's ranks are not a whole number of model copies"
            wanted = f"a multiple of {name} = {size}"
            problems.append(Problem(what, where="trainer.world_size", got=str(world), wanted=wanted))
    if p.dp is not None and p.dp * dense != world:
        wanted = f"world_size {world} / (tp * cp * pp) = {world / dense:g}, or null"
        problems.append(Problem("dp does not fit the other sizes", where=f"{P}.dp", got=str(p.dp), wanted=wanted))
    return problems


def _check_storage(recipe: Recipe) -> list[Problem]:
    trainer, problems = recipe.trainer, []
    if trainer.fp8_storage != "none":
        what = "FP8 storage keeps values and scales apart, which no move joins"
        if recipe.refit.prequantize:
            what += ", and refit.prequantize can't start from it"
        do = "Keep FP8 compute over BF16 storage (fp8_param false)."
        return [Problem(what, where="trainer.fp8_storage", got=trainer.fp8_storage, wanted="none", do=do)]
    for i, engine in enumerate(recipe.engines):
        if engine.quantization is None:
            continue
        if trainer.dtype == "float16":
            what = "MXFP8 is quantised from BF16 or FP32"
            wanted = f"bfloat16 or float32 (for engines[{i}])"
            problems.append(Problem(what, where="trainer.dtype", got=trainer.dtype, wanted=wanted))
        elif trainer.dtype != engine.dtype and not recipe.refit.prequantize:
            what = "a fresh engine rounds to its own type before it quantises, so the refitted bits would differ"
            wanted = f"{engine.dtype}, the dtype of engines[{i}]"
            problems.append(Problem(what, where="trainer.dtype", got=trainer.dtype, wanted=wanted))
    return list(dict.fromkeys(problems))
