"""A real MXFP8 engine on a CPU: parameters as GPUs hold them (E4M3 values, uint8 scales), multiplied by vLLM's own software
emulation.

vLLM keeps its emulation for GPUs. Here its linear kernel is allowed on a CPU, and its emulated experts get a loop in place of
Triton. Works for online `quantization="mxfp8"` and for ModelOpt and compressed-tensors MXFP8 checkpoints. Pass
`worker_extension_cls="tests.support.mxfp8_cpu.Mxfp8CpuExtension"`. Layers without quantisation keep plain layouts, as in
`plain_cpu`.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0")

import torch
import vllm.model_executor.kernels.linear as linear_kernels
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.layers.fused_moe.experts.mxfp8_emulation_moe import Mxfp8EmulationTritonExperts
from vllm.model_executor.layers.fused_moe.oracle import mxfp8 as oracle
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from tests.support import plain_cpu


class CpuMxfp8Experts(Mxfp8EmulationTritonExperts):  # type: ignore[misc]
    """vLLM's emulated MXFP8 experts with the multiplication of `plain_cpu.run_experts`."""

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, None]:
        """Supported on a CPU."""
        return current_platform.is_cpu(), None

    def apply(
        self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *rest: Any, **named: Any
    ) -> None:
        """Dequantise both weights, then run the experts one by one."""
        arguments = dict(zip(plain_cpu.APPLY, rest, strict=False)) | named
        if w1.element_size() == 1:
            w1, w2 = dequant_mxfp8_to_bf16(w1, self.w1_scale_val), dequant_mxfp8_to_bf16(w2, self.w2_scale_val)
        kind = hidden_states.dtype
        weights, ids, expert_map = arguments["topk_weights"], arguments["topk_ids"], arguments.get("expert_map")
        plain_cpu.run_experts(output, hidden_states, w1.to(kind), w2.to(kind), weights, ids, expert_map)

    def workspace_shapes(self, M: int, N: int, K: int, *rest: Any, **named: Any) -> tuple[Any, ...]:  # noqa: N803
        """No workspace; the output is [tokens, hidden]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """`apply` has weighted and summed already."""
        return TopKWeightAndReduceNoOP()


def allow_emulation() -> None:
    """Patch this process's vLLM. Idempotent."""
    linear_kernels._POSSIBLE_MXFP8_KERNELS.setdefault(PlatformEnum.CPU, [EmulationMxfp8LinearKernel])
    native = oracle._mxfp8_backend_to_kernel_cls
    if getattr(native, "_on_cpu", False):
        return

    def kernels(backend: Any) -> list[Any]:
        if current_platform.is_cpu():
            return [CpuMxfp8Experts] if backend == Fp8MoeBackend.EMULATION else []
        found: list[Any] = native(backend)
        return found

    kernels._on_cpu = True  # type: ignore[attr-defined]
    oracle._mxfp8_backend_to_kernel_cls = kernels


allow_emulation()


class Mxfp8CpuExtension(plain_cpu.PlainCpuExtension):
    """The product's extension on a CPU engine with MXFP8 parameters."""
