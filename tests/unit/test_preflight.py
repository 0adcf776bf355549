"""Each thing that can't work is refused, and the error names the setting. All violations come at once."""

import copy
import subprocess
import sys

import pytest

from megatron_sender.config_load import parse_recipe
from megatron_sender.preflight import check_refit_support, find_violations, refit_memory
from vllm_refit_ext.core.errors import ConfigError

MOE = {
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
    "mlp_only_layers": [0],
}
DENSE = {key: value for key, value in MOE.items() if "exp" not in key and "moe" not in key and key != "mlp_only_layers"}
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
MLA = MOE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
}
IGNORE = ["*self_attn*", "*mlp.gate", "lm_head"]
MX = {"format": "mxfp8", "ignore": IGNORE}


def recipe(hf=MOE, trainer=None, parallelism=None, engines=None, refit=None, hardware=None):
    """A recipe as plain data that works, with parts replaced."""
    return {
        "name": "tiny",
        "model": {"name": "tiny", "hf_config": hf},
        "hardware": {"gpus_per_host": 8} | (hardware or {}),
        "trainer": {"world_size": 8, "parallelism": parallelism or {}} | (trainer or {}),
        "engines": copy.deepcopy(engines or [{}]),
        "refit": {"placement": "disaggregated", "wire": "collective"} | (refit or {}),
    }


def engine(**settings):
    return [settings]


def quantized(**settings):
    return [{"quantization": MX} | settings]


UNKNOWN = DENSE | {"model_type": "new_family", "architectures": ["NewForCausalLM"], "intermediate_size": 320}
COLOCATED = {"placement": "colocated", "wire": "ipc"}

WORKS = {
    "module names that are not known here": recipe(
        UNKNOWN, engines=[{"tp": 4, "quantization": {"format": "mxfp8", "ignore": ["*some.module"]}}]
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
    "staged over hosts": recipe(
        engines=engine(count=8), refit=COLOCATED | {"mode": "staged"}, hardware={"gpus_per_host": 4}, parallelism={"ep": 8}
    ),
    "staged on a cpu": recipe(hardware={"device": "cpu"}, engines=engine(count=8), refit=COLOCATED | {"mode": "staged"}),
    "shm, every host holds all": recipe(
        engines=engine(count=8), refit=COLOCATED | {"wire": "shm"}, hardware={"gpus_per_host": 4}, parallelism={"ep": 4}
    ),
    "staged over hosts, on some of the trainer's": recipe(
        engines=engine(count=2), refit=COLOCATED | {"mode": "staged"}, hardware={"gpus_per_host": 2}, parallelism={"pp": 4}
    ),
    "direct, every host holds all": recipe(
        engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"ep": 4}
    ),
    "direct, each host its own half": recipe(
        engines=engine(tp=8, ep=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"tp": 8, "ep": 8}
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

REFUSED = {
    "world and tp": (recipe(parallelism={"tp": 2, "cp": 3}), ["trainer.world_size"]),
    "world and experts": (recipe(parallelism={"ep": 16}), ["trainer.world_size"]),
    "dp": (recipe(parallelism={"tp": 2, "dp": 8}), ["trainer.parallelism.dp"]),
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
        recipe(MAMBA | {"mamba_num_heads": 6, "n_groups": 4}, parallelism={"tp": 4}),
        ["trainer.parallelism.tp"],
    ),
    "trainer experts": (recipe(MOE | {"num_experts": 12}, parallelism={"ep": 8}), ["trainer.parallelism.ep"]),
    "trainer expert ffn": (recipe(MOE | {"moe_intermediate_size": 130}, parallelism={"etp": 4}), ["trainer.parallelism.etp"]),
    "ep without experts": (recipe(DENSE, parallelism={"ep": 2}), ["trainer.parallelism.ep"]),
    "etp without experts": (recipe(DENSE, parallelism={"etp": 2}), ["trainer.parallelism.etp"]),
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
    "fp8 storage": (recipe(trainer={"fp8_storage": "blockwise"}), ["trainer.fp8_storage"]),
    "fp8 storage and prequantise": (
        recipe(trainer={"fp8_storage": "mxfp8"}, engines=quantized(), refit={"prequantize": True}),
        ["trainer.fp8_storage"],
    ),
    "fp16 to mxfp8": (recipe(trainer={"dtype": "float16"}, engines=quantized()), ["trainer.dtype"]),
    "fp32 to mxfp8 of a bf16 engine": (recipe(trainer={"dtype": "float32"}, engines=quantized()), ["trainer.dtype"]),
    "engine heads": (recipe(engines=engine(tp=16)), ["engines[0].tp"]),
    "engine kv heads": (
        recipe(DENSE | {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 516}, engines=engine(tp=6)),
        ["engines[0].tp", "engines[0].tp"],
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
    "engine ep above experts": (recipe(engines=engine(dp=32, ep=32)), ["engines[0].ep"]),
    "engine ep": (recipe(engines=engine(tp=4, ep=2)), ["engines[0].ep"]),
    "engine ep without experts": (recipe(DENSE, engines=engine(tp=2, ep=2)), ["engines[0].ep"]),
    "engine pp": (recipe(engines=engine(pp=9)), ["engines[0].pp"]),
    "eplb": (recipe(engines=[{}, {"tp": 2, "ep": 2, "eplb": True}]), ["engines[1].eplb"]),
    "no mtp": (recipe(engines=engine(draft="mtp")), ["engines[0].draft"]),
    "sleep on a cpu": (recipe(engines=engine(sleep_level=1), hardware={"device": "cpu"}), ["engines[0].sleep_level"]),
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
        ["engines"],
    ),
    "direct across hosts, experts": (
        recipe(engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"ep": 8}),
        ["refit.mode"],
    ),
    "direct across hosts, pipeline": (
        recipe(engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"pp": 2}),
        ["refit.mode"],
    ),
    "direct across hosts, tensor": (
        recipe(engines=engine(count=8), refit=COLOCATED, hardware={"gpus_per_host": 4}, parallelism={"tp": 8}),
        ["refit.mode"],
    ),
    "colocated one step off": (recipe(refit=COLOCATED | {"max_steps_off": 1}), ["refit.max_steps_off"]),
    "caches under running requests": (recipe(refit={"running_requests": "keep"}), ["refit.caches"]),
    "requests while asleep": (
        recipe(engines=engine(sleep_level=1), refit=COLOCATED | {"running_requests": "keep", "caches": "reset_running"}),
        ["refit.running_requests"],
    ),
    "caches while asleep": (recipe(engines=engine(sleep_level=1), refit=COLOCATED | {"caches": "keep"}), ["refit.caches"]),
    "trainer memory": (
        recipe(hardware={"gpu_memory_bytes": 1 << 20}),
        ["trainer.parallelism", "engines[0].gpu_memory_utilization"],
    ),
    "engine memory": (
        recipe(hardware={"gpu_memory_bytes": 1 << 28}, engines=engine(gpu_memory_utilization=0.01), parallelism={"ep": 8}),
        ["trainer.parallelism", "engines[0].gpu_memory_utilization"],
    ),
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


