"""What Megatron-Bridge and Megatron's own modules say about the tensors a trainer rank holds: names, mappings, the checkpoint.

Only names, shapes and mapping objects are taken from the bridge, anew at each call. Its conversion tasks are not used: they
keep state of earlier collectives, which is wrong after weights were moved.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_refit_ext.core.errors import ConfigError, Problem

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY = (EMBEDDING, OUTPUT, "output_layer.bias")
"""Endings of names whose rows are the vocabulary, which Megatron pads."""

EXPORT_STEPS = ("maybe_modify_converted_hf_weight", "stream_weights_megatron_to_hf", "build_conversion_tasks")
HARMLESS_EXPORT_STEPS = frozenset(
    {
        # Both copy the rotary table of old checkpoints, which is neither trained nor loaded by an engine.
        "megatron.bridge.models.llama.llama_bridge.LlamaBridge.maybe_modify_converted_hf_weight",
        "megatron.bridge.models.deepseek.deepseek_v3_bridge.DeepSeekV3Bridge.maybe_modify_converted_hf_weight",
    }
)
"""Steps of a model's own bridge that change nothing of what is trained. Any other step might compute."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model chunk that is sent.

    `name` is Megatron's global name (true layer and expert numbers), `module` and `attribute` say where it lives now, `mapping`
    is the bridge's with resolved names, `config` that of the module.
    """

    chunk: int
    name: str
    module: Any
    attribute: str
    mapping: Any
    config: Any

    @property
    def label(self) -> str:
        return f"chunk{self.chunk}.{self.name}"

    @property
    def tensor(self) -> torch.Tensor:
        """The live tensor: Megatron may have put another in its place since."""
        tensor: torch.Tensor = getattr(self.module, self.attribute)
        return tensor


class Checkpoint:
    """Names and shapes of the Hugging Face checkpoint behind a bridge. Reads headers, never weights."""

    def __init__(self, pretrained: Any) -> None:
        config = getattr(pretrained, "config", pretrained)
        text = getattr(config, "text_config", None) or config
        self.vocabulary: int | None = getattr(text, "vocab_size", None)
        self._source: Any = getattr(getattr(pretrained, "state", None), "source", None)
        self.names: frozenset[str] | None = frozenset(self._source.get_all_keys()) if self._source is not None else None
        """None when the bridge was made from a configuration alone."""
        self._files: dict[str, Any] = {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of tensor `name`, or None where it is unknown or the stored elements are packed."""
        if self.names is None or name not in self.names:
            return None
        if not hasattr(self._source, "key_to_filename_map"):
            return tuple(self._source[name].shape)
        entry = self._slice(self._source.key_to_filename_map[name], name)
        # Integer checkpoints pack several weights into an element, so their shapes are not those of the weights.
        return tuple(entry.get_shape()) if str(entry.get_dtype()).startswith(("F", "BF")) else None

    def _slice(self, file: str, name: str) -> Any:
        from safetensors import safe_open

        if file not in self._files:
            self._files[file] = safe_open(Path(self._source.path) / file, framework="pt", device="cpu")
        return self._files[file].get_slice(name)


