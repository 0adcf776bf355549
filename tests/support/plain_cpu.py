"""A CPU engine that keeps the plain weight layouts GPUs use, so that in-place writes and expert parallelism run without one.

Stock CPU kernels pack every linear into an opaque handle and the experts into a blocked form, and their expert kernel ignores
the expert map. Pass `worker_extension_cls="tests.support.plain_cpu.PlainCpuExtension"`: the patches are in place before
the model is built, because vLLM imports the extension first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
import vllm.model_executor.layers.utils as layer_utils
from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from vllm_refit_ext import RefitWorkerExtension
from vllm_refit_ext.engine import live_layout
from vllm_refit_ext.receiver.writers import PLAIN

APPLY = ("topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map")
"""What vLLM hands to an experts' `apply` behind the weights, in order."""


def _silu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


def _gelu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return functional.gelu(gate) * up


def _swigluoai(both: torch.Tensor) -> torch.Tensor:
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "swigluoai": _swigluoai, "relu2_no_mul": lambda x: functional.relu(x).square()}
"""What experts do between their two products, from w13's output."""


def run_experts(
    output: torch.Tensor,
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str = "silu",
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> None:
    """Experts, one after the other, summed in float32 into `output` [tokens, hidden].

    `activation`: as vLLM names it, of `ACTIVATIONS`. `biases`: of w13 [local experts, 2 * inner] and w2 [local experts, hidden].
    `w13` [local experts, 2 * inner, hidden], `w2` [local experts, hidden, inner], `weights` and `ids` [tokens, k];
    `expert_map` gives the local number of a global expert, or -1 where another rank has it.
    """
    if expert_map is not None:
        ids = expert_map[ids.long()]
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if token.numel():
            bias13, bias2 = (None if b is None else b[expert] for b in biases)
            inner = ACTIVATIONS[activation](functional.linear(hidden[token], w13[expert], bias13))
            down = functional.linear(inner, w2[expert], bias2)
            total.index_add_(0, token, down.float() * weights[token, slot, None].float())
    output.copy_(total)


def _no_packing(self: Any, layer: torch.nn.Module) -> None:
    self._use_zentorch = False


def _apply(
    self: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *rest: Any, **named: Any
) -> None:
    arguments = dict(zip(APPLY, rest, strict=False)) | named
    run_experts(
        output,
        hidden_states,
        w1,
        w2,
        arguments["topk_weights"],
        arguments["topk_ids"],
        arguments.get("expert_map"),
        arguments["activation"].value,
        (self.w1_bias, self.w2_bias),
    )


_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
_experts = cpu_moe.CPUUnquantizedExperts
_stock = (
    ops._supports_onednn,
    layer_utils.check_cpu_sgl_kernel,
    _experts.process_weights_after_loading,
    _experts.apply,
    {method: live_layout.KNOWN[method] for method in _METHODS},
)


def keep_plain_layouts() -> None:
    """Patch this process's vLLM: linears stay `weight [out, in]`, experts stay `w13 [E, 2I, H]` and `w2 [E, H, I]`."""
    ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    _experts.process_weights_after_loading, _experts.apply = _no_packing, _apply
    live_layout.KNOWN.update({method: lambda module, view: (PLAIN, "") for method in _METHODS})


def pack_again() -> None:
    """Undo `keep_plain_layouts`, for the next stock engine of this process."""
    ops._supports_onednn, layer_utils.check_cpu_sgl_kernel = _stock[:2]
    _experts.process_weights_after_loading, _experts.apply = _stock[2:4]
    live_layout.KNOWN.update(_stock[4])


keep_plain_layouts()


class PlainCpuExtension(RefitWorkerExtension):  # type: ignore[misc]
    """The product's extension on a CPU engine with plain layouts."""

    def make_intermediate_tensors(self) -> None:
        """Make what later pipeline stages receive into. vLLM makes it in a dummy run that a CPU worker never does."""
        runner: Any = self.model_runner
        if getattr(runner, "intermediate_tensors", 1) is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
