"""Engine routes without an engine: any rank's model built on the meta device, in one process, with no GPU and no weights.

vLLM sizes a model's parameters by the parallel groups of the process that builds it. Here a process stands in for any one
worker: `as_worker` gives vLLM groups that know their ranks and can't communicate, for as long as a model is built and its
loader recorded. This serves planning and tests; a live worker records on its own model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.stand_ins import Members, swap
from vllm_refit_ext.engine.record import record_routes
from vllm_refit_ext.kernels.meta import LargeOnMeta
from vllm_refit_ext.receiver.routes.table import Routes

LARGE = 1 << 16
"""Elements from which a tensor of a model that computes while it is built has no storage."""


def engine_routes(
    hf_config: Any,
    manifest_entries: Mapping[str, tuple[Sequence[int], str]],
    *,
    tp: int = 1,
    ep: bool = False,
    pp: int = 1,
    dp: int = 1,
    rank: int = 0,
    dtype: str = "bfloat16",
) -> Routes:
    """The routes of one worker of an engine that does not exist yet.

    `hf_config` is a transformers config, a dict, or the path of a folder with a `config.json`; it must name its
    `architectures`. `manifest_entries` maps HF name -> (shape, dtype name). The engine has `dp * pp * tp` ranks, the last
    the fastest, expert parallelism over the `dp * tp` ranks of a stage when `ep`, and holds its weights in `dtype`. Raises
    ConfigError for a rank outside the engine, RouteError as `record_routes` does.
    """
    with engine_config(hf_config, tp=tp, ep=ep, pp=pp, dtype=dtype) as config, as_worker(config, rank, dp):
        return record_routes(build_on_meta(config), manifest_entries, rank=rank, vllm_config=config)


@contextmanager
def engine_config(hf_config: Any, *, tp: int = 1, ep: bool = False, pp: int = 1, dtype: str = "bfloat16") -> Iterator[Any]:
    """A VllmConfig for `hf_config` (see `engine_routes`): no tokenizer, no download, no process groups.

    vLLM reads the config from a folder, also while it builds a model, so the folder lasts as long as the context. One
    VllmConfig builds one model.
    """
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(hf_config, str | Path):
            folder = str(hf_config)
        elif isinstance(hf_config, Mapping):
            Path(folder, "config.json").write_text(json.dumps(dict(hf_config)))
        else:
            hf_config.save_pretrained(folder)
        yield _vllm_config(folder, tp, ep, pp, dtype)


def _vllm_config(folder: str, tp: int, ep: bool, pp: int, dtype: str) -> Any:
    from vllm.config import CacheConfig, CompilationConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    import_model(folder)
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        enable_expert_parallel=ep,
        distributed_executor_backend="external_launcher" if tp * pp > 1 else None,
        disable_custom_all_reduce=True,
    )
    return VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=128),
        parallel_config=parallel,
        cache_config=CacheConfig(),
        load_config=LoadConfig(load_format="dummy"),
        compilation_config=CompilationConfig(mode=0),
    )


def import_model(folder: str | Path) -> None:
    """Import the class of the model whose `config.json` is in `folder`. vLLM would start a process to look at it first."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in json.loads(Path(folder, "config.json").read_text()).get("architectures") or ():
        entry = ModelRegistry.models.get(architecture)
        if entry is not None and not hasattr(entry, "model_cls"):
            ModelRegistry.register_model(architecture, entry.load_model_cls())


