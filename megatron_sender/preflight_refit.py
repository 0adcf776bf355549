"""What can't work between trainer and engines: placement against wire, policies against each other, MXFP8 blocks, memory."""

from __future__ import annotations

import msgspec

from megatron_sender.config import Recipe
from megatron_sender.preflight_engine import BLOCK, expert_cut, quantized, split_blocks
from megatron_sender.preflight_model import Matrix, ModelShape
from vllm_refit_ext.core.errors import Problem

BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
MXFP8_BYTES = 1 + 1 / 32
"""Bytes of an MXFP8 element with its part of the scale."""


STAGING_BUFFERS = 2
"""Of each wire that stages: one is filled while the other is read."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one rank needs at a refit, at least: matrices spread evenly over the ranks, small tensors left out."""

    where: str
    weights: int
    staging: int

    @property
    def total(self) -> int:
        """Weights and staging together, in bytes."""
        return self.weights + self.staging


def check_refit(recipe: Recipe, model: ModelShape) -> list[Problem]:
    """Every violation of the `refit` part of `recipe`, and of its memory."""
    return [
        *_check_wire(recipe),
        *_check_policies(recipe),
        *_check_prequantize(recipe),
        *_check_source_blocks(recipe, model),
        *_check_memory(recipe, model),
    ]


def engine_ranks(recipe: Recipe) -> int:
    """Ranks of all engines together."""
    return sum(e.count * e.tp * e.pp * e.dp for e in recipe.engines)


def _check_wire(recipe: Recipe) -> list[Problem]:
    refit, device = recipe.refit, recipe.hardware.device
    problems = []
    if refit.mode == "direct" and refit.wire != "ipc":
        what = "only the wire ipc lets the engine read the trainer's own memory"
        problems.append(Problem(what, where="refit.mode", got=f"direct with wire {refit.wire}", wanted="staged or null"))
    if refit.wire == "ipc" and device == "cpu" and refit.effective_mode() == "direct":
        wanted = "mode staged, shm or collective"
        problems.append(Problem("there is no CUDA IPC on a CPU", where="refit.wire", got="ipc, direct", wanted=wanted))
    if refit.placement != "colocated":
        return problems
    if refit.wire == "collective" and device == "cuda":
        what = "two NCCL ranks can't share a GPU"
        problems.append(Problem(what, where="refit.wire", got="collective, colocated", wanted="ipc or shm"))
    ranks, world = engine_ranks(recipe), recipe.trainer.world_size
    if device == "cuda" and ranks > world:
        what = "colocated engines have no more GPUs than the trainer"
        problems.append(Problem(what, where="engines", got=f"{ranks} GPUs", wanted=f"at most {world} (trainer.world_size)"))
    return problems


def _check_policies(recipe: Recipe) -> list[Problem]:
    refit, problems = recipe.refit, []
    if refit.placement == "colocated" and refit.max_steps_off:
        what = "colocated engines stop while the trainer steps, so no token is older than the weights"
        problems.append(Problem(what, where="refit.max_steps_off", got=str(refit.max_steps_off), wanted="0, or disaggregated"))
    if refit.running_requests == "keep" and refit.caches == "reset":
        what = "caches that running requests use can't be reset under them"
        wanted = "reset_running, which preempts them first, or keep"
        problems.append(Problem(what, where="refit.caches", got="reset, with running_requests keep", wanted=wanted))
    for i, engine in enumerate(recipe.engines):
        if engine.sleep_level and refit.running_requests == "keep":
            what = f"requests can't run on while engines[{i}] sleeps"
            got = f"keep, with sleep_level {engine.sleep_level}"
            problems.append(Problem(what, where="refit.running_requests", got=got, wanted="wait or abort, or sleep_level 0"))
        if engine.sleep_level and refit.caches == "keep":
            what = f"engines[{i}] drops its KV cache when it sleeps"
            got = f"keep, with sleep_level {engine.sleep_level}"
            problems.append(Problem(what, where="refit.caches", got=got, wanted="reset, or sleep_level 0"))
    return problems


def _check_prequantize(recipe: Recipe) -> list[Problem]:
    if not recipe.refit.prequantize:
        return []
    where, problems = "refit.prequantize", []
    for i, engine in enumerate(recipe.engines):
        if engine.quantization is None:
            what = "the sender quantises to MXFP8, and all engines get the same bytes"
            got = f"true, with no quantization in engines[{i}]"
            problems.append(Problem(what, where=where, got=got, wanted="false, or mxfp8 in every engine"))
    lists = [sorted(set(e.quantization.ignore)) for e in recipe.engines if e.quantization]
    if any(patterns != lists[0] for patterns in lists):
        odd = next(i for i, patterns in enumerate(lists) if patterns != lists[0])
        what = "engines that share prequantised bytes must quantise the same modules"
        at = f"engines[{odd}].quantization.ignore"
        problems.append(Problem(what, where=at, got=", ".join(lists[odd]) or "none", wanted=", ".join(lists[0]) or "none"))
    return problems


