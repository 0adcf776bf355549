"""The rules that no plan can say, by hand: rank counts and placement, kernels of a GPU, formats, running requests and caches.

What Megatron, vLLM, the source map, the routes and the plan refuse is not said here again: `vllm-refit plan --check` asks them.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_sender.config import Engine, Recipe
from megatron_sender.config_model import ModelConfig
from vllm_refit_ext.core.errors import Problem

P = "trainer.parallelism"


def hand_violations(recipe: Recipe, model: ModelConfig) -> list[Problem]:
    """Every violation of these rules."""
    problems = [*_ranks(recipe), *_storage(recipe)]
    for index, engine in enumerate(recipe.engines):
        at = f"engines[{index}]"
        problems += [*_engine(recipe, engine, at, model), *_kernels(recipe, engine, at, model)]
    problems += [*_wire(recipe), *_requests(recipe), *_prequantize(recipe)]
    if model.experts == 0 and recipe.trainer.parallelism.etp > 1:
        what, got = "the model has no experts to share out", str(recipe.trainer.parallelism.etp)
        problems.append(Problem(what, where=f"{P}.etp", got=got, wanted="1"))
    return list(dict.fromkeys(problems))


def engine_ranks(recipe: Recipe) -> int:
    """Ranks of all engines together."""
    return sum(e.count * e.tp * e.pp * e.dp for e in recipe.engines)


def _ranks(recipe: Recipe) -> Iterator[Problem]:
    world, p = recipe.trainer.world_size, recipe.trainer.parallelism
    dense, expert = p.tp * p.cp * p.pp, p.etp * p.ep * p.pp
    for name, size in (("tp * cp * pp", dense), ("etp * ep * pp", expert)):
        if world % size:
            what = "the trainer's ranks are not a whole number of model copies"
            yield Problem(what, where="trainer.world_size", got=str(world), wanted=f"a multiple of {name} = {size}")
    if p.dp is not None and p.dp * dense != world:
        wanted = f"world_size {world} / (tp * cp * pp) = {world / dense:g}, or null"
        yield Problem("dp does not fit the other sizes", where=f"{P}.dp", got=str(p.dp), wanted=wanted)


def _storage(recipe: Recipe) -> Iterator[Problem]:
    trainer = recipe.trainer
    if trainer.fp8_storage != "none":
        what = "FP8 storage keeps values and scales apart, which no move joins"
        do = "Keep FP8 compute over BF16 storage (fp8_param false)."
        yield Problem(what, where="trainer.fp8_storage", got=trainer.fp8_storage, wanted="none", do=do)
        return
    for i, engine in enumerate(recipe.engines):
        if engine.quantization is None:
            continue
        if trainer.dtype == "float16":
            wanted = f"bfloat16 or float32 (for engines[{i}])"
            yield Problem("MXFP8 is quantised from BF16 or FP32", where="trainer.dtype", got=trainer.dtype, wanted=wanted)
        elif trainer.dtype != engine.dtype and not recipe.refit.prequantize:
            what = "a fresh engine rounds to its own type before it quantises, so the refitted bits would differ"
            yield Problem(what, where="trainer.dtype", got=trainer.dtype, wanted=f"{engine.dtype}, the dtype of engines[{i}]")


def _engine(recipe: Recipe, engine: Engine, at: str, model: ModelConfig) -> Iterator[Problem]:
    # A recipe's ep stands for vLLM's flag, which has no size; of too many ranks vLLM leaves some without experts or layers.
    if engine.ep not in (1, engine.tp * engine.dp):
        what = "vLLM shares experts over all of tp * dp or not at all"
        yield Problem(what, where=f"{at}.ep", got=str(engine.ep), wanted=f"1 or {engine.tp * engine.dp}")
    if engine.ep > model.experts > 0:
        what, wanted = "more expert ranks than experts", f"at most {model.experts}"
        yield Problem(what, where=f"{at}.ep", got=str(engine.ep), wanted=wanted)
    if engine.pp > model.layers:
        what, wanted = "more pipeline stages than layers", f"at most {model.layers}"
        yield Problem(what, where=f"{at}.pp", got=str(engine.pp), wanted=wanted)
    if engine.eplb:
        what = "expert load balancing moves experts after the plan is made"
        yield Problem(what, where=f"{at}.eplb", got="true", wanted="false")
    if engine.draft == "mtp" and not model.num_nextn_predict_layers:
        yield Problem("the model has no MTP layers to draft with", where=f"{at}.draft", got="mtp", wanted="none")
    if recipe.hardware.device == "cpu" and engine.sleep_level:
        what = "vLLM has no sleep mode on a CPU"
        yield Problem(what, where=f"{at}.sleep_level", got=str(engine.sleep_level), wanted="0")


def _kernels(recipe: Recipe, engine: Engine, at: str, model: ModelConfig) -> Iterator[Problem]:
    backend, where, mxfp8 = engine.moe_backend, f"{at}.moe_backend", engine.quantization is not None
    written, cpu = recipe.hardware.compute_capability, recipe.hardware.device == "cpu"
    capability = tuple(map(int, written.split("."))) if written and not cpu else None
    if backend != "auto" and not model.experts:
        yield Problem("the model has no experts", where=where, got=backend, wanted="auto")
    if backend != "auto" and cpu:
        yield Problem("a CPU engine has none of these kernels", where=where, got=backend, wanted="auto")
    if mxfp8 and backend in ("triton", "flashinfer_cutlass"):
        wanted = "auto, flashinfer_trtllm, deep_gemm or marlin"
        yield Problem("these kernels don't take MXFP8 weights", where=where, got=backend, wanted=wanted)
    if mxfp8 and backend == "deep_gemm" and model.model_type == "nemotron_h":
        wanted = "flashinfer_trtllm or marlin"
        yield Problem("these kernels want gated experts", where=where, got=backend, wanted=wanted)
    if mxfp8 and capability is not None:
        if backend in ("flashinfer_trtllm", "deep_gemm") and capability[0] != 10:
            got = f"{backend} on compute capability {written}"
            yield Problem("these kernels need compute capability 10.x", where=where, got=got, wanted="auto or marlin")
        if capability < (7, 5):
            what, at_gpu = "no MXFP8 kernel runs on these GPUs", "hardware.compute_capability"
            yield Problem(what, where=at_gpu, got=str(written), wanted="7.5 or later")
    marlin = backend == "marlin" or (backend == "auto" and (capability is None or capability[0] != 10))
    if mxfp8 and engine.dtype == "float16" and marlin and not cpu:
        what = "with FP16 as default type vLLM's Marlin path destroys scale bytes (1 becomes 0, 254 becomes 255)"
        yield Problem(what, where=f"{at}.dtype", got="float16", wanted="bfloat16")


def _wire(recipe: Recipe) -> Iterator[Problem]:
    refit, device = recipe.refit, recipe.hardware.device
    if refit.mode == "direct" and refit.wire != "ipc":
        what = "only the wire ipc lets the engine read the trainer's own memory"
        yield Problem(what, where="refit.mode", got=f"direct with wire {refit.wire}", wanted="staged or null")
    if refit.wire == "ipc" and device == "cpu" and refit.effective_mode() == "direct":
        wanted = "mode staged, shm or collective"
        yield Problem("there is no CUDA IPC on a CPU", where="refit.wire", got="ipc, direct", wanted=wanted)
    ranks, world, per_host = engine_ranks(recipe), recipe.trainer.world_size, recipe.hardware.gpus_per_host
    if refit.placement == "colocated":
        if refit.wire == "collective" and device == "cuda":
            what = "two NCCL ranks can't share a GPU"
            yield Problem(what, where="refit.wire", got="collective, colocated", wanted="ipc, shm or nixl")
        if device == "cuda" and ranks > world:
            what, wanted = "colocated engines have no more GPUs than the trainer", f"at most {world} (trainer.world_size)"
            yield Problem(what, where="engines", got=f"{ranks} GPUs", wanted=wanted)
    elif refit.wire in ("ipc", "shm") and world + ranks > per_host:
        what, got = "this wire can't read memory of another host", f"{refit.wire} with {world + ranks} GPUs, {per_host} a host"
        yield Problem(what, where="refit.wire", got=got, wanted="collective or nixl, or trainer and engines on one host")


def _requests(recipe: Recipe) -> Iterator[Problem]:
    refit = recipe.refit
    if refit.placement == "colocated" and refit.max_steps_off:
        what = "colocated engines stop while the trainer steps, so no token is older than the weights"
        yield Problem(what, where="refit.max_steps_off", got=str(refit.max_steps_off), wanted="0, or disaggregated")
    if refit.running_requests == "keep" and refit.caches == "reset":
        what = "caches that running requests use can't be reset under them"
        wanted = "reset_running, which preempts them first, or keep"
        yield Problem(what, where="refit.caches", got="reset, with running_requests keep", wanted=wanted)
    for i, engine in enumerate(recipe.engines):
        got = f"keep, with sleep_level {engine.sleep_level}"
        if engine.sleep_level and refit.running_requests == "keep":
            what, wanted = f"requests can't run on while engines[{i}] sleeps", "wait or abort, or sleep_level 0"
            yield Problem(what, where="refit.running_requests", got=got, wanted=wanted)
        if engine.sleep_level and refit.caches == "keep":
            what, wanted = f"engines[{i}] drops its KV cache when it sleeps", "reset, or sleep_level 0"
            yield Problem(what, where="refit.caches", got=got, wanted=wanted)


def _prequantize(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.refit.prequantize:
        return
    for i, engine in enumerate(recipe.engines):
        if engine.quantization is None:
            what = "the sender quantises to MXFP8, and all engines get the same bytes"
            got, wanted = f"true, with no quantization in engines[{i}]", "false, or mxfp8 in every engine"
            yield Problem(what, where="refit.prequantize", got=got, wanted=wanted)
    lists = {i: sorted(set(e.quantization.ignore)) for i, e in enumerate(recipe.engines) if e.quantization}
    first = next(iter(lists.values()), [])
    for i, patterns in lists.items():
        if patterns != first:
            what = "engines that share prequantised bytes must quantise the same modules"
            got, wanted = ", ".join(patterns) or "none", ", ".join(first) or "none"
            yield Problem(what, where=f"engines[{i}].quantization.ignore", got=got, wanted=wanted)
            return
