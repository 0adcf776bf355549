"""Any trainer whose weights are DTensors or plain tensors as a source: FSDP2, tensor and expert parallelism, HSDP, DDP.

    sender = RefitSender(DTensorSource(model), engine)

Nothing is gathered and nothing copied: each rank's local tensors are offered where they lie. Placements say which boxes of the
model's tensors these are (`geometry`), and the model's own conversion to a checkpoint says which boxes of checkpoint tensors
those are (`conversion`). Optimizer steps write in place, so one table describes every later version.

FSDP leaves a module's whole tensors in place of its shards between a forward pass and the next backward pass, and updates the
shards alone. So shards are what is read: `refresh` has every such module reshard first, which is local.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, WireError
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Placements
from vllm_refit_ext.sender.conversion import Convert, LocalTensor, Whole, place, record
from vllm_refit_ext.sender.geometry import Shape, Shard, shards
from vllm_refit_ext.sender.look import Look
from vllm_refit_ext.sender.names import Place, adapted, places, plain_names, unmerged, unwrapped

Named = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]
Model = torch.nn.Module | Sequence[torch.nn.Module] | Named


class _Local(NamedTuple):
    """A tensor of the model as this rank has it: its memory, the shape of the whole, and the boxes that the memory holds."""

    memory: torch.Tensor
    shape: Shape
    shards: list[Shard]


class DTensorSource:
    """What one trainer rank offers; see `sender.source.Source`, which it is.

    A tensor without placements counts as whole and equal on every rank, as DDP and tensor parallelism leave it.
    """

    def __init__(self, model: Model, *, convert: Convert | None = None) -> None:
        """model: a module, a pipeline stage's modules, or named tensors, such as `model.state_dict()`. convert: from a state dict
        of whole tensors by the model's names to one by the checkpoint's; it is run once, on tensors without storage, on each
        rank with the tensors that this rank has. Without it a transformers model is converted back to its checkpoint's names
        and shapes, and any other model's names are the checkpoint's.

        Raises ConfigError that lists every tensor that can't be offered: partial sums, quantised or distributed tensor classes,
        adapters that are not merged, what the conversion computes.
        """
        self._modules = _modules(model)
        if self._modules:
            self._reshard()
            self._adapted = [layer for module in self._modules for layer in adapted(module)]
            found = [p for module in self._modules for p in places(module)]
        else:
            self._adapted = []
            named: Any = model.items() if isinstance(model, Mapping) else model
            found = [Place(name, {"": tensor}, "") for name, tensor in named]
        problems = [p for module in self._modules for p in _foreign(module)] + unmerged(self._adapted)
        plain = plain_names((p.name for p in found), heads=not self._modules)
        found = [p._replace(name=name) for p, name in zip(found, plain, strict=True)]
        if convert is None and len(self._modules) == 1:
            found, convert = _as_saved(self._modules[0], found)
        tensors, locals_ = {}, {}
        first: dict[int, str] = {}
        for p in found:
            tied = first.setdefault(id(p.tensor), p.name)
            try:
                if not self._modules:
                    _check_named(p)
                local = _local(p.tensor, p.name)
            except RefitError as error:
                problems += error.problems
                continue
            tensors[p.name] = Whole(local.shape, str(local.memory.dtype).removeprefix("torch."), "" if tied == p.name else tied)
            if tied == p.name and local.memory.numel():
                locals_[p.name] = (p, local)
        if problems:
            raise ConfigError.of(problems, f"{len(problems)} tensor(s) of the trainer can't be offered")
        conversion = record(tensors, convert)
        offered = [(p, local) for name, (p, local) in locals_.items() if conversion.pieces[name]]
        self.placements: Placements = place(
            conversion, [LocalTensor(p.name, tuple(local.memory.shape), local.shards) for p, local in offered]
        )
        names = set(self.placements.names)
        self.specs: Mapping[str, TensorSpec] = {n: spec for n, spec in conversion.specs.items() if n in names}
        self.aliases: Mapping[str, str] = {a: n for a, n in conversion.aliases.items() if n in names}
        self.tensors: list[torch.Tensor] = [local.memory for _, local in offered]
        self._places = [p for p, _ in offered]
        self._locals = [local for _, local in offered]
        self._known = [p.tensor for p in self._places]
        self._cut = [hasattr(tensor, "_local_tensor") for tensor in self._known]
        self.addresses = [t.data_ptr() for t in self.tensors]
        self._look = Look(self.placements.buffers)

    def refresh(self) -> None:
        """Point `tensors` at the shards of now.

        Raises WireError that names every tensor whose memory was given back, is on another device, or is no longer the same part
        of its tensor, such as one that is unsharded because a forward pass is running, and every adapter that is not merged.
        """
        self._reshard()
        problems = unmerged(self._adapted)
        if not problems and self._as_before():
            return
        for i, (p, known) in enumerate(zip(self._places, self._locals, strict=True)):
            try:
                now = _local(p.tensor, p.name)
            except RefitError as error:
                problems += error.problems
                continue
            got, wanted = (f"{x.memory.dtype} {list(x.memory.shape)} on {x.memory.device.type}" for x in (now, known))
            if now.memory.untyped_storage().nbytes() == 0:
                problems.append(Problem("its memory was given back", p.name, do="load the model back before a refit"))
            elif (got, now.shape, now.shards) != (wanted, known.shape, known.shards):
                do = "refit between steps, when no forward or backward pass runs; after another change make a new sender"
                problems.append(Problem("it is another part of its tensor than the sender was made for", p.name, got, wanted, do))
            else:
                self.tensors[i], self._locals[i], self._known[i] = now.memory, now, p.tensor
                self._cut[i] = hasattr(p.tensor, "_local_tensor")
        if problems:
            raise WireError.of(problems, f"{len(problems)} tensor(s) of the trainer are not what the sender was made for")
        self.addresses = [t.data_ptr() for t in self.tensors]

    def _as_before(self) -> bool:
        """Whether every tensor is the one that it was, as it was and where it was."""
        try:
            now = [p.table[p.key] for p in self._places]
        except KeyError as error:
            raise WireError("a parameter was taken out of the model", where=str(error)) from error
        if not all(map(operator.is_, now, self._known)):
            return False
        locals_ = [t._local_tensor if cut else t for t, cut in zip(now, self._cut, strict=True)]
        return self._look(locals_) == self.addresses

    def _reshard(self) -> None:
        for module in self._sharded:
            module.reshard()

    @functools.cached_property
    def _sharded(self) -> list[Any]:
        """The modules that FSDP2 manages."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        return [m for module in self._modules for m in module.modules() if kind is not None and isinstance(m, kind)]


