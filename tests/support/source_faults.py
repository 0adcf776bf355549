"""Ranks that break a real Megatron model, or its bridge, in one way each, and report what the source map says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from examples.support.tiny_model import build_megatron, quiet
from megatron_sender.source import SourceMap, source_map
from vllm_refit_ext.core.errors import RefitError

Model = tuple[Any, list[Any]]


def run_faults(folder: str, names: list[str]) -> list[str]:
    """What each named fault of this module gives: the error's text, or what the function returns."""
    return [_said(globals()[name], folder) for name in names]


def _said(fault: Callable[[Model], Any], folder: str) -> str:
    try:
        return str(fault(build_megatron(folder, tp=torch.distributed.get_world_size())))
    except RefitError as error:
        return f"{type(error).__name__}: {error}"


def _with_mappings(bridge: Any, change: Callable[[list[Any]], list[Any]]) -> None:
    """Let the model's own bridge offer other mappings, as a user's bridge would."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    kind = type(bridge._model_bridge)
    real = kind.mapping_registry
    kind.mapping_registry = lambda self: MegatronMappingRegistry(*change(list(real(self).mappings)))


def _replaced(ending: str, make: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda mappings: [make(m) if m.megatron_param.endswith(ending) else m for m in mappings]


def unknown_mapping_class(model: Model) -> Any:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    class HalvingMapping(AutoMapping):
        def megatron_to_hf(self, megatron_weights: Any, megatron_module: Any) -> Any:
            return {name: weight / 2 for name, weight in super().megatron_to_hf(megatron_weights, megatron_module).items()}

    bridge, chunks = model
    _with_mappings(bridge, _replaced("linear_proj.weight", lambda m: HalvingMapping(m.megatron_param, m.hf_param)))
    return source_map(chunks, bridge)


def computed_mapping_class(model: Model) -> Any:
    from megatron.bridge.models.conversion.param_mapping import RMSNorm2ZeroCenteredRMSNormMapping as Computed

    bridge, chunks = model
    _with_mappings(bridge, _replaced("final_layernorm.weight", lambda m: Computed(m.megatron_param, m.hf_param)))
    return source_map(chunks, bridge)


def no_mapping(model: Model) -> Any:
    bridge, chunks = model
    _with_mappings(bridge, lambda mappings: [m for m in mappings if "router" not in m.megatron_param])
    return source_map(chunks, bridge)


def new_parameter_and_buffer(model: Model) -> Any:
    bridge, chunks = model
    chunks[0].decoder.extra = torch.nn.Parameter(torch.zeros(3))
    chunks[0].decoder.register_buffer("table", torch.zeros(3))
    chunks[0].decoder.register_buffer("scratch", torch.zeros(3), persistent=False)
    return source_map(chunks, bridge)


def replicated_by_mistake(model: Model) -> Any:
    from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping

    bridge, chunks = model
    _with_mappings(bridge, _replaced("linear_proj.weight", lambda m: ReplicatedMapping(m.megatron_param, m.hf_param)))
    return source_map(chunks, bridge)


def name_not_in_checkpoint(model: Model) -> Any:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    bridge, chunks = model
    _with_mappings(bridge, _replaced("final_layernorm.weight", lambda m: AutoMapping(m.megatron_param, "model.nrom.weight")))
    return source_map(chunks, bridge)


def other_shape_than_checkpoint(model: Model) -> Any:
    bridge, chunks = model
    layer = chunks[0].decoder.layers[0]
    layer.pre_mlp_layernorm.weight = torch.nn.Parameter(torch.ones(64))
    layer.self_attention.linear_qkv.weight = torch.nn.Parameter(torch.ones(48, 128))
    return source_map(chunks, bridge)


def quantised_and_strided(model: Model) -> Any:
    bridge, chunks = model
    attention = chunks[0].decoder.layers[0].self_attention
    quantised = attention.linear_proj.weight.detach().to(torch.float8_e4m3fn)
    attention.linear_proj.weight = torch.nn.Parameter(quantised, requires_grad=False)
    qkv = attention.linear_qkv.weight
    attention.linear_qkv.weight = torch.nn.Parameter(torch.zeros(qkv.shape[1], qkv.shape[0]).t())
    return source_map(chunks, bridge)


def adapter(model: Model) -> Any:
    bridge, chunks = model
    chunks[0].decoder.layers[0].self_attention.linear_proj.adapter = torch.nn.Linear(2, 2)
    return source_map(chunks, bridge)


def export_that_computes(model: Model) -> Any:
    bridge, chunks = model
    kind = type(bridge._model_bridge)
    kind.maybe_modify_converted_hf_weight = lambda self, task, weights, state: {name: w * 2 for name, w in weights.items()}
    return source_map(chunks, bridge)


def two_parameters_for_one_name(model: Model) -> Any:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    bridge, chunks = model
    name = "model.layers.*.self_attn.q_norm.weight"
    _with_mappings(bridge, _replaced("k_layernorm.weight", lambda m: AutoMapping(m.megatron_param, name)))
    return source_map(chunks, bridge)


def no_chunks(model: Model) -> Any:
    return source_map([], model[0])


def moved(model: Model) -> Any:
    mapped, weight = _mapped(model)
    weight.data = weight.data.clone()
    mapped.check_live()


def moved_then_refreshed(model: Model) -> Any:
    mapped, weight = _mapped(model)
    weight.data = weight.data.clone() + 1
    names = mapped.refresh()
    mapped.check_live()
    i = [buffer.name for buffer in mapped.placements.buffers].index(names[0])
    return names, torch.equal(mapped.tensors[i], weight), mapped.tensors[i].data_ptr() == weight.data_ptr()


def replaced_parameter(model: Model) -> Any:
    mapped, weight = _mapped(model)
    model[1][0].decoder.final_layernorm.weight = torch.nn.Parameter(weight.detach().clone())
    mapped.check_live()


def given_back(model: Model) -> Any:
    mapped, weight = _mapped(model)
    weight.untyped_storage().resize_(0)
    mapped.check_live()


def cast(model: Model) -> Any:
    mapped, weight = _mapped(model)
    weight.data = weight.data.to(torch.bfloat16)
    mapped.refresh()


def _mapped(model: Model) -> tuple[SourceMap, torch.nn.Parameter]:
    bridge, chunks = model
    mapped = source_map(chunks, bridge)
    mapped.check_live()
    return mapped, chunks[0].decoder.final_layernorm.weight


def one_module_and_a_given_rank(model: Model) -> Any:
    bridge, chunks = model
    mapped = source_map(chunks[0], bridge, rank=5)
    return {buffer.rank for buffer in mapped.placements.buffers}, len(mapped.manifest)


def without_a_checkpoint(model: Model) -> Any:
    """Shapes derived from the model's numbers alone, against those of the checkpoint."""
    from megatron.bridge import AutoBridge

    bridge, chunks = model
    with quiet():
        bare = AutoBridge.from_hf_config(bridge.hf_pretrained.config)
    mapped = source_map(chunks, bare)
    return mapped.manifest == source_map(chunks, bridge).manifest, mapped.checkpoint_names


def cast_router_bias(model: Model) -> Any:
    """A wrapper that casts the router's bias, as mixed precision does until the first forward pass."""
    bridge, chunks = model
    chunks[0].bfloat16()
    mapped = source_map(chunks, bridge)
    return {dtype for name, (_, dtype) in mapped.manifest.items() if "e_score" in name}, {
        dtype for name, (_, dtype) in mapped.manifest.items() if "e_score" not in name
    }
