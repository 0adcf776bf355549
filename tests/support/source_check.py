"""Ranks that build a Megatron model, make its source map, and hold it against the bridge's own export, bit for bit."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from examples.support.tiny_model import build_megatron, quiet
from megatron_sender.source import SourceMap, source_map
from vllm_refit_ext.core.placement import Placements


def run_cases(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Run each case in these ranks. Returns, for each, what is wrong (empty when all is right)."""
    return [_guarded(run_case, case) for case in cases]


def _guarded(function: Callable[..., list[str]], case: dict[str, Any]) -> list[str]:
    try:
        return function(**case)
    except Exception:  # noqa: BLE001 - the caller's test shows it under its own name
        return [traceback.format_exc()]


def run_case(folder: str, step: str = "scale", **settings: Any) -> list[str]:
    """Build, map, compare with export and checkpoint; then change the weights in place and compare the same tables again."""
    bridge, chunks = build_megatron(folder, **settings)
    mapped = source_map(chunks, bridge)
    wrong = compare(mapped, bridge, chunks, folder)
    before = [_bytes_of(tensor) for tensor in mapped.tensors]
    change_weights(chunks, step)
    mapped.settle()
    mapped.check_live()
    changed = sum(old != _bytes_of(tensor) for old, tensor in zip(before, mapped.tensors, strict=True))
    # Experts that saw no token, and buffers, may stay as they were.
    if changed < len(before) // 2:
        wrong.append(f"the step changed {changed} of {len(before)} tensors")
    return wrong + [f"after a step: {line}" for line in compare(mapped, bridge, chunks, None)]


def compare(mapped: SourceMap, bridge: Any, chunks: list[Any], folder: str | None) -> list[str]:
    """What differs between the tensors assembled from all ranks' placements, the bridge's export, and the checkpoint."""
    wrong: list[str] = []
    assembled = assemble(mapped, wrong)
    with quiet():
        exported = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(chunks, cpu=True, show_progress=False)}
    aliases = mapped.aliases
    wrong += [f"{name} is exported but not offered" for name in exported if aliases.get(name, name) not in assembled]
    for name, tensor in assembled.items():
        if name not in exported:
            wrong.append(f"{name} is offered but not exported")
            continue
        # The bridge exports the padded vocabulary; the checkpoint has the true rows.
        full = exported[name][: tensor.shape[0]]
        if tensor.dtype != full.dtype or not _same_bits(tensor, full):
            wrong.append(
                f"{name} differs from the export ({tuple(tensor.shape)} {tensor.dtype}, {tuple(full.shape)} {full.dtype})"
            )
    if folder is not None:
        wrong += [f"checkpoint: {line}" for line in compare_with_checkpoint(assembled, aliases, folder)]
    return wrong


def compare_with_checkpoint(assembled: dict[str, torch.Tensor], aliases: dict[str, str], folder: str) -> list[str]:
    from safetensors.torch import load_file

    wrong = []
    stored = load_file(f"{folder}/model.safetensors")
    wrong += [f"{name} is not in it" for name in assembled if name not in stored]
    for name, tensor in stored.items():
        got = assembled.get(aliases.get(name, name))
        if got is None:
            wrong.append(f"{name} is missing")
        elif not _same_bits(got, tensor):
            wrong.append(f"{name} differs (held as {got.dtype}, stored as {tensor.dtype})")
    return wrong


def assemble(mapped: SourceMap, wrong: list[str]) -> dict[str, torch.Tensor]:
    """Full tensors from every rank's rows and raw bytes. Reports holes, and replicas that are not equal."""
    mine = (mapped.manifest, mapped.aliases, mapped.placements, [_bytes_of(tensor) for tensor in mapped.tensors])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    full: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for rank, (manifest, aliases, placements, memory) in enumerate(everyone):
        if aliases != mapped.aliases:
            wrong.append(f"rank {rank} has other aliases")
        for name, (shape, dtype) in manifest.items():
            tensor = full.setdefault(name, torch.zeros(shape, dtype=getattr(torch, dtype)))
            seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            if (tuple(tensor.shape), tensor.dtype) != (shape, getattr(torch, dtype)):
                wrong.append(f"rank {rank} gives {name} another shape or dtype")
        wrong += _lay(placements, memory, full, seen, rank)
    wrong += [f"{name} has holes" for name, covered in seen.items() if not bool(covered.all())]
    return full


def _lay(
    placements: Placements, memory: list[bytes], full: dict[str, torch.Tensor], seen: dict[str, torch.Tensor], rank: int
) -> list[str]:
    wrong = []
    if any(buffer.rank != rank for buffer in placements.buffers):
        wrong.append(f"rank {rank} names another rank's buffers")
    for row in placements.rows():
        tensor, depth = full[row.tensor], full[row.tensor].ndim
        lo, hi, strides = row.lo[:depth], row.hi[:depth], row.strides[:depth]
        size = tensor.element_size()
        flat = torch.frombuffer(bytearray(memory[row.buffer]), dtype=tensor.dtype)
        if row.offset % size or any(stride % size for stride in strides):
            wrong.append(f"rank {rank}: {row} is not on element borders")
            continue
        extent = [high - low for low, high in zip(lo, hi, strict=True)]
        part = flat.as_strided(extent, [stride // size for stride in strides], row.offset // size)
        box = tuple(slice(low, high) for low, high in zip(lo, hi, strict=True))
        if bool(seen[row.tensor][box].any()) and not bool(seen[row.tensor][box].all()):
            wrong.append(f"rank {rank}: {row} overlaps a part of another box")
        elif bool(seen[row.tensor][box].any()) and not _same_bits(tensor[box], part):
            wrong.append(f"rank {rank}: replicas of {row.tensor} {lo}..{hi} differ")
        tensor[box] = part
        seen[row.tensor][box] = True
    return wrong


def change_weights(chunks: list[Any], step: str) -> None:
    """Change every weight in place: `scale` in one multiplication, `train` by Megatron's schedule and optimizer."""
    if step == "scale":
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(1.5)
        return
    with quiet():
        train_step(chunks)


def train_step(chunks: list[Any]) -> float | None:
    """One forward, backward and optimizer step on random tokens. Returns the loss on the last stage."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    config.finalize_model_grads_func = finalize_model_grads
    ddp = chunks[0].ddp_config
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    length, batch = 16, 2
    tokens = torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(7))
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]

    def stream() -> Any:
        while True:
            yield tokens

    def forward(data: Any, model: Any) -> Any:
        batch_tokens = next(data)
        positions = torch.arange(length)[None].expand(batch, length)
        output = model(batch_tokens[:, :-1], positions, mask, labels=batch_tokens[:, 1:])
        return output, lambda loss: (loss.float().mean(), {"loss": loss.float().mean().detach()})

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[stream() for _ in chunks] if len(chunks) > 1 else stream(),
        model=chunks,
        num_microbatches=2,
        seq_length=length,
        micro_batch_size=batch,
        forward_only=False,
    )
    optimizer.step()
    return float(losses[0]["loss"]) if losses else None


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _bytes_of(a.contiguous()) == _bytes_of(b.contiguous())
