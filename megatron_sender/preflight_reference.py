"""The reference system's preconditions for its NCCL reshard, on its own configuration: which apply here, which are lifted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from megatron_sender.config_load import show
from vllm_refit_ext.core.errors import ConfigError, Problem


class Precondition(NamedTuple):
    """One precondition of the reference system: its number there, the setting, and what became of it here."""

    number: int
    setting: str
    demands: str
    status: Literal["applies", "tightened", "relaxed", "lifted"]
    reason: str


GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
MEGATRON = "policy.megatron_cfg"
FP8_PARAM = f"{MEGATRON}.fp8_cfg.fp8_param"

_LAYERS = "Layer numbers come from Megatron's modules themselves."

PRECONDITIONS = (
    Precondition(1, f"{GENERATION}.colocated.enabled", "false", "applies", "Two NCCL ranks can't share a GPU; wire `ipc` can."),
    Precondition(2, f"{GENERATION}.backend", "vllm", "applies", "The receiver is a vLLM extension."),
    Precondition(3, f"{GENERATION}.vllm_kwargs.enable_eplb", "false", "applies", "It moves experts after the plan is made."),
    Precondition(4, f"{GENERATION}.real_quant", "false", "applies", "It calibrates and packs at load."),
    Precondition(5, f"{MEGATRON}.enabled", "true", "applies", "The sender reads Megatron's shards."),
    Precondition(6, "policy.dtensor_cfg.enabled", "false", "applies", "The sender reads Megatron's shards."),
    Precondition(7, f"{MEGATRON}.expert_tensor_parallel_size", "1", "lifted", "It is one more cut of the source boxes."),
    Precondition(8, f"{MEGATRON}.pipeline_model_parallel_layout", "unset", "lifted", _LAYERS),
    Precondition(9, f"{MEGATRON}.virtual_pipeline_model_parallel_size", "unset or 1", "lifted", _LAYERS),
    Precondition(10, f"{MEGATRON}.account_for_embedding_in_pipeline_split", "false", "lifted", _LAYERS),
    Precondition(11, f"{MEGATRON}.account_for_loss_in_pipeline_split", "false", "lifted", _LAYERS),
    Precondition(12, f"{VLLM}.precision", "unset, auto, bf16, bfloat16 or fp8", "applies", "No writer knows another format."),
    Precondition(13, FP8_PARAM, "false for an MXFP8 engine (is_mx)", "applies", "Values and scales lie apart there."),
    Precondition(
        14, f"{MEGATRON}.fp8_cfg.fp8_recipe", "blockwise when fp8_param feeds FP8", "tightened", "No FP8 storage is read here."
    ),
    Precondition(15, "policy.precision", "bfloat16 for an MXFP8 engine", "applies", "A fresh engine rounds to BF16 first."),
    Precondition(
        16, f"{VLLM}.is_mx", "is_mx or fp8_param when precision is fp8", "applies", "Nothing here quantises to 128 x 128 blocks."
    ),
    Precondition(17, FP8_PARAM, "false when the engine is not FP8", "applies", "A BF16 engine has no use for FP8 storage."),
    Precondition(
        18,
        f"{VLLM}.expert_parallel_size",
        "1 or equal to tensor_parallel_size",
        "relaxed",
        "vLLM wants 1 or a multiple of tensor_parallel_size.",
    ),
    Precondition(19, f"{VLLM}.pipeline_parallel_size", "1", "lifted", "A stage's routes ask for its own layers only."),
)
"""All nineteen, in the reference system's order."""

PRECISIONS = (None, "auto", "bf16", "bfloat16", "fp8")


