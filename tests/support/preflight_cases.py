"""Recipes that work and recipes that can't, with the settings that are refused: by their shape, by hand, or by the plan."""

from __future__ import annotations

import copy
from typing import Any

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
}
DENSE = {key: value for key, value in MOE.items() if "exp" not in key and "moe" not in key}
DENSE |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MAMBA = DENSE | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*ME-M*E",
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 4,
    "ssm_state_size": 16,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 64,
}
MLA = {key: value for key, value in MOE.items() if key != "num_experts"} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
IGNORE = ["*self_attn*", "*mlp.gate", "lm_head"]
MX = {"format": "mxfp8", "ignore": IGNORE}


def recipe(
    hf: Any = MOE,
    trainer: Any = None,
    parallelism: Any = None,
    engines: Any = None,
    refit: Any = None,
    hardware: Any = None,
) -> dict[str, Any]:
    """A recipe as plain data that works, with parts replaced."""
    return {
        "name": "tiny",
        "model": {"name": "tiny", "hf_config": hf},
        "hardware": {"gpus_per_host": 8} | (hardware or {}),
        "trainer": {"world_size": 8, "parallelism": parallelism or {}} | (trainer or {}),
        "engines": copy.deepcopy(engines or [{}]),
        "refit": {"placement": "disaggregated", "wire": "collective"} | (refit or {}),
    }


def engine(**settings: Any) -> list[dict[str, Any]]:
    return [settings]


def quantized(**settings: Any) -> list[dict[str, Any]]:
    return [{"quantization": MX} | settings]


UNKNOWN = DENSE | {"model_type": "new_family", "architectures": ["NewForCausalLM"], "intermediate_size": 320}
COLOCATED = {"placement": "colocated", "wire": "ipc"}

WORKS: dict[str, dict[str, Any]] = {
    "ignore names the last layer": recipe(
        engines=[{"quantization": {"format": "mxfp8", "ignore": [*IGNORE, "model.layers.7.*"]}}]
    ),
    "experts over tp and dp, quantised": recipe(engines=quantized(tp=2, dp=2, ep=4)),
    "prediction layers ignored": recipe(
        MLA, engines=[{"quantization": {"format": "mxfp8", "ignore": [*IGNORE, "model.layers.8*"]}}]
    ),
    "plain": recipe(),
    "mla": recipe(MLA, engines=engine(tp=4, draft="mtp")),
    "hybrid": recipe(MAMBA, parallelism={"tp": 2}, engines=engine(tp=4)),
    "dense": recipe(DENSE, parallelism={"tp": 2, "pp": 2, "cp": 2}),
    "kv heads repeated on both sides": recipe(parallelism={"tp": 4}, engines=engine(tp=8)),
    "expert tensor parallel": recipe(parallelism={"tp": 2, "etp": 4, "ep": 2}),
    "experts over tp and dp": recipe(engines=engine(tp=2, dp=4, ep=8)),
    "uneven experts": recipe(
        engines=engine(tp=3, ep=3),
        hf=MOE | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 960, "intermediate_size": 510},
    ),
    "engines of different tp": recipe(engines=[{"tp": 1}, {"tp": 2, "ep": 2, "count": 3}]),
    "engine pipeline": recipe(engines=engine(pp=3)),
    "first and last stage": recipe(parallelism={"pp": 4, "first_stage_layers": 1, "last_stage_layers": 3}),
    "only a last stage": recipe(parallelism={"pp": 2, "last_stage_layers": 3}),
    "virtual": recipe(parallelism={"pp": 2, "vpp": 2}),
    "layout": recipe(parallelism={"pp": 2, "pipeline_layout": "Ett|tt|tt|ttL", "vpp": 2}),
    "counted ends": recipe(
        DENSE | {"num_hidden_layers": 6}, parallelism={"pp": 4, "embedding_counts_as_layer": True, "loss_counts_as_layer": True}
    ),
    "dp agrees": recipe(parallelism={"tp": 2, "dp": 4}),
    "mxfp8": recipe(engines=quantized()),
    "mxfp8 cut to 32": recipe(engines=quantized(tp=4), parallelism={"etp": 4}),
    "prequantised": recipe(engines=quantized(), refit={"prequantize": True}),
    "float32 throughout": recipe(trainer={"dtype": "float32"}, engines=quantized(dtype="float32")),
    "float32 trainer, quantised by the sender": recipe(
        trainer={"dtype": "float32"}, engines=quantized(), refit={"prequantize": True}
    ),
    "colocated": recipe(engines=engine(count=8), refit=COLOCATED),
    "colocated over shm": recipe(engines=engine(count=8), refit=COLOCATED | {"wire": "shm"}),
    "nixl over hosts": recipe(
        engines=engine(count=8), refit=COLOCATED | {"wire": "nixl"}, hardware={"gpus_per_host": 4}, parallelism={"ep": 8}
    ),
    "staged on a cpu": recipe(hardware={"device": "cpu"}, engines=engine(count=8), refit=COLOCATED | {"mode": "staged"}),
    "shm, every host holds all": recipe(
        engines=engine(count=8), refit=COLOCATED | {"wire": "shm"}, hardware={"gpus_per_host": 4}, parallelism={"ep": 4}
    ),
    "nixl over hosts, on some of the trainer's": recipe(
        engines=engine(count=2), refit=COLOCATED | {"wire": "nixl"}, hardware={"gpus_per_host": 2}, parallelism={"pp": 4}
    ),
    "direct, every host holds all": recipe(
        engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"ep": 4}
    ),
    "direct, each host its own half": recipe(
        MOE | {"vocab_size": 1024},
        engines=engine(tp=8, ep=8),
        refit=COLOCATED,
        hardware={"gpus_per_host": 4},
        parallelism={"tp": 8, "ep": 8},
    ),
    "ipc between GPUs of one host": recipe(trainer={"world_size": 4}, engines=engine(count=4), refit={"wire": "ipc"}),
    "cpu": recipe(hardware={"device": "cpu"}, refit={"placement": "colocated", "wire": "collective"}),
    "sleeping": recipe(engines=engine(sleep_level=2), refit=COLOCATED),
    "in flight": recipe(refit={"running_requests": "keep", "caches": "reset_running", "max_steps_off": 1}),
    "fp16 off Marlin": recipe(
        engines=quantized(dtype="float16"),
        trainer={"dtype": "bfloat16"},
        refit={"prequantize": True},
        hardware={"compute_capability": "10.0"},
    ),
    "memory": recipe(hardware={"gpu_memory_bytes": 1 << 30}, engines=engine(count=8), refit=COLOCATED),
}

