"""The reference system's nineteen preconditions: what applies is refused by its setting, what was lifted is accepted."""

import copy

import pytest

from megatron_sender.preflight import PRECONDITIONS, check_nccl_reshard_refit_support
from vllm_refit_ext.core.errors import ConfigError

VALID = {
    "grpo": {"num_prompts_per_step": 64},
    "policy": {
        "model_name": "Qwen/Qwen3-30B-A3B",
        "precision": "bfloat16",
        "dtensor_cfg": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "pipeline_model_parallel_layout": None,
            "fp8_cfg": {"enabled": False, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
        },
        "generation": {
            "backend": "vllm",
            "refit_transport": "nccl_reshard",
            "colocated": {"enabled": False, "resources": {"num_nodes": 2}},
            "vllm_cfg": {
                "precision": "bfloat16",
                "tensor_parallel_size": 2,
                "expert_parallel_size": 1,
                "pipeline_parallel_size": 1,
            },
            "vllm_kwargs": {},
        },
    },
}
MEGATRON, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
MXFP8 = {f"{VLLM}.precision": "fp8", f"{VLLM}.is_mx": True}
FP8_PARAM = {f"{MEGATRON}.fp8_cfg": {"enabled": True, "fp8_recipe": "blockwise", "fp8_param": True}}

REFUSED = {
    1: {"policy.generation.colocated.enabled": True},
    2: {"policy.generation.backend": "sglang"},
    3: {"policy.generation.vllm_kwargs.enable_eplb": True},
    4: {"policy.generation.real_quant": True},
    5: {"policy.megatron_cfg.enabled": False},
    6: {"policy.dtensor_cfg.enabled": True},
    12: {f"{VLLM}.precision": "fp8_e4m3"},
    13: MXFP8 | FP8_PARAM,
    14: {f"{VLLM}.precision": "fp8", f"{MEGATRON}.fp8_cfg": {"enabled": True, "fp8_recipe": "tensorwise", "fp8_param": True}},
    15: MXFP8 | {"policy.precision": "float32"},
    16: {f"{VLLM}.precision": "fp8"},
    17: FP8_PARAM,
    18: {f"{VLLM}.tensor_parallel_size": 4, f"{VLLM}.expert_parallel_size": 2},
}
LIFTED = {
    7: {f"{MEGATRON}.expert_tensor_parallel_size": 2},
    8: {f"{MEGATRON}.pipeline_model_parallel_layout": "Et*24|t*24L"},
    9: {f"{MEGATRON}.virtual_pipeline_model_parallel_size": 2},
    10: {f"{MEGATRON}.account_for_embedding_in_pipeline_split": True},
    11: {f"{MEGATRON}.account_for_loss_in_pipeline_split": True},
    18: {f"{VLLM}.tensor_parallel_size": 2, f"{VLLM}.expert_parallel_size": 8},
    19: {f"{VLLM}.pipeline_parallel_size": 2},
}
ACCEPTED = {
    "as it is": {},
    "is_mx from bf16": MXFP8,
    "is_mx with fp8 compute over bf16 storage": MXFP8 | {f"{MEGATRON}.fp8_cfg": {"enabled": True, "fp8_param": False}},
    "fp8_param of a configuration that is off": {f"{MEGATRON}.fp8_cfg.fp8_param": True},
    "precision auto": {f"{VLLM}.precision": "auto"},
    "precision bf16": {f"{VLLM}.precision": "bf16"},
    "precision unset": {f"{VLLM}.precision": None},
    "ep equal to tp": {f"{VLLM}.expert_parallel_size": 2},
    "no vllm_kwargs": {"policy.generation.vllm_kwargs": None},
    "no fp8_cfg": {f"{MEGATRON}.fp8_cfg": None},
}


def with_settings(settings):
    config = copy.deepcopy(VALID)
    for path, value in settings.items():
        *way, last = path.split(".")
        at = config
        for key in way:
            at = at.setdefault(key, {})
        at[last] = value
    return config


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_nccl_reshard_refit_support(config)
    return caught.value


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    check_nccl_reshard_refit_support(with_settings(ACCEPTED[name]))


@pytest.mark.parametrize("number", REFUSED)
def test_a_precondition_that_applies(number):
    error = refused(with_settings(REFUSED[number]))
    assert [problem.where for problem in error.problems] == [PRECONDITIONS[number - 1].setting]
    (problem,) = error.problems
    assert problem.what.startswith(f"precondition {number}: ")
    assert problem.got
    assert problem.wanted
    assert PRECONDITIONS[number - 1].setting in str(error)


@pytest.mark.parametrize("number", LIFTED)
def test_a_precondition_that_was_lifted(number):
    check_nccl_reshard_refit_support(with_settings(LIFTED[number]))


def test_every_precondition_is_tried():
    assert [rule.number for rule in PRECONDITIONS] == list(range(1, 20))
    assert {r.number for r in PRECONDITIONS if r.status in ("applies", "tightened", "relaxed")} == set(REFUSED)
    assert {r.number for r in PRECONDITIONS if r.status in ("lifted", "relaxed")} == set(LIFTED)
    assert all(rule.reason.endswith(".") for rule in PRECONDITIONS)


def test_blockwise_storage_is_refused_too():
    error = refused(with_settings({f"{VLLM}.precision": "fp8"} | FP8_PARAM))
    assert [problem.where for problem in error.problems] == [f"{MEGATRON}.fp8_cfg.fp8_recipe"]


def test_all_at_once():
    numbers = (1, 2, 3, 4, 5, 6)
    error = refused(with_settings({key: value for n in numbers for key, value in REFUSED[n].items()}))
    assert [problem.where for problem in error.problems] == [PRECONDITIONS[n - 1].setting for n in numbers]


def test_colocated_is_on_by_default():
    config = copy.deepcopy(VALID)
    del config["policy"]["generation"]["colocated"]
    assert [problem.where for problem in refused(config).problems] == ["policy.generation.colocated.enabled"]


def test_is_mx_without_fp8():
    assert [p.where for p in refused(with_settings({f"{VLLM}.is_mx": True})).problems] == [f"{VLLM}.is_mx"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("policy.generation.colocated.enabled", "false"),
        ("policy.generation.vllm_kwargs.enable_eplb", "false"),
        ("policy.dtensor_cfg.enabled", 0),
        (f"{VLLM}.is_mx", "yes"),
        (f"{VLLM}.expert_parallel_size", "2"),
        (f"{VLLM}.tensor_parallel_size", 0),
        (f"{VLLM}.pipeline_parallel_size", True),
        (f"{MEGATRON}.expert_tensor_parallel_size", 1.5),
        (f"{MEGATRON}.fp8_cfg.enabled", "no"),
        (f"{MEGATRON}.fp8_cfg", "blockwise"),
        (VLLM, ["precision"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(path, value):
    error = refused(with_settings({path: value}))
    assert path in [problem.where for problem in error.problems]


@pytest.mark.parametrize("config", [None, 3, "policy", [], {}, {"policy": None}, {"policy": 3}, {"policy": {"generation": []}}])
def test_something_else_than_a_configuration(config):
    assert refused(config).problems
