"""Which decoder layers each pipeline rank holds, asked of Megatron's own configuration. Nothing is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_sender.config import Parallelism
from vllm_refit_ext.core.errors import ConfigError, Problem

MOST_REPEATS = 4
"""Digits of a repeat count in a layout. Megatron unrolls a layout before it looks at it."""


def stage_layers(p: Parallelism, layers: int, mtp_layers: int) -> list[list[int]]:
    """Decoder layer numbers by pipeline rank for a model of `layers` layers and `mtp_layers` prediction layers.

    Needs megatron-core. Raises ConfigError where Megatron refuses the split, or where it accepts one that leaves layers out.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    held: list[list[int]] = [[] for _ in range(p.pp)]
    try:
        config = _config(p, layers, mtp_layers)
        chunks = config.virtual_pipeline_model_parallel_size
        if chunks is not None and chunks > 1 and p.pp == 1:
            raise ValueError("virtual pipeline needs pp of at least 2")
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
        for stage in range(p.pp):
            for chunk in [None] if chunks is None else range(chunks):
                if config.pipeline_model_parallel_layout is not None:
                    layout = config.pipeline_model_parallel_layout
                    held[stage] += layout.get_layer_id_list(vp_stage=chunk or 0, pp_rank=stage)
                    continue
                first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
                held[stage] += range(first, first + get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))
    except (AssertionError, KeyError, ValueError, ZeroDivisionError) as error:
        got = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError("Megatron refuses these pipeline stages", got=got[:300]) from error
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    if sorted(layer for stage in held for layer in stage) != list(range(layers)):
        wanted = f"each of {layers} layers once"
        raise ConfigError("the pipeline stages don't divide the layers", got=f"layers {held}"[:300], wanted=wanted)
    return held


def _config(p: Parallelism, layers: int, mtp_layers: int) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout = p.pipeline_layout
    if isinstance(layout, str) and re.search(rf"\*\d{{{MOST_REPEATS + 1}}}", layout):
        raise ValueError(f"a repeat count of more than {MOST_REPEATS} digits")
    predicts = "m" in layout if isinstance(layout, str) else any("mtp" in stage for stage in layout or ())
    return TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        pipeline_dtype=torch.bfloat16,
        num_layers_in_first_pipeline_stage=p.first_stage_layers,
        num_layers_in_last_pipeline_stage=p.last_stage_layers,
        account_for_embedding_in_pipeline_split=p.embedding_counts_as_layer,
        account_for_loss_in_pipeline_split=p.loss_counts_as_layer,
        pipeline_model_parallel_layout=layout,
        mtp_num_layers=mtp_layers if predicts else None,
    )


def stage_violations(p: Parallelism, layers: int, mtp_layers: int) -> list[Problem]:
    """What Megatron refuses of the pipeline, under the settings that say how layers are split."""
    try:
        stage_layers(p, layers, mtp_layers)
    except ConfigError as error:
        (problem,) = error.problems
        return [msgspec.structs.replace(problem, where=f"trainer.parallelism.{n}") for n in _causes(p, layers, mtp_layers)]
    return []


def _causes(p: Parallelism, layers: int, mtp_layers: int) -> Sequence[str]:
    if p.pipeline_layout is not None:
        return ["pipeline_layout"]
    names = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(p, name) is not None][:1]
    if p.vpp is not None:
        try:
            stage_layers(msgspec.structs.replace(p, vpp=None), layers, mtp_layers)
            names.append("vpp")
        except ConfigError:
            pass
    return names or ["pp"]
