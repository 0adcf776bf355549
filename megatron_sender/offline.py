"""What every rank of a trainer would hold, from a recipe: no GPU, no weights, no process but this one.

The model of each pipeline stage is Megatron's own, built once on the meta device, and its parameters go through the same source
map that a live trainer makes. Ranks of one stage hold tensors of equal shapes; they differ in their numbers within the
parallel groups, which the bridge's mappings ask for, so a rank is played by telling them its numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

from megatron_sender.config import Parallelism, Recipe
from megatron_sender.source import SourceMap, source_map
from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Placements, concatenate

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

    Needs Megatron-Core and Megatron-Bridge, and Transformer Engine or this project's source checkout, whose examples bring
    stand-ins. Must run where torch.distributed is not initialised. Raises ConfigError.
    """
    p, world = recipe.trainer.parallelism, recipe.trainer.world_size
    settings = _ground()
    known: dict[Place, SourceMap] = {}
    tables: list[Placements] = []
    for stage in range(p.pp):
        ranks = range(stage * (world // p.pp), (stage + 1) * (world // p.pp))
        with _fake_groups(ranks[0], world):
            bridge, chunks = _build(recipe, settings)
            for rank in ranks:
                place = place_of(rank, world, p)
                if place not in known:
                    with _played(chunks, place, p):
                        known[place] = source_map(chunks, bridge, rank=rank)
                tables.append(_as_rank(known[place].placements, rank))
    return Offered(_manifest(known), concatenate(tables))


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


def _as_rank(table: Placements, rank: int) -> Placements:
    buffers = [msgspec.structs.replace(b, rank=rank) for b in table.buffers]
    return Placements(table.names, buffers, table.tensor, table.buffer, table.lo, table.hi, table.offset, table.strides)


def _ground() -> dict[str, Any]:
    """Import Megatron; provider settings for where Transformer Engine is missing."""
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        root = Path(__file__).resolve().parents[1]
        if not (root / "examples" / "support").is_dir():
            do = "install Transformer Engine, or run from a source checkout, whose examples do without it"
            raise ConfigError(
                "Megatron's layers can't be built here", where="Transformer Engine", got="not installed", do=do
            ) from None
        sys.path.append(str(root))
        tiny_model: Any = importlib.import_module("examples.support.tiny_model")

        tiny_model.import_megatron()
        return {"plain": tiny_model._plain_settings}
    return {}


def _build(recipe: Recipe, ground: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The bridge and this rank's model chunks, without storage."""
    import transformers
    from megatron.bridge import AutoBridge
    from megatron.core.process_groups_config import ProcessGroupCollection

    fields = dict(recipe.model.hf_config) if isinstance(recipe.model.hf_config, Mapping) else {}
    config = transformers.AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    p = recipe.trainer.parallelism
    dtype = getattr(torch, recipe.trainer.dtype)
    bridge = AutoBridge.from_hf_config(config)
    with _quiet():
        provider = bridge.to_megatron_provider(load_weights=False)
        settings = {
            **(ground["plain"](provider) if "plain" in ground else {}),
            "tensor_model_parallel_size": p.tp,
            "pipeline_model_parallel_size": p.pp,
            "virtual_pipeline_model_parallel_size": p.vpp,
            "expert_model_parallel_size": p.ep,
            "expert_tensor_parallel_size": p.etp,
            "context_parallel_size": p.cp,
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
        provider.finalize()
        provider.initialize_model_parallel(seed=1)
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        try:
            with _OnMeta():
                chunks = [provider.provide(vp_stage=i if p.vpp else None) for i in range(p.vpp or 1)]
        except ImportError as error:
            do = "install what Megatron asks for; no GPU is needed to plan"
            raise ConfigError("Megatron can't build this model here", where="model", got=str(error)[:300], do=do) from None
    return bridge, chunks


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


class _Numbers:
    """Stands for a process group: the bridge asks it for size and rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Groups:
    """The groups of one rank, as Megatron's ProcessGroupCollection names them."""

    def __init__(self, place: Place, p: Parallelism) -> None:
        self.tp, self.pp = _Numbers(p.tp, place.tp), _Numbers(p.pp, place.pp)
        self.ep, self.expt_tp = _Numbers(p.ep, place.ep), _Numbers(p.etp, place.etp)


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


class _OnMeta(TorchFunctionMode):
    """Makes large new tensors on the meta device."""

    FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FACTORIES:
            size = args[0] if args and isinstance(args[0], list | tuple) else kwargs.get("size", args)
            if math.prod(n for n in size if isinstance(n, int)) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron's reports about missing kernels and its own deprecations are no news here."""
    import io
    import logging
    import warnings

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
