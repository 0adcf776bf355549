"""What every rank of a trainer would hold, from a recipe: no GPU, no weights, no process but this one.

The model of each pipeline stage is Megatron's own, built once on the meta device, and its parameters go through the same source
map that a live trainer makes. Ranks of one stage hold tensors of equal shapes; they differ in their numbers within the
parallel groups, which the bridge's mappings ask for, so a rank is played by telling them its numbers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from megatron_sender import local_spec
from megatron_sender.config import Parallelism, Recipe
from megatron_sender.local_hybrid import hybrid_modules, hybrid_spec
from megatron_sender.one_period import KNOWN
from megatron_sender.source import SourceMap, source_map
from megatron_sender.without_cuda import stand_in_for_transformer_engine, without_cuda
from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.stand_ins import Members, quiet
from vllm_refit_ext.kernels.meta import LargeOnMeta

LARGE = 1 << 12
"""Elements from which a new tensor has no storage. Smaller ones may be tables that are computed with."""


@dataclass(frozen=True)
class Place:
    """A rank's numbers in its groups, in Megatron's order: tp fastest, then cp, dp, pp; for experts etp, ep, their dp, pp."""

    pp: int
    tp: int
    ep: int
    etp: int


@dataclass(frozen=True)
class Offered:
    """What all ranks of a trainer hold."""

    manifest: Manifest
    sources: Placements


def place_of(rank: int, world_size: int, p: Parallelism) -> Place:
    """The numbers of `rank`."""
    stage, within = divmod(rank, world_size // p.pp)
    return Place(stage, within % p.tp, within // p.etp % p.ep, within % p.etp)


def trainer_placements(recipe: Recipe) -> Offered:
    """The manifest and the sources of all ranks of the recipe's trainer.

    Needs Megatron-Core and Megatron-Bridge; where Transformer Engine or mamba_ssm is missing, Megatron's own layers and
    stand-ins that hold the same parameters. Must run where torch.distributed is not initialised. Raises ConfigError.
    """
    p, world = recipe.trainer.parallelism, recipe.trainer.world_size
    known: dict[Place, SourceMap] = {}
    tables: list[Placements] = []
    local = _is_local()
    with _megatron(local):
        for stage in range(p.pp):
            ranks = range(stage * (world // p.pp), (stage + 1) * (world // p.pp))
            with _fake_groups(ranks[0], world):
                bridge, chunks = _build(recipe, local)
                for rank in ranks:
                    place = place_of(rank, world, p)
                    if place not in known:
                        with _played(chunks, place, p):
                            known[place] = source_map(chunks, bridge, rank=rank)
                    tables.append(known[place].placements.as_rank(rank))
    return Offered(_manifest(known), concatenate(tables))


def with_defaults(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """The recipe with what its model's configuration leaves unsaid about layers, as transformers fills it in."""
    import transformers

    fields = dict(recipe.model.hf_config)  # type: ignore[arg-type]
    try:
        filled = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # noqa: BLE001 - a configuration's own checks raise whatever they like
        got = " ".join(str(error).split())[:300]
        return recipe, [Problem("transformers refuses this configuration", "model.hf_config", f"{type(error).__name__}: {got}")]
    known = {name: getattr(filled, name) for name in sorted(KNOWN) if getattr(filled, name, None) is not None}
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, hf_config={**known, **fields})), []


def _manifest(known: Mapping[Place, SourceMap]) -> Manifest:
    tensors: dict[str, TensorSpec] = {}
    aliases: dict[str, str] = {}
    problems = []
    for place, found in known.items():
        aliases |= found.aliases
        for name, (shape, dtype) in found.manifest.items():
            spec = TensorSpec(shape, dtype)
            if tensors.setdefault(name, spec) != spec:
                problems.append(Problem("stages disagree on it", f"tensor {name!r}, {place}", str(spec), str(tensors[name])))
    if problems:
        raise ConfigError.of(problems)
    return Manifest(tensors, {a: n for a, n in aliases.items() if a not in tensors and n in tensors})


def _is_local() -> bool:
    """Whether Megatron's own layers are planned with, because Transformer Engine's can't be built here."""
    return importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available()


@contextlib.contextmanager
def _megatron(local: bool) -> Iterator[None]:
    """Megatron imported, silent, and without a trace for the next trainer that is planned in this process."""
    before = set(os.environ)
    # The bridge prints what it makes of each mapping.
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        if local:
            stand_in_for_transformer_engine()
        with without_cuda() if local else contextlib.nullcontext():
            import megatron.bridge  # noqa: F401
        if local:
            local_spec.use_local_prediction_layers()
        try:
            yield
        finally:
            # A model chooses its attention by these, and the next one is refused where they don't suit it.
            for name in [n for n in os.environ if n.startswith("NVTE_") and n not in before]:
                del os.environ[name]