def _check_source_blocks(recipe: Recipe, model: ModelShape) -> list[Problem]:
    """Blocks that the trainer's own cuts would split: a block is quantised by one reader of one shard."""
    p = recipe.trainer.parallelism
    held: dict[str, Matrix] = {}
    for engine in recipe.engines:
        held.update((m.name, m) for m in quantized(engine, model))

    def cut(m: Matrix) -> int:
        return p.tp if m.cut == "row" else p.etp if m.cut == "expert_row" else 1

    problems = []
    for matrix, part in split_blocks(model, [m for m in held.values() if cut(m) > 1], cut):
        setting = "tp" if matrix.cut == "row" else "etp"
        what = f"an MXFP8 block of {BLOCK} would lie on two trainer ranks: K of {matrix.name} is {matrix.columns}"
        got = f"{part} elements a rank ({matrix.columns} / {cut(matrix)})"
        do = "Cut it into fewer parts, or name it in the engines' quantization.ignore."
        where = f"trainer.parallelism.{setting}"
        problems.append(Problem(what, where=where, got=got, wanted=f"a multiple of {BLOCK}", do=do))
    return problems


def refit_memory(recipe: Recipe, model: ModelShape) -> list[Memory]:
    """What a trainer rank and a rank of each engine need at a refit, at least. First the trainer, then the engines in order."""
    refit, p = recipe.refit, recipe.trainer.parallelism
    ring = STAGING_BUFFERS * refit.bucket_bytes if refit.effective_mode() == "staged" else 0
    dense = sum(m.elements for m in model.matrices if not m.cut.startswith("expert"))
    expert = sum(m.elements for m in model.matrices if m.cut.startswith("expert"))
    # Replicated matrices count as cut, which keeps this a lower bound.
    held = BYTES[recipe.trainer.dtype] * (dense / p.tp + expert / (p.ep * p.etp)) / p.pp
    result = [Memory(where="trainer rank", weights=int(held), staging=ring)]
    for i, engine in enumerate(recipe.engines):
        small = {m.name for m in quantized(engine, model)}
        held = 0.0
        for m in model.matrices:
            if engine.draft == "none" and m.layer is not None and m.layer >= model.layers:
                continue
            parts = (engine.ep if engine.ep > 1 else expert_cut(engine)) if m.cut.startswith("expert") else engine.tp
            held += m.elements / parts / engine.pp * (MXFP8_BYTES if m.name in small else BYTES[engine.dtype])
        # The receiver of a collective stages too; with ipc and shm it reads the sender's buffers.
        staging = ring if refit.wire == "collective" else 0
        result.append(Memory(where=f"engines[{i}] rank", weights=int(held), staging=staging))
    return result


def _check_memory(recipe: Recipe, model: ModelShape) -> list[Problem]:
    limit = recipe.hardware.gpu_memory_bytes
    if limit is None or recipe.hardware.device == "cpu":
        return []
    trainer, *engines = refit_memory(recipe, model)
    problems = []
    if trainer.total > limit:
        wanted = f"at most {limit} (hardware.gpu_memory_bytes)"
        what, got = "the trainer's weights don't fit", f"{trainer.total} bytes a rank"
        problems.append(Problem(what, where="trainer.parallelism", got=got, wanted=wanted))
    for i, (memory, engine) in enumerate(zip(engines, recipe.engines, strict=True)):
        at = f"engines[{i}].gpu_memory_utilization"
        share = int(limit * engine.gpu_memory_utilization)
        if memory.weights > share:
            got = f"{engine.gpu_memory_utilization} of {limit} bytes is {share}, weights take {memory.weights}"
            what = "the engine's weights don't fit its share"
            problems.append(Problem(what, where=at, got=got, wanted="a larger share or more ranks"))
        elif recipe.refit.placement == "colocated" and trainer.total + memory.total > limit:
            got = f"{trainer.total} (trainer) + {memory.total} (engine) bytes"
            what = "trainer and engine weights don't fit one GPU together, and a refit needs both"
            wanted = f"at most {limit} (hardware.gpu_memory_bytes)"
            problems.append(Problem(what, where=f"engines[{i}]", got=got, wanted=wanted))
    return problems