@contextmanager
def as_worker(vllm_config: Any, rank: int, dp: int = 1) -> Iterator[None]:
    """Within the context, vLLM takes this process for worker `rank` of the engine that `vllm_config` describes, of which `dp`
    data parallel copies run. Experts are shared by all copies.

    The groups answer for sizes and ranks; a collective on one fails. Groups that existed before are put back.
    """
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    size = tp * pp
    if not 0 <= rank < size * dp:
        raise ConfigError("no such rank in this engine", got=rank, wanted=f"0..{size * dp - 1} (dp {dp} x pp {pp} x tp {tp})")
    copy, within = divmod(rank, size)
    stage, place = divmod(within, tp)
    row = [rank - place + i for i in range(tp)]
    experts = [c * size + stage * tp + i for c in range(dp) for i in range(tp)]
    members = {"_TP": row, "_EP": experts, "_EPLB": experts, "_ETP": [rank]}
    members["_WORLD"] = list(range(copy * size, (copy + 1) * size))
    members["_PP"] = [copy * size + i * tp + place for i in range(pp)]
    members["_DP"] = [c * size + within for c in range(dp)]
    members |= {name: [rank] for name in ("_DCP", "_PCP", "_INNER_DP_WORLD") if hasattr(parallel_state, name)}
    saved = {name: getattr(parallel_state, name) for name in members if hasattr(parallel_state, name)}
    try:
        for name in saved:
            setattr(parallel_state, name, _silent_group(parallel_state.GroupCoordinator, name, members[name], rank))
        yield
    finally:
        for name, group in saved.items():
            setattr(parallel_state, name, group)


def _silent_group(kind: type[Any], name: str, ranks: list[int], rank: int) -> Any:
    """A GroupCoordinator that knows its place and holds no process group."""
    group: Any = object.__new__(kind)
    group.unique_name = f"offline:{name.strip('_').lower()}"
    group.rank, group.local_rank, group.device_index = rank, 0, 0
    group.ranks, group.world_size, group.rank_in_group = ranks, len(ranks), ranks.index(rank)
    group.group_ranks = [ranks]
    group.cpu_group = group.device_group = Members(len(ranks), ranks.index(rank))
    group.device_communicator = group.mq_broadcaster = None
    group.use_device_communicator = group.use_custom_op_call = group.use_cpu_custom_send_recv = False
    group.device = torch.device("cpu")
    return group


def build_on_meta(vllm_config: Any) -> nn.Module:
    """vLLM's model of `vllm_config` with every tensor on the meta device, except the small integer tables loaders read."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    previous = torch.get_default_dtype()
    # vLLM shares rotary tables between all models of a process; an engine built later must not find tables on meta.
    shared, tables = dict(rotary_embedding._ROPE_DICT), rotary_embedding._ROPE_DICT
    tables.clear()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        try:
            with torch.device("meta"), _TablesOnHost(), _any_kernel():
                model: nn.Module = initialize_model(vllm_config)
        except (NotImplementedError, RuntimeError):
            # Some models compute with constants while they are built: then only what is large has no storage.
            tables.clear()
            vllm_config.compilation_config.static_forward_context.clear()
            with LargeOnMeta(LARGE), _any_kernel():
                model = initialize_model(vllm_config)
    finally:
        torch.set_default_dtype(previous)
        tables.clear()
        tables.update(shared)
    return model


@contextmanager
def _any_kernel() -> Iterator[None]:
    """Within the context a machine builds experts that it has no kernel for. No kernel runs on a model that is planned with, and
    the parameters are the same.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    check, choose = FusedMoEConfig.__post_init__, method.select_unquantized_moe_backend

    def checked(config: Any) -> None:
        # The last of vLLM's checks asks whether this platform has experts without a gate.
        try:
            check(config)
        except NotImplementedError as error:
            if "is_act_and_mul" not in str(error):
                raise

    def chosen(*arguments: Any, **named: Any) -> Any:
        try:
            return choose(*arguments, **named)
        except NotImplementedError:
            return UnquantizedMoeBackend.CPU, None

    with ExitStack() as stack:
        swap(stack, FusedMoEConfig, "__post_init__", checked)
        swap(stack, method, "select_unquantized_moe_backend", chosen)
        yield


class _TablesOnHost(TorchFunctionMode):
    """Under the meta device, keeps small integer tensors real: expert maps are read by loaders, value by value."""

    FACTORIES = frozenset({torch.full, torch.zeros, torch.ones, torch.empty, torch.arange, torch.tensor})
    INTEGERS = frozenset({torch.int32, torch.int64})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES and kwargs.get("dtype") in self.INTEGERS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)
