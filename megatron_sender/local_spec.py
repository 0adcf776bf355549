"""Megatron layers without Transformer Engine: its local layer specs, and the pieces that they lack.

`plain_settings` serves dense, mixture-of-experts and latent-attention (MLA) models alike; models with Mamba layers take
`hybrid_spec`. Parameters have the same shapes as with Transformer Engine; only norms are modules of their own
(`input_layernorm.weight`) instead of parts of a fused linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The decoder block of this pipeline stage (and chunk `vp_stage`), for a bridge's provider `config`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    if getattr(config, "multi_latent_attention", False):
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _latent_attention()
    return block


def plain_settings(provider: Any) -> dict[str, Any]:
    """Settings of a bridge's `provider` that need no fused kernel. They change speed, never names or shapes of parameters."""
    fusions = (
        "gradient_accumulation_fusion",
        "apply_rope_fusion",
        "masked_softmax_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
        "moe_permute_fusion",
        "moe_shared_expert_overlap",
        "persist_layer_norm",
    )
    return {
        "transformer_layer_spec": layer_spec,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.0,
        "perform_initialization": True,
        **{name: False for name in fusions if hasattr(provider, name)},
    }


def _latent_attention() -> type:
    """Megatron's own attention takes keys and values of one width; latent attention has two."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(
            self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            super().__init__(config, *args, **kwargs)
            # Megatron builds attention twice for such a layer, and only the second time with the widths.
            if v_channels is not None:
                self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # The parent takes views of keys and values, which here are slices of one projection.
            context: torch.Tensor = super().forward(query, key.contiguous(), value.contiguous(), *args, **kwargs)
            return context

    return LatentAttention


def use_local_prediction_layers() -> None:
    """Let the bridge build multi-token prediction (MTP) layers from the local spec; it always asks for Transformer Engine's."""
    from megatron.bridge.models import gpt_provider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec

    def mtp_block_spec(config: Any, vp_stage: int | None = None) -> Any:
        if not getattr(config, "mtp_num_layers", None):
            return None
        block = layer_spec(config, vp_stage)
        if not block.layer_specs:
            # A last stage may hold no decoder layer; MTP layers are of the last decoder layer's type.
            layers = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization=config.normalization)
            block = replace(block, layer_specs=layers[-1:])
        return get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=vp_stage)

    gpt_provider.mtp_block_spec = mtp_block_spec
