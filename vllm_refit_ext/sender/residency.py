"""What of the trainer stays on the GPU while the engine has it: gradients, optimizer state and parameters, moved off and on.

    residency = Residency(model_chunks, optimizer, ResidencyConfig())
    with residency.handing_over():            # gradients and optimizer leave, so that the engine's weights may wake
        sender.refit(version)
    ... the engine generates; parameters are off the GPU too ...
    residency.restore()                       # before training goes on

One function, `leaves`, says what moves at which moment; the full and the slim way both ask it, so a setting means the same in
both. Memory is moved storage by storage: every tensor and view stays the object it was, and gets its memory back in place. The
addresses are new afterwards, which a wire finds out by itself.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch

from vllm_refit_ext.core.errors import ConfigError, Problem, SessionError
from vllm_refit_ext.sender.config import Settings

Part = Literal["gradients", "optimizer", "parameters"]
Moment = Literal["before", "after", "after slim"]
PARTS: tuple[Part, ...] = ("gradients", "optimizer", "parameters")


class ResidencyConfig(Settings, frozen=True):
    """gradients, optimizer, parameters: whether each may leave. optimizer_on_cpu: the optimizer's state is on the host
    already, so nothing of it moves. slim: after a refit only what is left to do is done, without a second pass over what left
    before it.
    """

    gradients: bool = True
    optimizer: bool = True
    parameters: bool = True
    optimizer_on_cpu: bool = False
    slim: bool = True


def leaves(config: ResidencyConfig, moment: Moment) -> tuple[Part, ...]:
    """The parts that leave the GPU at a moment.

    Before a refit the parameters stay, since they are what is handed over. After it, `after` goes over everything again,
    because teacher passes may have brought it back; `after slim` leaves out the gradients, which nothing has touched since.
    """
    allowed = {
        "gradients": config.gradients and moment != "after slim",
        "optimizer": config.optimizer and not config.optimizer_on_cpu,
        "parameters": config.parameters and moment != "before",
    }
    return tuple(part for part in PARTS if allowed[part])


class Parked(msgspec.Struct):
    """One storage whose memory was given back. `saved`: its bytes on the host, None where they need not come back."""

    storage: Any
    nbytes: int
    saved: torch.Tensor | None


class Residency:
    """Moves one rank's training state. Not collective: nothing here communicates."""

    def __init__(
        self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module, optimizer: Any, config: ResidencyConfig | None = None
    ) -> None:
        """model_chunks: Megatron's, wrapped in its DDP or not. optimizer: Megatron's, chained or not, or None."""
        self.config = config or ResidencyConfig()
        self._chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        self._optimizer = optimizer
        self._parked: dict[Part, list[Parked]] = {}
        self._host: dict[int, torch.Tensor] = {}

    @property
    def away(self) -> tuple[Part, ...]:
        """The parts that are off the GPU."""
        return tuple(part for part in PARTS if part in self._parked)

    def before_refit(self) -> int:
        """Move off what is not handed over. Returns the bytes that were given back."""
        return self._move_off(leaves(self.config, "before"))

    def after_refit(self) -> int:
        """Move off what is left, the parameters too. Engines must not map them any more. Returns the bytes that were given
        back."""
        return self._move_off(leaves(self.config, "after slim" if self.config.slim else "after"))

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """`before_refit`, the body, `after_refit`, which also runs when the body fails: the engine needs the memory either
        way."""
        self.before_refit()
        try:
            yield
        finally:
            self.after_refit()

    def restore(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring parts back, all of them by default. Gradients come back as zeros."""
        for part in parts:
            for parked in self._parked.pop(part, []):
                parked.storage.resize_(parked.nbytes)
                memory = _bytes_of(parked.storage)
                if parked.saved is None:
                    memory.zero_()
                else:
                    memory.copy_(parked.saved, non_blocking=True)
        _wait()

    def _move_off(self, parts: Iterable[Part]) -> int:
        total = 0
        for part in parts:
            parked = self._parked.setdefault(part, [])
            for storage in self._storages(part):
                nbytes = storage.nbytes()
                if not nbytes:
                    continue
                parked.append(Parked(storage, nbytes, None if part == "gradients" else self._save(storage)))
                total += nbytes
        # The copies to the host must have ended before the memory goes.
        _wait()
        for part in parts:
            for one in self._parked[part]:
                one.storage.resize_(0)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return total

    def _save(self, storage: Any) -> torch.Tensor:
        """Copy a storage to host memory that is kept for the next time."""
        memory = _bytes_of(storage)
        key = storage._cdata
        copy = self._host.get(key)
        if copy is None or copy.numel() != memory.numel():
            copy = self._host[key] = torch.empty(memory.numel(), dtype=torch.uint8, pin_memory=memory.device.type == "cuda")
        copy.copy_(memory, non_blocking=True)
        return copy

    def _storages(self, part: Part) -> list[Any]:
        """The storages of a part, each once. What the optimizer shares with the model belongs to the model."""
        model = {s._cdata: s for s in map(torch.Tensor.untyped_storage, self._parameters())}
        if part == "parameters":
            return list(model.values())
        gradients = {s._cdata: s for s in map(torch.Tensor.untyped_storage, self._gradients()) if s._cdata not in model}
        if part == "gradients":
            return list(gradients.values())
        state = {s._cdata: s for s in map(torch.Tensor.untyped_storage, _optimizer_tensors(self._optimizer))}
        return [s for key, s in state.items() if key not in model and key not in gradients]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                yield parameter.data

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            yield from _grad_buffers(chunk)
            for parameter in chunk.parameters():
                for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                    if isinstance(gradient, torch.Tensor):
                        yield gradient


def _grad_buffers(chunk: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The flat gradient buffers of Megatron's DDP, of dense and of expert parameters."""
    own: Mapping[str, Any] = vars(chunk)
    for name in ("buffers", "expert_parallel_buffers"):
        for buffer in own.get(name) or ():
            data = getattr(buffer, "grad_data", None)
            if isinstance(data, torch.Tensor):
                yield data


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """State and main copies of parameters of Megatron's optimizers, through chains and wrappers."""
    if optimizer is None:
        return
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for name in ("shard_fp32_from_float16_groups", "shard_fp32_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"):
            yield from _tensors_in(getattr(one, name, None))
        inner = getattr(one, "optimizer", one)
        yield from _tensors_in(dict(getattr(inner, "state", {})))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.data
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _bytes_of(storage: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class PinnedSwap:
    """Other weights in the model for a while, a reference policy's for instance, and the model's own back afterwards, whatever
    happens.

    Both sets lie in pinned host memory that is kept. Extra state of modules is not touched: setting it may keep the tensor
    that it is given, which is used again here.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module, reference: Mapping[str, torch.Tensor]) -> None:
        """reference: tensor by name, `CHUNK.PARAMETER` with the chunk's number, of the parameter's shape and dtype.

        Raises ConfigError that lists every parameter without a tensor, every tensor without a parameter, and every one that
        does not fit.
        """
        chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
        self._parameters = {f"{i}.{n}": p for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}
        problems = [Problem("the reference lacks it", n) for n in self._parameters if n not in reference]
        problems += [Problem("the model has no such parameter", n) for n in reference if n not in self._parameters]
        for name, tensor in reference.items():
            parameter = self._parameters.get(name)
            if parameter is not None and (tensor.shape != parameter.shape or tensor.dtype != parameter.dtype):
                got, wanted = (f"{t.dtype} {list(t.shape)}".replace("torch.", "") for t in (tensor, parameter))
                problems.append(Problem("the reference does not fit", name, got, wanted))
        if problems:
            raise ConfigError.of(problems, f"the reference weights have {len(problems)} problem(s)")
        self._reference = {n: _pinned(reference[n], p.device) for n, p in self._parameters.items()}
        self._own = {n: torch.empty_like(r, pin_memory=r.is_pinned()) for n, r in self._reference.items()}
        self._swapped = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The reference's weights within the context. Raises SessionError when it is entered twice."""
        if self._swapped:
            raise SessionError("the reference weights are in place already", where="PinnedSwap")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._own[name].copy_(parameter, non_blocking=True)
            # The host must hold all of the model before anything is overwritten.
            _wait()
            self._swapped = True
            try:
                self._put(self._reference)
                with torch.enable_grad():
                    yield
            finally:
                self._put(self._own)
                self._swapped = False

    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name], non_blocking=True)
        _wait()


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device.type == "cuda")
    copy.copy_(tensor)
    return copy