BY_SHAPE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no size": (recipe({key: value for key, value in DENSE.items() if key != "hidden_size"}), ["model.hf_config.hidden_size"]),
    "wrong size": (recipe(DENSE | {"num_attention_heads": "8"}), ["model.hf_config.num_attention_heads"]),
    "no architecture": (recipe(DENSE | {"architectures": []}), ["model.hf_config.architectures"]),
    "no type": (recipe(DENSE | {"model_type": None}), ["model.hf_config.model_type"]),
    "nested": (
        recipe({"architectures": ["X"], "text_config": DENSE | {"vocab_size": 0}}),
        ["model.hf_config.text_config.vocab_size"],
    ),
    "hybrid pattern": (recipe(MAMBA | {"hybrid_override_pattern": "MXM"}), ["model.hf_config.hybrid_override_pattern"]),
    "mlp only": (recipe(MOE | {"mlp_only_layers": "0"}), ["model.hf_config.mlp_only_layers"]),
    "flag": (recipe(DENSE | {"tie_word_embeddings": "no"}), ["model.hf_config.tie_word_embeddings"]),
}
"""What is no Hugging Face configuration: nothing can be asked of it."""

BY_HAND: dict[str, tuple[dict[str, Any], list[str]]] = {
    "world and tp": (recipe(parallelism={"tp": 2, "cp": 3}), ["trainer.world_size"]),
    "world and experts": (recipe(parallelism={"ep": 16}), ["trainer.world_size"]),
    "dp": (recipe(parallelism={"tp": 2, "dp": 8}), ["trainer.parallelism.dp"]),
    "etp without experts": (recipe(DENSE, parallelism={"etp": 2}), ["trainer.parallelism.etp"]),
    "fp8 storage": (recipe(trainer={"fp8_storage": "blockwise"}), ["trainer.fp8_storage"]),
    "fp8 storage and prequantise": (
        recipe(trainer={"fp8_storage": "mxfp8"}, engines=quantized(), refit={"prequantize": True}),
        ["trainer.fp8_storage"],
    ),
    "fp16 to mxfp8": (recipe(trainer={"dtype": "float16"}, engines=quantized()), ["trainer.dtype"]),
    "fp32 to mxfp8 of a bf16 engine": (recipe(trainer={"dtype": "float32"}, engines=quantized()), ["trainer.dtype"]),
    "engine ep above experts": (recipe(engines=engine(dp=32, ep=32)), ["engines[0].ep"]),
    "engine ep": (recipe(engines=engine(tp=4, ep=2)), ["engines[0].ep"]),
    "engine pp": (recipe(engines=engine(pp=9)), ["engines[0].pp"]),
    "eplb": (recipe(engines=[{}, {"tp": 2, "ep": 2, "eplb": True}]), ["engines[1].eplb"]),
    "no mtp": (recipe(engines=engine(draft="mtp")), ["engines[0].draft"]),
    "sleep on a cpu": (recipe(engines=engine(sleep_level=1), hardware={"device": "cpu"}), ["engines[0].sleep_level"]),
    "trtllm off Blackwell": (
        recipe(engines=quantized(moe_backend="flashinfer_trtllm"), hardware={"compute_capability": "9.0"}),
        ["engines[0].moe_backend"],
    ),
    "deep gemm without gates": (
        recipe(MAMBA, engines=[{"moe_backend": "deep_gemm", "quantization": {"format": "mxfp8", "ignore": ["lm_head"]}}]),
        ["engines[0].moe_backend"],
    ),
    "triton with mxfp8": (recipe(engines=quantized(moe_backend="triton")), ["engines[0].moe_backend"]),
    "moe backend without experts": (recipe(DENSE, engines=engine(moe_backend="triton")), ["engines[0].moe_backend"]),
    "moe backend on a cpu": (
        recipe(engines=engine(moe_backend="marlin"), hardware={"device": "cpu"}),
        ["engines[0].moe_backend"],
    ),
    "no kernel": (recipe(engines=quantized(), hardware={"compute_capability": "7.0"}), ["hardware.compute_capability"]),
    "fp16 with marlin": (
        recipe(
            trainer={"dtype": "bfloat16"}, engines=quantized(dtype="float16", moe_backend="marlin"), refit={"prequantize": True}
        ),
        ["engines[0].dtype"],
    ),
    "fp16 with marlin by default": (
        recipe(engines=quantized(dtype="float16"), refit={"prequantize": True}, hardware={"compute_capability": "9.0"}),
        ["engines[0].dtype"],
    ),
    "prequantise for bf16 engines": (
        recipe(engines=[{"quantization": MX}, {}], refit={"prequantize": True}),
        ["refit.prequantize"],
    ),
    "prequantise for engines that differ": (
        recipe(
            engines=[{"quantization": MX}, {"quantization": {"format": "mxfp8", "ignore": IGNORE[:2]}}],
            refit={"prequantize": True},
        ),
        ["engines[1].quantization.ignore"],
    ),
    "direct without ipc": (recipe(refit={"mode": "direct"}), ["refit.mode"]),
    "ipc on a cpu": (recipe(refit=COLOCATED, hardware={"device": "cpu"}), ["refit.wire"]),
    "collective on shared gpus": (recipe(refit={"placement": "colocated"}), ["refit.wire"]),
    "more engine gpus than trainer gpus": (
        recipe(engines=engine(count=9), refit=COLOCATED | {"mode": "staged"}, hardware={"gpus_per_host": 16}),
        ["engines"],
    ),
    "ipc across hosts": (recipe(refit={"wire": "ipc"}), ["refit.wire"]),
    "shm across hosts": (recipe(refit={"wire": "shm"}), ["refit.wire"]),
    "staged across hosts, apart": (recipe(refit={"wire": "ipc", "mode": "staged"}), ["refit.wire"]),
    "colocated one step off": (recipe(refit=COLOCATED | {"max_steps_off": 1}), ["refit.max_steps_off"]),
    "caches under running requests": (recipe(refit={"running_requests": "keep"}), ["refit.caches"]),
    "requests while asleep": (
        recipe(engines=engine(sleep_level=1), refit=COLOCATED | {"running_requests": "keep", "caches": "reset_running"}),
        ["refit.running_requests"],
    ),
    "caches while asleep": (recipe(engines=engine(sleep_level=1), refit=COLOCATED | {"caches": "keep"}), ["refit.caches"]),
}
"""What no plan can say."""

