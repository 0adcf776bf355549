"""Seconds and memory to record one worker's routes at the full published size of large models, on meta tensors.

    python benchmarks/planning_routes.py [MODEL ...] [--tp N] [--no-ep] [--rank N]

Configs and checkpoint names are written here by hand: nothing is downloaded and no weights exist. "build" is vLLM making
the model on the meta device (a live engine does without); "record" is the part that every worker pays once.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

Entries = dict[str, tuple[tuple[int, ...], str]]


def qwen3_moe(layers: int, hidden: int, heads: int, kv_heads: int, expert: int) -> tuple[dict[str, Any], Entries]:
    """A Qwen3-MoE of the published kind: 128 experts, 8 a token, head size 128, 151,936 rows of vocabulary."""
    vocab, head, experts = 151_936, 128, 128
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": expert,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate.weight": (experts, hidden),
        }
        shapes |= _experts(f"{at}.mlp", experts, hidden, expert)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    return config, {name: (shape, "bfloat16") for name, shape in shapes.items()}


def deepseek_v3() -> tuple[dict[str, Any], Entries]:
    """DeepSeek-V3 in bfloat16: 61 layers, 3 of them dense, 256 experts and a shared one, latent attention."""
    vocab, hidden, layers, dense, heads, experts = 129_280, 7168, 61, 3, 128, 256
    q_rank, kv_rank, nope, rope, value, expert, wide = 1536, 512, 128, 64, 128, 2048, 18_432
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "moe_intermediate_size": expert,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_a_proj.weight": (q_rank, hidden),
            f"{at}.self_attn.q_a_layernorm.weight": (q_rank,),
            f"{at}.self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": (kv_rank,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * value),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        if i < dense:
            shapes |= _mlp(f"{at}.mlp", hidden, wide)
            continue
        shapes |= {f"{at}.mlp.gate.weight": (experts, hidden), f"{at}.mlp.gate.e_score_correction_bias": (experts,)}
        shapes |= _mlp(f"{at}.mlp.shared_experts", hidden, expert)
        shapes |= _experts(f"{at}.mlp", experts, hidden, expert)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    entries: Entries = {n: (s, "float32" if n.endswith("correction_bias") else "bfloat16") for n, s in shapes.items()}
    return config, entries


def _mlp(at: str, hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (wide, hidden),
        f"{at}.up_proj.weight": (wide, hidden),
        f"{at}.down_proj.weight": (hidden, wide),
    }


def _experts(at: str, experts: int, hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    return {n: s for e in range(experts) for n, s in _mlp(f"{at}.experts.{e}", hidden, wide).items()}


MODELS: dict[str, Callable[[], tuple[dict[str, Any], Entries]]] = {
    "Qwen3-30B-A3B": lambda: qwen3_moe(48, 2048, 32, 4, 768),
    "Qwen3-235B-A22B": lambda: qwen3_moe(94, 4096, 64, 4, 1536),
    "DeepSeek-V3": deepseek_v3,
}


def measure(model: str, tp: int, ep: bool, rank: int) -> dict[str, Any]:
    """Record one worker's routes of a model in `MODELS`. Seconds, names, moves, and the process's peak memory in MB."""
    from vllm_refit_ext.engine.offline import as_worker, build_on_meta, engine_config
    from vllm_refit_ext.engine.record import record_routes

    config, entries = MODELS[model]()
    began = time.perf_counter()
    with engine_config(config, tp=tp, ep=ep) as vllm_config, as_worker(vllm_config, rank):
        built = build_on_meta(vllm_config)
        ready = time.perf_counter()
        routes = record_routes(built, entries, rank=rank, vllm_config=vllm_config)
    return {
        "model": model,
        "tp": tp,
        "ep": ep,
        "names": len(entries),
        "moves": len(routes.placements),
        "build_s": ready - began,
        "record_s": routes.seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "left": len(routes.computed) + len(routes.unwritten),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--no-ep", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The first model pays for imports, which a worker has behind it.
    measure_small()
    for model in options.models or MODELS:
        m = measure(model, options.tp, not options.no_ep, options.rank)
        print(
            f"{m['model']:16} tp{m['tp']}{' ep' if m['ep'] else ''}: {m['names']:6} names, {m['moves']:6} moves, "
            f"build {m['build_s']:.2f} s, record {m['record_s']:.2f} s ({1e6 * m['record_s'] / m['names']:.0f} us a name), "
            f"peak {m['peak_mb']:.0f} MB, {m['left']} computed or unwritten",
            flush=True,
        )


def measure_small() -> None:
    """Record a one-layer model, so that what is measured after it contains no imports."""
    from vllm_refit_ext.engine.offline import engine_routes

    config, entries = qwen3_moe(1, 128, 4, 4, 64)
    engine_routes(config, entries)


if __name__ == "__main__":
    main()
