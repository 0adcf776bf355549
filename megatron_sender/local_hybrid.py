"""Megatron's hybrid stack (Mamba, attention, experts) where Transformer Engine and mamba_ssm are missing: for planning only.

Megatron builds such a stack with modules of both packages alone, and mamba_ssm can't be built without a CUDA compiler. What
stands in for them here has their parameters, by name, shape and cut, and can't be run: a plan needs no more.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.core.stand_ins import swap


class PlannedOnly(torch.nn.Module):
    """Holds parameters and refuses to compute."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError("this module was built to plan with and can't compute", where=type(self).__name__)


class GatedNorm(PlannedOnly):
    """Stands for mamba_ssm's gated RMS norm: one weight of this rank's inner size."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype | None = None, **settings: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))


class WholeLinear(PlannedOnly):
    """Stands for Transformer Engine's linear in mode `duplicated`: every rank of a tensor parallel group holds all of it."""

    tensor_model_parallel = False

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, parallel_mode: str, bias: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated":
            raise ConfigError("a split linear of Transformer Engine is needed", where="parallel_mode", got=parallel_mode)
        self.weight = torch.nn.Parameter(torch.empty((output_size, input_size), dtype=config.params_dtype))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty((output_size,), dtype=config.params_dtype))


def _norm_and_linear() -> type:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class LayerNormColumnParallelLinear(PlannedOnly, ColumnParallelLinear):  # type: ignore[misc]
        """Stands for Transformer Engine's fused one, whose names the bridge maps in every layer; it goes by its name."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
            super().__init__(input_size, output_size, config=config, **settings)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    return LayerNormColumnParallelLinear


def hybrid_spec(config: Any) -> Any:
    """The stack of a hybrid model, for a bridge's provider `config`: Megatron's own local one, with norms that exist here."""
    from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stack = copy.deepcopy(get_hybrid_stack_modelopt_spec(local_core_attention=True))
    parts, fused = stack.submodules, _norm_and_linear()
    parts.mamba_layer.submodules.norm = IdentityOp
    parts.mamba_layer.submodules.mixer.submodules.in_proj = fused
    parts.attention_layer.submodules.input_layernorm = IdentityOp
    parts.attention_layer.submodules.self_attention.submodules.linear_qkv = fused
    parts.mlp_layer.submodules.pre_mlp_layernorm = parts.moe_layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    for layer in parts.mtp_block_spec.submodules.layer_specs:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = WrappedTorchNorm
    return stack


@contextlib.contextmanager
def hybrid_modules() -> Iterator[None]:
    """Within the context hybrid stacks are built without Transformer Engine and mamba_ssm, whichever of them is missing."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    with contextlib.ExitStack() as stack:
        if not mamba_mixer.HAVE_MAMBA_SSM:
            swap(stack, mamba_mixer, "HAVE_MAMBA_SSM", True)
            swap(stack, mamba_mixer, "ExtendedRMSNorm", GatedNorm)
        if not HAVE_TE:
            swap(stack, hybrid_block, "TENorm", WrappedTorchNorm)
            swap(stack, moe_layer, "HAVE_TE", True)
            swap(stack, moe_layer, "TELinear", WholeLinear)
        yield
