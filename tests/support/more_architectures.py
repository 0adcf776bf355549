"""Tiny configs of further architectures, known to vLLM and transformers, beside those whose routes are compared rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.engine.routes_support import DENSE

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
TIED = {**DENSE, "tie_word_embeddings": True}
GPT = {"vocab_size": 320, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2}
MIMO = {
    "head_dim": 32,
    "v_head_dim": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 32,
    "attention_value_scale": None,
    # as published, for vLLM
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_rope_theta": 10000.0,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "sliding_window_size": 32,
    "add_swa_attention_sink_bias": True,
    "layernorm_epsilon": 1e-5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
MINIMAX = {"rotary_dim": 32, "scoring_func": "softmax", "use_routing_bias": True}  # the router that a CPU runs

MORE: dict[str, tuple[str, Callable[[], Any]]] = {
    "mistral": ("MistralForCausalLM", lambda: transformers.MistralConfig(**DENSE, head_dim=32)),
    "gemma": ("GemmaForCausalLM", lambda: transformers.GemmaConfig(**TIED, head_dim=32)),
    "gemma3": ("Gemma3ForCausalLM", lambda: transformers.Gemma3TextConfig(**TIED, head_dim=32)),
    "starcoder2": ("Starcoder2ForCausalLM", lambda: transformers.Starcoder2Config(**DENSE)),
    "stablelm": ("StableLmForCausalLM", lambda: transformers.StableLmConfig(**DENSE)),
    "gpt-neox": ("GPTNeoXForCausalLM", lambda: transformers.GPTNeoXConfig(**DENSE)),
    "gpt2": ("GPT2LMHeadModel", lambda: transformers.GPT2Config(**GPT)),
    "opt": (
        "OPTForCausalLM",
        lambda: transformers.OPTConfig(
            vocab_size=320,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=256,
            max_position_embeddings=512,
            word_embed_proj_dim=128,
        ),
    ),
    "bloom": ("BloomForCausalLM", lambda: transformers.BloomConfig(vocab_size=320, hidden_size=128, n_layer=2, n_head=4)),
    "cohere": ("CohereForCausalLM", lambda: transformers.CohereConfig(**TIED)),
    "cohere2": ("Cohere2ForCausalLM", lambda: transformers.Cohere2Config(**TIED)),
    "granite": ("GraniteForCausalLM", lambda: transformers.GraniteConfig(**DENSE)),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        lambda: transformers.GraniteMoeConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2),
    ),
    "olmo": ("OlmoForCausalLM", lambda: transformers.OlmoConfig(**DENSE)),
    "olmo2": ("Olmo2ForCausalLM", lambda: transformers.Olmo2Config(**DENSE)),
    "olmo3": ("Olmo3ForCausalLM", lambda: transformers.Olmo3Config(**DENSE)),
    "qwen2-moe": ("Qwen2MoeForCausalLM", lambda: transformers.Qwen2MoeConfig(**DENSE, **MOE, shared_expert_intermediate_size=64)),
    "exaone4": ("Exaone4ForCausalLM", lambda: transformers.Exaone4Config(**DENSE)),
    "glm4-moe": ("Glm4MoeForCausalLM", lambda: transformers.Glm4MoeConfig(**DENSE, head_dim=32, **GROUPED)),
    "glm": ("GlmForCausalLM", lambda: transformers.GlmConfig(**DENSE, head_dim=32)),
    "ernie4.5": ("Ernie4_5ForCausalLM", lambda: transformers.Ernie4_5Config(**DENSE, head_dim=32)),
    "ernie4.5-moe": (
        "Ernie4_5_MoeForCausalLM",
        lambda: transformers.Ernie4_5_MoeConfig(
            **DENSE, moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_layer_start_index=1, moe_num_shared_experts=1
        ),
    ),
    "smollm3": ("SmolLM3ForCausalLM", lambda: transformers.SmolLM3Config(**DENSE)),
    "nemotron": ("NemotronForCausalLM", lambda: transformers.NemotronConfig(**DENSE)),
    "seed-oss": ("SeedOssForCausalLM", lambda: transformers.SeedOssConfig(**DENSE, head_dim=32)),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", lambda: transformers.HunYuanDenseV1Config(**DENSE, head_dim=32)),
    "hunyuan-moe": (
        "HunYuanMoEV1ForCausalLM",
        lambda: transformers.HunYuanMoEV1Config(**DENSE, head_dim=32, num_experts=4, moe_topk=2),
    ),
    "arcee": ("ArceeForCausalLM", lambda: transformers.ArceeConfig(**DENSE)),
    "apertus": ("ApertusForCausalLM", lambda: transformers.ApertusConfig(**DENSE)),
    "flex-olmo": ("FlexOlmoForCausalLM", lambda: transformers.FlexOlmoConfig(**DENSE, num_experts=4, num_experts_per_tok=2)),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        lambda: transformers.MiniMaxM2Config(**DENSE, **MINIMAX, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
    ),
    "mimo-v2": ("MiMoV2FlashForCausalLM", lambda: transformers.MiMoV2FlashConfig(**DENSE, **MIMO)),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        lambda: transformers.FalconH1Config(**DENSE, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16, mamba_d_ssm=256),
    ),
    "gptj": ("GPTJForCausalLM", lambda: transformers.GPTJConfig(**GPT, rotary_dim=32)),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", lambda: transformers.GPTBigCodeConfig(**GPT)),
    "qwen3.5": ("Qwen3_5ForCausalLM", lambda: transformers.Qwen3_5TextConfig(**{**DENSE, "num_hidden_layers": 4}, head_dim=32)),
    "mamba2": (
        "Mamba2ForCausalLM",
        lambda: transformers.Mamba2Config(
            vocab_size=320, hidden_size=128, num_hidden_layers=2, num_heads=8, head_dim=32, state_size=16, n_groups=1
        ),
    ),
}
"""name -> (vLLM architecture, maker of a tiny config)."""
