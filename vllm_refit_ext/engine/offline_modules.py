"""What a worker of an engine that does not exist yet holds, and which of its modules vLLM would quantise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_refit_ext.engine.offline import as_worker, build_on_meta, engine_config


@dataclass(frozen=True)
class Module:
    """A module that vLLM may quantise. name: as vLLM looks it up in an ignore list. path: in the model. k: lengths of its
    matrices along K on this rank, which share MXFP8 scales by blocks. elements: of its matrices on this rank.
    """

    name: str
    path: str
    k: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class WorkerModules:
    """modules: what vLLM may quantise. parameters: the shape of every parameter of this worker, by its name in the model."""

    modules: list[Module]
    parameters: dict[str, tuple[int, ...]]
    _asked: Any

    def ignored(self, patterns: Sequence[str], names: Iterable[str]) -> dict[str, bool | None]:
        """Whether vLLM leaves each of `names` unquantised under ModelOpt's ignore list `patterns`; None where it refuses, because
        the module joins parts of which only some are named.
        """
        config = type(self._asked)(True, None, list(patterns))
        config.packed_modules_mapping = self._asked.packed_modules_mapping
        if self._asked.mapper is not None:
            config.apply_vllm_mapper(self._asked.mapper)
        found: dict[str, bool | None] = {}
        for name in names:
            try:
                found[name] = bool(config.is_layer_excluded(name))
            except ValueError:
                found[name] = None
        return found


def worker_modules(
    hf_config: Any, *, tp: int = 1, ep: bool = False, pp: int = 1, dp: int = 1, rank: int = 0, dtype: str = "bfloat16"
) -> WorkerModules:
    """The modules of one worker, from vLLM's model on tensors without storage. Arguments as for `engine_routes`."""
    with engine_config(hf_config, tp=tp, ep=ep, pp=pp, dtype=dtype) as config, as_worker(config, rank, dp):
        asked = config.quant_config = _asking()(True, None, [])
        model = build_on_meta(config)
    paths = {id(module): path for path, module in model.named_modules()}
    modules = []
    for name, layer in asked.layers.items():
        matrices = [p for p in layer.parameters() if p.ndim >= 2]
        k = tuple(dict.fromkeys(p.shape[-1] for p in matrices))
        if matrices and id(layer) in paths:
            modules.append(Module(name, paths[id(layer)], k, sum(p.numel() for p in matrices)))
    return WorkerModules(modules, {name: tuple(p.shape) for name, p in model.named_parameters()}, asked)


def _asking() -> type[Any]:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    class Asking(ModelOptMxFp8Config):  # type: ignore[misc]
        """Notes which modules vLLM asks about while it builds a model, and quantises none: parameters are as without it."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.layers: dict[str, Any] = {}
            self.mapper: Any = None

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.mapper = hf_to_vllm_mapper
            super().apply_vllm_mapper(hf_to_vllm_mapper)

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if isinstance(layer, LinearBase | ParallelLMHead | RoutedExperts):
                self.layers[prefix] = layer
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    return Asking
