"""What the preflight reads of a Hugging Face configuration, and what is missing or no size in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_sender.config_load import check_shape
from vllm_refit_ext.core.errors import Problem

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Count = Annotated[int, Meta(ge=0, le=65536)]
Layers = Annotated[int, Meta(ge=1, le=1000)]
Pattern = Annotated[str, Meta(pattern="^[ME*-]{1,1000}$")]
WHERE = "model.hf_config"


class Head(msgspec.Struct, frozen=True):
    """What every configuration has at its top."""

    architectures: Annotated[list[str], Meta(min_length=1)]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model. transformers fills in what a configuration leaves out, and then plans another model."""

    model_type: str
    hidden_size: Size
    num_attention_heads: Size
    vocab_size: Size
    num_hidden_layers: Layers | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size | None = None
    num_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_local_experts: Count | None = None
    moe_intermediate_size: Size | None = None
    n_shared_experts: Count | None = None
    shared_expert_intermediate_size: Count | None = None
    moe_shared_expert_intermediate_size: Size | None = None
    moe_latent_size: Size | None = None
    first_k_dense_replace: Count | None = None
    decoder_sparse_step: Size | None = None
    mlp_only_layers: list[int] | None = None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=100)] | None = None
    q_lora_rank: Size | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    v_head_dim: Size | None = None
    hybrid_override_pattern: Pattern | None = None
    mtp_hybrid_override_pattern: Pattern | None = None
    mamba_num_heads: Size | None = None
    mamba_head_dim: Size | None = None
    n_groups: Size | None = None
    ssm_state_size: Size | None = None
    tie_word_embeddings: bool = False

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.hybrid_override_pattern or "") or self.num_hidden_layers or 1

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0: the model has none."""
        if self.hybrid_override_pattern and "E" not in self.hybrid_override_pattern:
            return 0
        return self.num_experts or self.n_routed_experts or self.num_local_experts or 0

    @property
    def expert_ffn(self) -> int:
        """Feed-forward size of a routed expert."""
        return self.moe_intermediate_size or self.intermediate_size or 1

    def required(self) -> Iterator[str]:
        """Names of the sizes that a model of this kind needs beside those that every model needs."""
        pattern = self.hybrid_override_pattern
        if self.model_type == "nemotron_h":
            yield from ("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
        else:
            yield "num_hidden_layers"
        if self.kv_lora_rank:
            yield from ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if pattern is not None and "E" in pattern:
            yield from ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
        if self.experts and not self.intermediate_size:
            yield "moe_intermediate_size"
        if "-" in pattern if pattern is not None else not self.experts or self.first_k_dense_replace or self.mlp_only_layers:
            yield "intermediate_size"


def read_model(config: Mapping[str, Any]) -> tuple[ModelConfig | None, list[Problem]]:
    """The sizes in `config`, a Hugging Face configuration, or everything that is missing or no size."""
    nested = config.get("text_config")
    text, where = (nested, f"{WHERE}.text_config") if isinstance(nested, Mapping) else (config, WHERE)
    problems = check_shape(Head, {"architectures": config.get("architectures")}, WHERE)
    known = {name: text[name] for name in ModelConfig.__struct_fields__ if name in text}
    problems += check_shape(ModelConfig, known, where)
    if problems:
        return None, problems
    model = msgspec.convert(known, ModelConfig)
    missing = [name for name in dict.fromkeys(model.required()) if getattr(model, name) is None]
    what = "the configuration lacks a size"
    problems = [Problem(what, where=f"{where}.{name}", wanted="an integer, or a layer pattern") for name in missing]
    return (None, problems) if problems else (model, [])
