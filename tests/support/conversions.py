"""Tiny models of every type for which transformers converts checkpoints, without weights."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from vllm_refit_ext.sender.conversion import Convert, Whole

SHORT = ("qwen3_moe", "deepseek_v3", "mixtral", "qwen3_vl_moe", "qwen2_5_vl", "olmoe")
"""Fused, transposed, plain and multi-modal."""

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "pad_token_id": 0,
}
LARGEST = 60_000_000
"""Elements of a model that can be compared here."""


class NotBuiltError(Exception):
    """This machine or this way of making models small can't build it."""


def model_types() -> list[str]:
    """Every model type and class of transformers' mapping."""
    from transformers import conversion_mapping

    return [name for name in conversion_mapping._build_checkpoint_conversion_mapping() if name != "legacy"]


def tiny(model_type: str) -> tuple[dict[str, Whole], Convert]:
    """The tensors of a model of `model_type`, and transformers' own conversion to its checkpoint. Raises NotBuiltError."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _build(model_type)
    named = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    tensors = {}
    for name, tensor in model.state_dict().items():
        tied = first.setdefault(id(named.get(name, tensor)), name)
        tensors[name] = Whole(tuple(tensor.shape), "float32", "" if tied == name else tied)
    return tensors, functools.partial(revert_weight_conversion, model)


def _build(model_type: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES)
    name: Any = next((table[model_type] for table in tables if model_type in table), model_type)
    kind = getattr(transformers, name if isinstance(name, str) else name[0], None)
    if kind is None:
        raise NotBuiltError("no model class")
    said = ""
    for small in (True, False):
        try:
            with warnings.catch_warnings(), torch.device("meta"):
                warnings.simplefilter("ignore")
                model = kind(_shrunk(kind.config_class()) if small else kind.config_class())
        except Exception as error:  # noqa: BLE001 - each model has its own ways of refusing a configuration
            said = said or f"{type(error).__name__}: {error}"
            continue
        if sum(t.numel() for t in model.state_dict().values()) <= LARGEST:
            return model
        said = said or "too large"
    raise NotBuiltError(said)


def _shrunk(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            _shrunk(value)
        elif type(value) is int and value > SMALL.get(name, value):
            setattr(config, name, SMALL[name])
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            setattr(config, name, value[:2])
    return config
