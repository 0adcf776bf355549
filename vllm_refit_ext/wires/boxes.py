"""Boxes of memory as tensors, and their digests: what every wire's two halves and every writer share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

import torch

from vllm_refit_ext.core.errors import LayoutError, Problem, WireError
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.kernels.digest import digest_torch

MODULUS = 1 << 64
Content = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
"""What a move's box holds: elements, or (codes, scales) uint8 of one that is MXFP8 there, or nothing to compare."""


class Memory(abc.ABC):
    """Whatever gives the bytes of source buffers: a wire's reader, or the trainer's own tensors.

    token: names the addresses; a writer that bound them under an equal token need not ask again. None: they are of this refit
    alone. ordered: the bytes come in the order of the plan's moves and must be asked for in it.
    """

    token: object = None
    ordered = False

    @abc.abstractmethod
    def memory(self, buffer: int) -> torch.Tensor:
        """The bytes of source buffer `buffer`, uint8 [nbytes], once they are there. Whoever fills that memory again does so
        behind what was launched on the current stream by then. Raises WireError, DeadlineError."""

    def address(self, buffer: int) -> int | None:
        """The address of source buffer `buffer` for kernels of this device, or None where `memory` is to be asked."""
        return None


def box_view(
    memory: torch.Tensor, dtype: torch.dtype, offset: int, extent: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A view of a box: `extent` elements of `dtype`, from `offset` bytes into `memory` (uint8 [n]) at byte `strides`.

    Raises LayoutError where offset or strides are not whole elements.
    """
    item = dtype.itemsize
    if offset % item or any(s % item for s in strides):
        got = f"offset {offset}, strides {list(strides)}"
        raise LayoutError("a box does not lie on whole elements", got=got, wanted=f"multiples of {item} bytes")
    typed = memory.view(dtype)
    return typed.as_strided(tuple(extent), [s // item for s in strides], typed.storage_offset() + offset // item)


def source_view(plan: Plan, move: int, reader: Memory) -> torch.Tensor:
    """The source box of `move`, in the source's dtype."""
    buffer = int(plan.source[move])
    dtype = getattr(torch, plan.sources[buffer].dtype)
    return box_view(
        reader.memory(buffer),
        dtype,
        int(plan.source_offset[move]),
        plan.extent[move].tolist(),
        plan.source_strides[move].tolist(),
    )


def target_view(plan: Plan, move: int, memory: torch.Tensor) -> torch.Tensor:
    """The target box of `move` in `memory`, the whole target buffer as uint8 [nbytes]."""
    dtype = getattr(torch, plan.targets[int(plan.target[move])].dtype)
    return box_view(memory, dtype, int(plan.target_offset[move]), plan.extent[move].tolist(), plan.target_strides[move].tolist())


def wait_for(device: torch.device) -> None:
    """Wait for what runs on the current stream of `device`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def launched(device: torch.device) -> Callable[[], bool]:
    """A function that says whether all has ended that was launched on the current stream before this call; on a CPU it has."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 [nbytes], sharing storage. Raises LayoutError for another tensor."""
    if not tensor.is_contiguous():
        raise LayoutError("a tensor is not contiguous", got=f"strides {tensor.stride()} of shape {list(tensor.shape)}")
    return tensor.detach().view(-1).view(torch.uint8)


def addresses_of(
    tensors: Sequence[torch.Tensor], used: Sequence[int], where: str, known: Sequence[int] | None = None
) -> list[int]:
    """Addresses of the tensors numbered `used`, for one refit. known: those of all tensors, where the caller has looked. Raises
    WireError where one is not contiguous: a plan's offsets count row-major elements, whatever the tensor looked like when the
    plan was made."""
    if known is not None:
        return [known[i] for i in used]
    mine = [tensors[i] for i in used]
    with torch._C.DisableTorchFunction():  # a mode would make each question a call of Python
        contiguous, addresses = all(map(torch.Tensor.is_contiguous, mine)), list(map(torch.Tensor.data_ptr, mine))
    if not contiguous:
        do = "make the parameter contiguous again (`.contiguous()`), or prepare again"
        problems = [
            Problem("a tensor is no longer contiguous", f"{where}, buffer {i}", f"strides {t.stride()}", do=do)
            for i, t in zip(used, mine, strict=True)
            if not t.is_contiguous()
        ]
        raise WireError.of(problems)
    return addresses


def move_digest(plan: Plan, move: int, box: Content) -> int:
    """Digest of a move's content. box: [extent of the move], in the target's dtype; codes and scales count as two boxes.

    The digest of a tensor on an engine rank is the sum over that rank's moves (`core.digest` is additive over disjoint boxes), so
    a sender computes its part from its own shards, and the parts of all trainer ranks add up.
    """
    shape = plan.manifest.tensors[plan.names[int(plan.tensor[move])]].shape
    start = plan.lo[move, : len(shape)].tolist()
    if box is None:
        return 0
    if isinstance(box, torch.Tensor):
        return digest_torch(_of_depth(box, len(shape)), shape=shape, start=start)
    codes, scales = (_of_depth(part, len(shape)) for part in box)
    blocks = [c // s for c, s in zip(codes.shape, scales.shape, strict=True)]
    total = digest_torch(codes, shape=shape, start=start)
    total += digest_torch(
        scales,
        shape=[-(-n // b) for n, b in zip(shape, blocks, strict=True)],
        start=[a // b for a, b in zip(start, blocks, strict=True)],
    )
    return total % MODULUS


def _of_depth(box: torch.Tensor, depth: int) -> torch.Tensor:
    return box.flatten(depth - 1) if box.ndim > depth > 0 else box.reshape(box.shape[:depth])


def sum_by_tensor(plan: Plan, moves: Iterable[int], content: Callable[[int], Content]) -> dict[str, int]:
    """Digests by tensor name over `moves`; `content(move)` gives each box, see `Content`."""
    total: dict[str, int] = {}
    for move in moves:
        name, box = plan.names[int(plan.tensor[move])], content(move)
        if box is not None:
            total[name] = (total.get(name, 0) + move_digest(plan, move, box)) % MODULUS
    return total