@contextlib.contextmanager
def _building(local: bool) -> Iterator[None]:
    """What modules are built on. It is left before they are looked at: it sees every call of torch."""
    with contextlib.ExitStack() as stack:
        if local:
            stack.enter_context(without_cuda())
            stack.enter_context(hybrid_modules())
        yield


def _build(recipe: Recipe, local: bool) -> tuple[Any, list[Any]]:
    """The bridge and this rank's model chunks, without storage."""
    import transformers
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module

    fields = dict(recipe.model.hf_config) if isinstance(recipe.model.hf_config, Mapping) else {}
    p = recipe.trainer.parallelism
    dtype = getattr(torch, recipe.trainer.dtype)
    try:
        config = transformers.AutoConfig.for_model(**fields)
        bridge = AutoBridge.from_hf_config(config)
        provider = bridge.to_megatron_provider(load_weights=False)
    except (KeyError, NotImplementedError, TypeError, ValueError) as error:
        got, do = str(error)[:300], "name a model that transformers and Megatron-Bridge both know"
        raise ConfigError("Megatron-Bridge has no mapping for this model", where="model.hf_config", got=got, do=do) from error
    settings = {
        **(_local_settings(provider) if local else {}),
        "tensor_model_parallel_size": p.tp,
        "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp,
        "expert_model_parallel_size": p.ep,
        "expert_tensor_parallel_size": p.etp,
        # Ranks of a context parallel group hold equal weights, and Megatron's own attention is built for one rank alone.
        "context_parallel_size": 1 if local else p.cp,
        "sequence_parallel": p.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": recipe.trainer.dtype == "bfloat16",
        "fp16": recipe.trainer.dtype == "float16",
        "perform_initialization": False,
        "use_cpu_initialization": True,
        "num_layers_in_first_pipeline_stage": p.first_stage_layers,
        "num_layers_in_last_pipeline_stage": p.last_stage_layers,
        "pipeline_model_parallel_layout": p.pipeline_layout,
        "account_for_embedding_in_pipeline_split": p.embedding_counts_as_layer,
        "account_for_loss_in_pipeline_split": p.loss_counts_as_layer,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    try:
        with _building(local), LargeOnMeta(LARGE, placed=True):
            provider.finalize()
            provider.initialize_model_parallel(seed=1)
            provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
            chunks = [provider.provide(vp_stage=i if p.vpp else None) for i in range(p.vpp or 1)]
    except ImportError as error:
        do = "install what Megatron asks for; no GPU is needed to plan"
        raise ConfigError("Megatron can't build this model here", where="model", got=str(error)[:300], do=do) from None
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError("Megatron refuses to build this trainer", where="trainer.parallelism", got=str(error)[:300]) from error
    if dtype != torch.float32:
        for chunk in chunks:
            Float16Module(provider, chunk)  # casts in place what a trainer's wrapper casts; the wrapper itself is not needed
    return bridge, chunks


def _local_settings(provider: Any) -> dict[str, Any]:
    settings = local_spec.plain_settings(provider)
    if hasattr(provider, "hybrid_stack_spec"):
        settings |= {"hybrid_stack_spec": hybrid_spec, "transformer_layer_spec": None}
    return {name: value for name, value in settings.items() if hasattr(provider, name)}


@contextlib.contextmanager
def _fake_groups(rank: int, world_size: int) -> Iterator[None]:
    """torch.distributed as `rank` of `world_size`, with groups that know their members and send nothing."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("a trainer can't be planned inside another", where="torch.distributed", got="initialised")
    real = dist.new_group

    def fake(*arguments: Any, **named: Any) -> Any:
        return real(*arguments, **(named | {"backend": "fake"}))

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    dist.new_group = fake
    try:
        yield
    finally:
        dist.new_group = real
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _Groups:
    """The groups of one rank, as Megatron's ProcessGroupCollection names them."""

    def __init__(self, place: Place, p: Parallelism) -> None:
        self.tp, self.pp = Members(p.tp, place.tp), Members(p.pp, place.pp)
        self.ep, self.expt_tp = Members(p.ep, place.ep), Members(p.etp, place.etp)


@contextlib.contextmanager
def _played(chunks: list[Any], place: Place, p: Parallelism) -> Iterator[None]:
    """Within the context the chunks say that they are those of the rank at `place`."""
    owners = [getattr(chunk, "language_model", chunk) for chunk in chunks]
    before = [owner.pg_collection for owner in owners]
    for owner in owners:
        owner.pg_collection = _Groups(place, p)
    try:
        yield
    finally:
        for owner, groups in zip(owners, before, strict=True):
            owner.pg_collection = groups