class _Config:
    """The user's nested settings, read by full path. What can't be read is a problem of that path."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[Problem] = []

    def get(self, path: str, default: object = None) -> object:
        """The value at `path`; `default` where a mapping on the way, or the value, is missing or null."""
        value: object = self.config
        walked: list[str] = []
        for name in path.split("."):
            if value is None:
                return default
            if not isinstance(value, Mapping):
                where = ".".join(walked)
                problem = Problem("a mapping is wanted here", where=where, got=show(value), wanted=f"settings such as {name}")
                if problem not in self.problems:
                    self.problems.append(problem)
                return default
            walked.append(name)
            value = value.get(name)
        return default if value is None else value

    def flag(self, path: str, default: bool = False) -> bool:
        """The flag at `path`. Text such as "false" is a problem: it would read as true."""
        value = self.get(path, default)
        if isinstance(value, bool):
            return value
        self._wrong(path, value, "true or false")
        return default

    def size(self, path: str) -> int | None:
        """The size at `path`, 1 when unset, or none (and a problem) when it is not a positive integer."""
        value = self.get(path, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self._wrong(path, value, "an integer of at least 1")
        return None

    def _wrong(self, path: str, value: object, wanted: str) -> None:
        problem = Problem("the value does not fit", where=path, got=show(value), wanted=wanted)
        if problem not in self.problems:
            self.problems.append(problem)

    def refuse(self, number: int, got: object, where: str = "", do: str = "") -> None:
        """Adds a violation of precondition `number`."""
        rule = PRECONDITIONS[number - 1]
        what = f"precondition {number}: {rule.reason}"
        self.problems.append(Problem(what, where=where or rule.setting, got=show(got), wanted=rule.demands, do=do))


def check_nccl_reshard_refit_support(config: Mapping[str, Any]) -> None:
    """Checks a configuration of the reference system's shape (`policy.generation...`, `policy.megatron_cfg...`).

    Every precondition of that system's shard-to-shard refit that still applies is checked; `PRECONDITIONS` says which were
    lifted. Settings that play no part in a refit are not looked at.

    Raises ConfigError whose `problems` are all violations, each with the full path of the setting.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("a configuration is nested mappings", got=show(config), wanted="a mapping with the key policy")
    c = _Config(config)
    if c.flag(f"{GENERATION}.colocated.enabled", default=True):
        c.refuse(1, c.get(f"{GENERATION}.colocated.enabled", "unset, which means true"))
    backend = c.get(f"{GENERATION}.backend")
    if backend != "vllm":
        c.refuse(2, backend)
    if c.flag(f"{GENERATION}.vllm_kwargs.enable_eplb"):
        c.refuse(3, True)
    if c.flag(f"{GENERATION}.real_quant"):
        c.refuse(4, True)
    megatron = c.flag(f"{MEGATRON}.enabled")
    if not megatron:
        c.refuse(5, c.get(f"{MEGATRON}.enabled", "unset"))
    if c.flag("policy.dtensor_cfg.enabled"):
        c.refuse(6, True)
    for check in (_check_formats, _check_sizes):
        check(c, megatron, backend == "vllm")
    if c.problems:
        summary = f"the shard-to-shard refit can't be used with this configuration: {len(c.problems)} violation(s)"
        raise ConfigError.of(c.problems, summary)


def _check_formats(c: _Config, megatron: bool, vllm: bool) -> None:
    precision = c.get(f"{VLLM}.precision")
    mx = c.flag(f"{VLLM}.is_mx")
    if precision not in PRECISIONS:
        c.refuse(12, precision)
    if mx and precision != "fp8" and vllm:
        what = "MXFP8 is a kind of fp8 here, so is_mx alone does nothing"
        c.problems.append(Problem(what, where=f"{VLLM}.is_mx", got=f"true with precision {precision}", wanted="precision fp8"))
    if not megatron:
        return
    fp8_param = c.flag(f"{MEGATRON}.fp8_cfg.enabled", default=True) and c.flag(FP8_PARAM)
    recipe = c.get(f"{MEGATRON}.fp8_cfg.fp8_recipe")
    if precision != "fp8":
        if fp8_param:
            c.refuse(17, True)
        return
    if fp8_param and mx:
        c.refuse(13, True, do="Store parameters in BF16: set fp8_param to false.")
    elif fp8_param:
        c.refuse(14, f"{recipe} with fp8_param true", do="Set fp8_param to false, and is_mx to true for MXFP8 engines.")
    elif mx and c.get("policy.precision") != "bfloat16":
        c.refuse(15, c.get("policy.precision", "unset"))
    elif not mx and not fp8_param:
        c.refuse(16, "neither", do="Set is_mx to true.")


def _check_sizes(c: _Config, megatron: bool, vllm: bool) -> None:
    if megatron:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
            c.size(f"{MEGATRON}.{name}")
        c.size(f"{MEGATRON}.expert_tensor_parallel_size")
        c.size(f"{MEGATRON}.virtual_pipeline_model_parallel_size")
    if not vllm:
        return
    tp, ep = c.size(f"{VLLM}.tensor_parallel_size"), c.size(f"{VLLM}.expert_parallel_size")
    c.size(f"{VLLM}.pipeline_parallel_size")
    if tp is not None and ep is not None and ep != 1 and ep % tp:
        c.refuse(18, f"expert_parallel_size {ep}, tensor_parallel_size {tp}")