BY_PLAN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "trainer heads": (recipe(trainer={"world_size": 16}, parallelism={"tp": 16}), ["trainer.parallelism.tp"]),
    "trainer kv heads": (
        recipe(
            DENSE | {"num_key_value_heads": 4, "num_attention_heads": 12, "intermediate_size": 516},
            trainer={"world_size": 6},
            parallelism={"tp": 6},
        ),
        ["trainer.parallelism.tp"],
    ),
    "trainer ffn": (recipe(DENSE | {"intermediate_size": 514}, parallelism={"tp": 4}), ["trainer.parallelism.tp"]),
    "trainer shared experts": (recipe(MLA | {"moe_intermediate_size": 130}, parallelism={"tp": 4}), ["trainer.parallelism.tp"]),
    "trainer mamba groups": (recipe(MAMBA, parallelism={"tp": 8}), ["trainer.parallelism.tp"]),
    "trainer mamba heads": (
        recipe(MAMBA | {"mamba_num_heads": 6, "n_groups": 2}, parallelism={"tp": 4}),
        ["trainer.parallelism.tp"],
    ),
    "trainer experts": (recipe(MOE | {"num_experts": 12}, parallelism={"ep": 8}), ["trainer.parallelism.ep"]),
    "trainer expert ffn": (recipe(MOE | {"moe_intermediate_size": 130}, parallelism={"etp": 4}), ["trainer.parallelism.etp"]),
    "ep without experts": (recipe(DENSE, parallelism={"ep": 2}), ["trainer.parallelism.ep"]),
    "even stages": (recipe(trainer={"world_size": 6}, parallelism={"pp": 3}), ["trainer.parallelism.pp"]),
    "uneven sum": (
        recipe(parallelism={"pp": 4, "first_stage_layers": 2, "last_stage_layers": 3}),
        ["trainer.parallelism.first_stage_layers"],
    ),
    "first and last are all": (
        recipe(parallelism={"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}),
        ["trainer.parallelism.first_stage_layers"],
    ),
    "last too large": (recipe(parallelism={"pp": 2, "last_stage_layers": 9}), ["trainer.parallelism.last_stage_layers"]),
    "no layer left": (recipe(parallelism={"pp": 2, "last_stage_layers": 8}), ["trainer.parallelism.last_stage_layers"]),
    "vpp without pp": (recipe(parallelism={"vpp": 2}), ["trainer.parallelism.vpp"]),
    "vpp and layers": (recipe(parallelism={"pp": 2, "vpp": 3}), ["trainer.parallelism.vpp"]),
    "vpp and first stage": (
        recipe(parallelism={"pp": 2, "vpp": 2, "first_stage_layers": 3}),
        ["trainer.parallelism.first_stage_layers", "trainer.parallelism.vpp"],
    ),
    "counted and uneven": (
        recipe(parallelism={"pp": 2, "first_stage_layers": 3, "loss_counts_as_layer": True}),
        ["trainer.parallelism.first_stage_layers"],
    ),
    "counted ends": (recipe(parallelism={"pp": 4, "loss_counts_as_layer": True}), ["trainer.parallelism.pp"]),
    "layout and counts": (
        recipe(parallelism={"pp": 2, "pipeline_layout": "Et*4|t*4L", "last_stage_layers": 4}),
        ["trainer.parallelism.pipeline_layout"],
    ),
    "layout stages": (recipe(parallelism={"pp": 2, "pipeline_layout": "Et*4|t*2|t*2L"}), ["trainer.parallelism.pipeline_layout"]),
    "layout layers": (recipe(parallelism={"pp": 2, "pipeline_layout": "Et*4|t*5L"}), ["trainer.parallelism.pipeline_layout"]),
    "layout letters": (recipe(parallelism={"pp": 2, "pipeline_layout": "Ed*4|t*4L"}), ["trainer.parallelism.pipeline_layout"]),
    "layout names": (
        recipe(parallelism={"pp": 2, "pipeline_layout": [["embedding", "layer"], ["loss"]]}),
        ["trainer.parallelism.pipeline_layout"],
    ),
    "layout ends": (recipe(parallelism={"pp": 2, "pipeline_layout": "t*4|t*4L"}), ["trainer.parallelism.pipeline_layout"]),
    "layout vpp": (
        recipe(parallelism={"pp": 2, "vpp": 2, "pipeline_layout": "Et*4|t*4L"}),
        ["trainer.parallelism.pipeline_layout"],
    ),
    "layout too long": (
        recipe(parallelism={"pp": 2, "pipeline_layout": "Et*999999|t*4L"}),
        ["trainer.parallelism.pipeline_layout"],
    ),
    "layout mtp": (recipe(MLA, parallelism={"pp": 2, "pipeline_layout": "Et*4|t*4mmL"}), ["trainer.parallelism.pipeline_layout"]),
    "engine heads": (recipe(engines=engine(tp=16)), ["engines[0].tp"]),
    "engine kv heads": (
        recipe(DENSE | {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 516}, engines=engine(tp=6)),
        ["engines[0].tp"],
    ),
    "engine vocabulary": (
        recipe(DENSE | {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 516}, engines=engine(tp=3)),
        ["engines[0].tp"],
    ),
    "engine ffn": (recipe(DENSE | {"intermediate_size": 514}, engines=engine(tp=4)), ["engines[0].tp"]),
    "engine mamba heads": (
        recipe(MAMBA | {"mamba_num_heads": 6, "n_groups": 1, "mamba_head_dim": 64}, engines=engine(tp=4)),
        ["engines[0].tp"],
    ),
    "engine mamba groups": (recipe(MAMBA, engines=engine(tp=8)), ["engines[0].tp"]),
    "engine experts": (recipe(MOE | {"moe_intermediate_size": 130}, engines=engine(tp=4)), ["engines[0].tp"]),
    "engine experts over dp": (recipe(MOE | {"moe_intermediate_size": 132}, engines=engine(tp=2, dp=4)), ["engines[0].dp"]),
    "engine has few experts": (recipe(MOE | {"num_experts": 2}, engines=engine(tp=4)), ["engines[0].tp"]),
    "engine ep without experts": (recipe(DENSE, engines=engine(tp=2, ep=2)), ["engines[0].ep"]),
    "k cut in the engine": (recipe(engines=quantized(tp=8)), ["engines[0].tp"]),
    "k cut of dense layers": (
        recipe(
            DENSE | {"intermediate_size": 320}, engines=[{"tp": 4, "quantization": {"format": "mxfp8", "ignore": IGNORE[::2]}}]
        ),
        ["engines[0].tp"],
    ),
    "k cut of attention": (
        recipe(
            MOE | {"head_dim": 16}, engines=[{"tp": 8, "ep": 8, "quantization": {"format": "mxfp8", "ignore": ["*mlp.gate"]}}]
        ),
        ["engines[0].tp"],
    ),
    "k not whole blocks": (
        recipe(DENSE | {"hidden_size": 272}, engines=[{"quantization": {"format": "mxfp8", "ignore": IGNORE[::2]}}]),
        ["engines[0].quantization.ignore"],
    ),
    "k cut in the trainer, experts": (
        recipe(MOE | {"moe_intermediate_size": 64}, parallelism={"etp": 4}, engines=quantized()),
        ["trainer.parallelism.etp"],
    ),
    "k cut in the trainer": (
        recipe(
            DENSE | {"intermediate_size": 320},
            parallelism={"tp": 4},
            engines=[{"quantization": {"format": "mxfp8", "ignore": IGNORE[::2]}}],
        ),
        ["trainer.parallelism.tp"],
    ),
    "ignore matches nothing": (
        recipe(engines=[{"quantization": {"format": "mxfp8", "ignore": [*IGNORE, "*mlp.router"]}}]),
        ["engines[0].quantization.ignore[3]"],
    ),
    "ignore is empty text": (
        recipe(engines=[{"quantization": {"format": "mxfp8", "ignore": ["", *IGNORE]}}]),
        ["engines[0].quantization.ignore[0]"],
    ),
    "ignore splits qkv": (
        recipe(engines=[{"quantization": {"format": "mxfp8", "ignore": ["model.layers.3.self_attn.q_proj"]}}]),
        ["engines[0].quantization.ignore"],
    ),
    "ignore names a part of a joined module": (
        recipe(engines=[{"quantization": {"format": "mxfp8", "ignore": ["*.k_proj"]}}]),
        ["engines[0].quantization.ignore[0]"],
    ),
    "ignore leaves nothing": (
        recipe(engines=[{"quantization": {"format": "mxfp8", "ignore": ["model", "lm_head"]}}]),
        ["engines[0].quantization.ignore"],
    ),
    "shm across hosts, shared": (
        recipe(engines=engine(count=8), refit=COLOCATED | {"wire": "shm"}, hardware={"gpus_per_host": 4}, parallelism={"ep": 8}),
        ["refit.wire"],
    ),
    "engines on a host without the trainer": (
        recipe(
            hardware={"device": "cpu", "gpus_per_host": 4},
            trainer={"world_size": 4},
            engines=engine(count=8),
            refit=COLOCATED | {"mode": "staged"},
        ),
        ["refit.wire"],
    ),
    "direct across hosts, experts": (
        recipe(engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"ep": 8}),
        ["refit.wire"],
    ),
    "direct across hosts, pipeline": (
        recipe(engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"pp": 2}),
        ["refit.wire"],
    ),
    "direct across hosts, tensor": (
        recipe(engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"tp": 8}),
        ["refit.wire"],
    ),
    "staged across hosts": (
        recipe(
            engines=engine(count=8), refit=COLOCATED | {"mode": "staged"}, hardware={"gpus_per_host": 4}, parallelism={"ep": 8}
        ),
        ["refit.wire"],
    ),
    "trainer memory": (
        recipe(hardware={"gpu_memory_bytes": 1 << 20}),
        ["trainer.parallelism", "engines[0].gpu_memory_utilization"],
    ),
    "engine memory": (
        recipe(hardware={"gpu_memory_bytes": 1 << 28}, engines=engine(gpu_memory_utilization=0.01), parallelism={"ep": 8}),
        ["trainer.parallelism", "engines[0].gpu_memory_utilization"],
    ),
    "both sides at once": (
        recipe(
            MOE | {"moe_intermediate_size": 130, "num_experts": 12},
            trainer={"world_size": 32},
            parallelism={"etp": 4, "ep": 8},
            engines=engine(tp=4),
        ),
        ["trainer.parallelism.ep", "trainer.parallelism.etp", "engines[0].tp"],
    ),
    "engines of one shape": (recipe(DENSE, engines=[{"tp": 16}, {}, {"tp": 16}]), ["engines[0].tp", "engines[2].tp"]),
    "no family that is known": (recipe(UNKNOWN), ["model.hf_config"]),
    "a dense layer that the trainer builds with experts": (
        recipe(MOE | {"mlp_only_layers": [0]}, engines=[{}, {"tp": 2}]),
        ["model.hf_config"],
    ),
    "sizes of a model that is refused too": (
        recipe(MOE | {"mlp_only_layers": [0]}, parallelism={"ep": 3}, engines=engine(tp=16), trainer={"world_size": 3}),
        ["trainer.parallelism.ep", "engines[0].tp", "model.hf_config"],
    ),
    "vocabulary that is padded otherwise over two hosts": (
        recipe(engines=engine(tp=8, ep=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"tp": 8, "ep": 8}),
        ["refit.wire"],
    ),
    "ignore names a layer that is not there": (
        recipe(engines=[{"quantization": {"format": "mxfp8", "ignore": ["model.layers.8.*"]}}]),
        ["engines[0].quantization.ignore[0]"],
    ),
    "k of the last layer alone": (
        recipe(
            MOE | {"hidden_size": 272},
            engines=[{"quantization": {"format": "mxfp8", "ignore": [f"model.layers.{i}.*" for i in range(7)] + ["lm_head"]}}],
        ),
        ["engines[0].quantization.ignore"],
    ),
}
"""What Megatron, vLLM, the source map, the routes or the plan refuse."""