@pytest.mark.parametrize("name", WORKS)
def test_what_works_is_accepted(name):
    assert [str(problem) for problem in find_violations(WORKS[name])] == []
    assert check_refit_support(WORKS[name]).name == "tiny"


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_work_is_refused_by_the_name_of_the_setting(name):
    config, where = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check_refit_support(config)
    problems = caught.value.problems
    assert [problem.where for problem in problems] == where, str(caught.value)
    for problem in problems:
        assert problem.where in str(caught.value)
        assert problem.got or "lacks" in problem.what
        assert problem.wanted or problem.do


def test_all_violations_come_at_once():
    config = recipe(
        MOE,
        trainer={"world_size": 12, "fp8_storage": "delayed"},
        parallelism={"tp": 5, "ep": 3, "pp": 3},
        engines=[{"tp": 3, "eplb": True}, {"ep": 2, "draft": "mtp"}],
        refit={"mode": "direct", "prequantize": True},
    )
    where = {problem.where for problem in find_violations(config)}
    assert where >= {
        "trainer.world_size",
        "trainer.fp8_storage",
        "trainer.parallelism.tp",
        "trainer.parallelism.ep",
        "trainer.parallelism.pp",
        "engines[0].tp",
        "engines[0].eplb",
        "engines[1].ep",
        "engines[1].draft",
        "refit.mode",
        "refit.prequantize",
    }


def test_problems_of_shape_come_before_problems_of_sense():
    config = recipe(parallelism={"tp": 3}) | {"surprise": 1}
    assert [problem.where for problem in find_violations(config)] == ["surprise"]


def test_a_path_is_relative_to_base(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    config = recipe("model.json")
    assert "can't be read" in find_violations(config)[0].what
    assert {problem.where for problem in find_violations(config, tmp_path)} >= {"model.hf_config.model_type"}


def test_memory_counts_what_a_rank_holds():
    config, _ = parse_recipe(recipe(parallelism={"tp": 2, "ep": 4}, engines=engine(tp=2, ep=2), refit={"bucket_bytes": 1 << 20}))
    trainer, held = refit_memory(config)
    experts = 7 * 16 * 3 * 128 * 256
    dense = 8 * (2 * 512 * 256 + 2 * 128 * 256) + 3 * 512 * 256 + 7 * 16 * 256 + 2 * 1000 * 256
    assert trainer.weights == 2 * (dense // 2 + experts // 4)
    assert held.weights == 2 * (dense // 2 + experts // 2)
    assert trainer.staging == held.staging == 2 << 20


def test_the_preflight_needs_neither_torch_nor_vllm_nor_megatron():
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'megatron', 'triton', 'transformers'): sys.modules[name] = None\n"
        "import megatron_sender.preflight, vllm_refit_ext.tools.doctor\n"
        "assert vllm_refit_ext.tools.doctor.run()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
