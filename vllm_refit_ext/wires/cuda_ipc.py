"""The few CUDA calls that memory needs to be shared between processes, by ctypes on the libraries that torch has loaded.

torch's own sharing of tensors wraps these calls in pickles and reference counts that depend on its version. Plain handles do not.
"""

from __future__ import annotations

import ctypes
import functools
import os
import uuid
from typing import Any

import torch

from vllm_refit_ext.core.errors import WireError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_ANY_TO_ANY = 4
_MAPPED = 13


_unique = uuid.uuid4().hex


def _renew() -> None:
    global _unique
    _unique = uuid.uuid4().hex


os.register_at_fork(after_in_child=_renew)


def process() -> str:
    """A name of this process, which no forked child has. A handle can't be opened where it was made, and addresses are good
    nowhere else, so a reader asks for it first."""
    return f"{_unique}-{os.getpid()}"


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@functools.cache
def _runtime() -> Any:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split(None, 5)[5].strip() for line in maps if "libcudart.so" in line})
    if not paths:
        raise WireError("torch has not loaded the CUDA runtime", where="wire ipc", do="install a CUDA build of torch")
    library = ctypes.CDLL(paths[0])
    library.cudaGetErrorString.restype = ctypes.c_char_p
    library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    library.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_void_p]
    library.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    library.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str, do: str = "") -> None:
    if code:
        text = _runtime().cudaGetErrorString(code)
        _runtime().cudaGetLastError()  # or the next kernel launch of this process would report it
        raise WireError(what, where="wire ipc", got=f"CUDA error {code}: {(text or b'').decode()}", do=do)


def allocation_of(address: int) -> tuple[int, int]:
    """(first address, bytes) of the allocation that `address` lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if code:
        raise WireError("the driver does not know this memory", where=f"address {address:#x}", got=f"CUDA driver error {code}")
    return int(base.value), int(size.value)


def export(base: int) -> bytes:
    """The handle of the allocation that begins at `base`. Raises WireError for memory that has none."""
    handle = _Handle()
    do = (
        "start the trainer with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or use wire ring, "
        "which exports only its own buffers"
    )
    _check(
        _runtime().cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(base)), "memory of the trainer can't be exported", do
    )
    return bytes(handle)


def open_handle(handle: bytes, device: torch.device) -> int:
    """Map another process's allocation for kernels of `device`; its address here. Peer access is enabled for that device."""
    address = ctypes.c_void_p()
    do = "see whether the trainer has ended, freed its memory, or runs where it shares no devices with this; refit once more"
    with torch.cuda.device(device):
        code = _runtime().cudaIpcOpenMemHandle(ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    _check(code, "memory of the trainer can't be opened", do)
    return int(address.value or 0)


def close_handle(address: int, device: torch.device) -> None:
    """Unmap. The exporter's memory can then be freed."""
    with torch.cuda.device(device):
        _check(_runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(address)), "a mapping can't be closed")


def copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes between any two addresses, host or device, and wait."""
    _check(_runtime().cudaMemcpy(ctypes.c_void_p(target), ctypes.c_void_p(source), nbytes, _ANY_TO_ANY), "a copy failed")


def read_word(address: int) -> int:
    """The 8 bytes at a device address, as an unsigned number."""
    word = ctypes.c_uint64()
    copy(ctypes.addressof(word), address, 8)
    return int(word.value)


def is_mapped(address: int) -> bool:
    """Whether physical memory lies behind a device address. Weights that sleep keep their addresses and lose their memory."""
    mapped = ctypes.c_int(0)
    code = _driver().cuPointerGetAttribute(ctypes.byref(mapped), _MAPPED, ctypes.c_uint64(address))
    return code == 0 and mapped.value != 0


def device_uuid(index: int) -> str:
    """The GPU's identity, the same in every process whatever devices it sees."""
    return str(torch.cuda.get_device_properties(index).uuid)


class _Array:
    """Device memory in the form from which torch makes a tensor without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def as_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of `device` as uint8 [nbytes], without a copy. It must outlive the tensor."""
    with torch.cuda.device(device):
        return torch.as_tensor(_Array(address, nbytes), device=device)


def allocate(nbytes: int, device: torch.device) -> int:
    """Plain device memory, which can always be exported, whatever torch's allocator is set to. Raises WireError when there is
    none."""
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = _runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes))
    _check(code, f"no room for {nbytes} bytes of staging", "free memory of the trainer first, or make the buckets smaller")
    return int(address.value or 0)


def free(address: int, device: torch.device) -> None:
    """Give memory of `allocate` back."""
    with torch.cuda.device(device):
        _check(_runtime().cudaFree(ctypes.c_void_p(address)), "staging can't be freed")