class BridgeView:
    """The bridge's mapping registry and checkpoint, for one set of model chunks.

    Raises ConfigError when the model's own bridge changes weights after its mappings, which no table of moves can follow.
    """

    def __init__(self, bridge: Any, chunks: list[Any]) -> None:
        from megatron.bridge.models.conversion import model_bridge
        from megatron.core.utils import unwrap_model

        self.chunks = [unwrap_model(chunk) for chunk in chunks]
        self.checkpoint = Checkpoint(bridge.hf_pretrained)
        self._bridge = bridge._model_bridge
        self._bridge.hf_pretrained = bridge.hf_pretrained
        self._bridge.hf_config = getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)
        self._check_export_steps(model_bridge.MegatronModelBridge)
        self._registry = self._bridge.mapping_registry()
        self._registry.set_process_groups_from_pg_collection(model_bridge._get_pg_collection_from_model(self.chunks))
        self.tied = bool(self._bridge._share_embeddings_and_output_weights(self.chunks[0].config))

    def _check_export_steps(self, base: type) -> None:
        problems = []
        for step in EXPORT_STEPS:
            own = getattr(type(self._bridge), step)
            path = f"{own.__module__}.{own.__qualname__}"
            if own is not getattr(base, step) and path not in HARMLESS_EXPORT_STEPS:
                problems.append(
                    Problem(
                        "changes weights after the mappings made them, so its export is not a table of moves",
                        where=path,
                        do="Send this model through the bridge's export instead.",
                    )
                )
        if problems:
            raise ConfigError.of(problems)

    def items(self) -> tuple[list[ModelTensor], list[Problem]]:
        """Every parameter and persistent buffer of the chunks that is sent, and the problems with the others."""
        items: list[ModelTensor] = []
        problems: list[Problem] = []
        for chunk, model in enumerate(self.chunks):
            for local in _names(model):
                name = self._global_name(local, chunk)
                path, _, attribute = local.rpartition(".")
                module = model.get_submodule(path)
                problem = self._reason_against(name)
                mapping = None if problem else self._lookup(name)
                if problem is None and mapping is None:
                    problem = Problem(
                        "the bridge has no mapping for it",
                        where=f"chunk{chunk}.{name}",
                        do="Add one to the mapping registry of the model's bridge, or drop the tensor from the model.",
                    )
                if problem is not None:
                    problems.append(problem)
                    continue
                items.append(
                    ModelTensor(chunk, name, module, attribute, mapping, getattr(module, "config", None) or model.config)
                )
        return items, problems

    def aliases(self, items: list[ModelTensor]) -> dict[str, str]:
        """Names of tied tensors -> the name that is sent. Empty when the model ties nothing."""
        if not self.tied:
            return {}
        out: dict[str, str] = {}
        prefixes = {h.name.removesuffix(end) for h in items for end in (EMBEDDING, OUTPUT) if h.name.endswith(end)} | {""}
        for prefix in sorted(prefixes):
            embedding, output = (self._registry.megatron_to_hf_lookup(prefix + end) for end in (EMBEDDING, OUTPUT))
            if embedding is not None and output is not None and embedding.hf_param != output.hf_param:
                out[str(output.hf_param)] = str(embedding.hf_param)
        return out

    def _lookup(self, name: str) -> Any:
        # A tied output layer of the last pipeline stage is the embedding, held once more.
        if self.tied and name.endswith(OUTPUT):
            name = name.removesuffix(OUTPUT) + EMBEDDING
        return self._registry.megatron_to_hf_lookup(name)

    def _global_name(self, local: str, chunk: int) -> str:
        """The name with layer and expert numbers of the whole model, which the modules themselves know."""
        from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global

        return str(_megatron_local_name_to_global(self.chunks, self.chunks[chunk].config, local, chunk))

    def _reason_against(self, name: str) -> Problem | None:
        if ".adapter." in name or ".to_wrap." in name:
            return Problem(
                "it belongs to an adapter, and adapters are merged by computation",
                where=name,
                do="Merge the adapters into the base weights before the source map is made.",
            )
        return None


@contextlib.contextmanager
def known_missing(package: str) -> Iterator[None]:
    """Within the context an import of `package`, where it is not installed, fails without looking for it once more.

    The bridge tries to import ModelOpt for every tensor that it looks at, and a failed search takes longer than all the rest.
    """
    absent = package not in sys.modules and importlib.util.find_spec(package) is None
    if absent:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if absent:
            sys.modules.pop(package, None)


def _names(model: torch.nn.Module) -> Iterator[str]:
    """Names of parameters and persistent buffers. Transformer Engine's `_extra_state` is no weight."""
    from megatron.bridge.models.conversion.utils import persistent_buffers

    for name, _ in model.named_parameters():
        yield name
    for name, _ in persistent_buffers(model):
        if "_extra_state" not in name:
            yield name
