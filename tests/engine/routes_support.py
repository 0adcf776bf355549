"""Tiny models of many architectures, their checkpoint tensors, and a replay of recorded routes with plain torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from vllm_refit_ext.receiver.routes.table import Routes

Entries = dict[str, tuple[tuple[int, ...], str]]

DENSE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _deepseek(cls: type[Any], **more: Any) -> Any:
    # The engine's latent attention knows the published sizes of its cache only.
    mla = {"q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    moe = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    made = cls(**{**DENSE, "num_key_value_heads": 4, "num_hidden_layers": 3, **mla, **moe, **groups, **more})
    made.topk_method = "noaux_tc" if cls is transformers.DeepseekV3Config else "greedy"
    return made


def _qwen25_vl() -> Any:
    text = {**DENSE, "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6], "rope_type": "default"}}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
        "patch_size": 14,
    }
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


def _qwen3_vl_moe() -> Any:
    text = {
        **DENSE,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 128,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
    }
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**DENSE)),
    "qwen2": ("Qwen2ForCausalLM", lambda: transformers.Qwen2Config(**DENSE)),
    "qwen2-tied": ("Qwen2ForCausalLM", lambda: transformers.Qwen2Config(**{**DENSE, "tie_word_embeddings": True})),
    "qwen3": ("Qwen3ForCausalLM", lambda: transformers.Qwen3Config(**DENSE, head_dim=32)),
    "llama-one-kv-head": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**{**DENSE, "num_key_value_heads": 1})),
    "llama-odd-vocab": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**{**DENSE, "vocab_size": 317})),
    "gemma2-tied": (
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(**{**DENSE, "tie_word_embeddings": True}, head_dim=32),
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(
            **DENSE, head_dim=32, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1
        ),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2),
    ),
    "olmoe": ("OlmoeForCausalLM", lambda: transformers.OlmoeConfig(**DENSE, num_experts=4, num_experts_per_tok=2)),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        lambda: _deepseek(transformers.DeepseekV2Config, q_lora_rank=None),
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", lambda: _deepseek(transformers.DeepseekV3Config)),
    "phi3": ("Phi3ForCausalLM", lambda: transformers.Phi3Config(**DENSE)),
    "glm4": ("Glm4ForCausalLM", lambda: transformers.Glm4Config(**DENSE, head_dim=32)),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", _qwen25_vl),
    "qwen3-vl-moe": ("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(**DENSE, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    ),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        lambda: transformers.GraniteMoeHybridConfig(
            **DENSE,
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=128,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=16,
        ),
    ),
    "llama4": (
        "Llama4ForCausalLM",
        lambda: transformers.Llama4TextConfig(
            **DENSE,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=1,
            intermediate_size_mlp=256,
            interleave_moe_layer_step=1,
        ),
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        lambda: transformers.Qwen3NextConfig(
            **{**DENSE, "num_hidden_layers": 4},
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    ),
    "falcon": (
        "FalconForCausalLM",
        lambda: transformers.FalconConfig(
            vocab_size=320,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            new_decoder_architecture=True,
            num_kv_heads=2,
            multi_query=False,
        ),
    ),
    "phi": ("PhiForCausalLM", lambda: transformers.PhiConfig(**{**DENSE, "num_key_value_heads": 4})),
    "jamba": (
        "JambaForCausalLM",
        lambda: transformers.JambaConfig(
            **DENSE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=4, mamba_dt_rank=8
        ),
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        lambda: transformers.NemotronHConfig(
            **{**DENSE, "num_hidden_layers": 3}, hybrid_override_pattern="M*-", mamba_num_heads=8, mamba_head_dim=32, n_groups=2
        ),
    ),
}
"""name -> (vLLM architecture, maker of a tiny config)."""

MOE = {
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-vl-moe",
    "gpt-oss",
    "jamba",
    "granite-hybrid",
    "llama4",
    "qwen3-next",
}


def config(name: str) -> Any:
    """A tiny transformers config of one architecture, with vLLM's name for it."""
    architecture, make = CONFIGS[name]
    made = make()
    made.architectures = [architecture]
    return made


def checkpoint_entries(hf_config: Any) -> Entries:
    """Names, shapes and dtypes of the checkpoint that transformers would save for a config."""
    from transformers.core_model_loading import revert_weight_conversion

    kind = getattr(transformers, hf_config.architectures[0])
    with torch.device("meta"):
        model = kind(hf_config)
    state = {n: t for n, t in model.state_dict().items() if not (hf_config.tie_word_embeddings and n == "lm_head.weight")}
    saved = revert_weight_conversion(model, state)
    if "Qwen3VLMoe" in hf_config.architectures[0]:
        # Published checkpoints hold stacked experts transposed, which this transformers does not write any more.
        saved = {n: t.transpose(1, 2) if ".experts." in n else t for n, t in saved.items()}
    return {
        name: (tuple(t.shape), "float32" if name.endswith(("e_score_correction_bias", "A_log", ".D")) else "bfloat16")
        for name, t in saved.items()
    }


def random_tensors(entries: Entries, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of random values."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, (shape, dtype) in entries.items():
        made[name] = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    return made


def replay(routes: Routes, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Perform the moves of `routes` with strided copies. `parameters`: full name -> row-major tensor as created."""
    table = routes.placements
    for row in table.rows():
        buffer = table.buffers[row.buffer]
        source = tensors[row.tensor]
        target = parameters[buffer.name]
        assert target.is_contiguous()
        depth = source.dim()
        lo, hi, steps = row.lo[:depth], row.hi[:depth], row.strides[:depth]
        size = target.element_size()
        box = source[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
        reached = row.offset + sum((b - a - 1) * s for a, b, s in zip(lo, hi, steps, strict=True)) + size
        assert row.offset % size == 0
        assert reached <= math.prod(buffer.shape) * size
        view = target.as_strided(box.shape, [s // size for s in steps], row.offset // size)
        if buffer.dtype != str(source.dtype).removeprefix("torch.") and row.tensor in routes.reinterpreted:
            view, box = view.view(torch.uint8), box.view(torch.uint8)
        view.copy_(box)


@functools.cache
def entries_of(name: str) -> Entries:
    """`checkpoint_entries` of a tiny config, made once: vLLM patches some transformers classes when it builds a model."""
    return checkpoint_entries(config(name))