def _modules(model: Model) -> list[torch.nn.Module]:
    if isinstance(model, torch.nn.Module):
        return [unwrapped(model)]
    if isinstance(model, list | tuple) and model and all(isinstance(m, torch.nn.Module) for m in model):
        return [unwrapped(m) for m in model]
    return []


def _as_saved(model: torch.nn.Module, found: list[Place]) -> tuple[list[Place], Convert | None]:
    """What a transformers model saves of `found`, the name first that it keeps of a tied tensor, and its conversion."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return found, None
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    found = sorted((p for p in found if p.name not in ignored), key=lambda p: p.name in tied)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        if getattr(model, "_checkpoint_conversion_mapping", None):
            what = "this version of transformers renames the model's tensors in a way that can't be asked for"
            raise ConfigError(what, where=type(model).__name__, got=library.__version__, wanted="5 or later") from None
        return found, None
    return found, functools.partial(revert_weight_conversion, model)


def _foreign(model: torch.nn.Module) -> list[Problem]:
    """Ways of cutting a model that leave no tensor of its own."""
    problems = []
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            do = "wrap the model with fully_shard (FSDP2)"
            problems.append(Problem("FSDP1 keeps its parameters flattened, without shapes", path or "the model", do=do))
    problems += [
        Problem("DeepSpeed keeps it as a flat slice", name, do="train with FSDP2, or offer gathered tensors")
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "ds_tensor")
    ]
    return problems


def _check_named(p: Place) -> None:
    """FSDP shows whole parameters of modules that are unsharded; only a model can be asked to reshard."""
    if p.tensor.requires_grad and not hasattr(p.tensor, "placements") and torch.distributed.is_initialized():
        what = "a trained parameter without placements may be a whole tensor that FSDP drops, and does not update"
        raise ConfigError(what, where=p.name, do="give the model itself, or its state_dict()")


def _local(tensor: torch.Tensor, name: str) -> _Local:
    """Raises ConfigError for what is not plain numbers of boxes of the tensor."""
    placements = getattr(tensor, "placements", None)
    memory: torch.Tensor = tensor.detach() if placements is None else tensor._local_tensor.detach()  # type: ignore[attr-defined]
    shape = tuple(tensor.shape)
    dtype = str(memory.dtype).removeprefix("torch.")
    if type(memory) not in (torch.Tensor, torch.nn.Parameter) or dtype not in ITEMSIZE or dtype.startswith("float8"):
        raise ConfigError(
            "it is stored in a form whose bytes are not the weights",
            where=name,
            got=f"{type(memory).__name__} of {dtype}",
            wanted="a plain tensor of float32, bfloat16 or float16",
            do="train with plain parameters, and let the engine quantise",
        )
    if memory.is_meta or not memory.is_contiguous():
        got = "no memory" if memory.is_meta else f"strides {tuple(memory.stride())}"
        raise ConfigError("it does not lie in one piece of memory", where=name, got=got, wanted="row-major")
    if placements is None:
        return _Local(memory, shape, [Shard((0,) * len(shape), shape, (0,) * len(shape))])
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return _Local(
        memory,
        shape,
        shards(shape, tuple(mesh.shape), mesh.get_coordinate(), placements, local=tuple(memory.shape), where=name),
    )
