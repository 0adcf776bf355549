"""Tiny Hugging Face checkpoints made on the spot, and the Megatron models that load them.

The checkpoints have random weights from a seed and their own byte-level tokenizer, so nothing is downloaded. They are small
enough for milliseconds a step, and their sizes differ from each other, so that a swapped pair of axes can't go unseen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.support import megatron_cpu
from megatron_sender import local_spec
from vllm_refit_ext.core.stand_ins import quiet

BYTES, PAD, BOS, EOS = 256, 256, 257, 258
"""The tokenizer: one token for each of 256 bytes, then padding, begin and end."""

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # Far above the usual 0.02: a random model of this size otherwise gives almost equal logits, and greedy tokens that
    # don't change when the weights do would prove nothing.
    "initializer_range": 0.08,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3": ("Qwen3", {}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_few_kv": ("Qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
"""Kind of model -> (transformers class without its ending, settings beside `COMMON`)."""


def save_model(kind: str, folder: str | Path, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write a checkpoint with random weights and its tokenizer to `folder`, and return the folder.

    `kind` is a key of `KINDS`; `dtype` the type weights are stored in; `overrides` are fields of the model's configuration
    (with `num_nextn_predict_layers`, DeepSeek's checkpoint gets that many prediction layers).
    DeepSeek's `e_score_correction_bias` is stored as float32 whatever `dtype` says, as published checkpoints do.
    Raises ValueError for an unknown kind.
    """
    import transformers

    if kind not in KINDS:
        raise ValueError(f"no tiny model {kind!r}; known are {', '.join(KINDS)}")
    family, settings = KINDS[kind]
    fields = {**COMMON, **settings, **overrides}
    # transformers builds no multi-token prediction layers. Checkpoints store them as decoder layers behind the last one.
    predictors = fields.get("num_nextn_predict_layers", 0)
    layers = fields["num_hidden_layers"]
    config = getattr(transformers, f"{family}Config")(**{**fields, "num_hidden_layers": layers + predictors})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.config.num_hidden_layers = layers
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(folder, state_dict=_stored_weights(model, predictors, seed, getattr(torch, dtype)))
    save_tokenizer(folder)
    return Path(folder)


def _stored_weights(model: Any, predictors: int, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weights = dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed + 1)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    for layer in range(layers, layers + predictors):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{prefix}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.08
    for name, tensor in weights.items():
        # Fresh models have norms of one and biases of zero; equal values would hide a mix-up of two of them.
        noise = torch.randn(tensor.shape, generator=generator) * 0.05 if tensor.ndim == 1 else 0
        weights[name] = (tensor + noise).to(torch.float32 if name.endswith("e_score_correction_bias") else dtype)
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def save_tokenizer(folder: str | Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special.values()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def import_megatron() -> None:
    """Import everything that `build_megatron` needs (6 to 20 s), with this machine's allowances in place."""
    with quiet():
        megatron_cpu.install()
        import megatron.bridge
        import megatron.core.distributed
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401

        local_spec.use_local_prediction_layers()


def build_megatron(
    folder: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    vpp: int | None = None,
    dtype: str = "float32",
    load: bool = True,
    ddp: bool | dict[str, Any] = False,
    layout: Sequence[Sequence[str]] | str | None = None,
    first_last_layers: tuple[int | None, int | None] = (None, None),
    seed: int = 1234,
    **provider_settings: Any,
) -> tuple[Any, list[Any]]:
    """Megatron model chunks of this rank for the checkpoint in `folder`, and the bridge that made them.

    torch.distributed must be initialised; model parallelism is initialised here (anew when it was before). `vpp` is the number
    of chunks a pipeline stage holds, `layout` Megatron's custom pipeline layout, `first_last_layers` the layers of the first
    and last stage when they differ from the rest. With `load` the weights come from `folder`, without it they are random.
    `ddp` wraps the chunks in Megatron's DDP, with these settings if it is a dict.
    Other settings go to the bridge's provider as they are.
    Returns (AutoBridge, list of chunks).
    """
    import_megatron()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    with quiet():
        bridge = AutoBridge.from_hf_pretrained(str(folder), torch_dtype=getattr(torch, dtype))
        provider = bridge.to_megatron_provider(load_weights=load)
        settings = {
            **local_spec.plain_settings(provider),
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "context_parallel_size": cp,
            "sequence_parallel": tp > 1,
            "params_dtype": getattr(torch, dtype),
            "pipeline_dtype": getattr(torch, dtype),
            "num_layers_in_first_pipeline_stage": first_last_layers[0],
            "num_layers_in_last_pipeline_stage": first_last_layers[1],
            "pipeline_model_parallel_layout": layout,
            **provider_settings,
        }
        for name, value in settings.items():
            setattr(provider, name, value)
        provider.finalize()
        torch.manual_seed(seed)
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            provider.initialize_model_parallel(seed=seed)
            chunks = provider.provide_distributed_model(
                wrap_with_ddp=bool(ddp),
                ddp_config=DistributedDataParallelConfig(**(ddp if isinstance(ddp, dict) else {})) if ddp else None,
                use_cpu_initialization=not torch.cuda.is_available(),
                bf16=dtype == "bfloat16",
                fp16=dtype == "float16",
            )
    return bridge, chunks
