"""What the CUDA driver says about the GPUs, and one real CUDA IPC hand-over. Standard library only.

It runs in processes of its own (`python probe.py facts | ipc DEVICE`), so that the caller never starts CUDA itself and may
still fork. Each prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any

PATTERN = bytes(range(256)) * 16
"""4,096 bytes that are sent in the hand-over."""
HANDLE_BYTES = 64
WAIT_SECONDS = 60
MAJOR, MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class Driver:
    """The few driver calls that are needed. A failing call raises OSError with the driver's words."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(code, f"{name}: {(text.value or b'unknown error').decode()}")

    def integer(self, name: str, *arguments: object) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def enter(self, device: int) -> None:
        """Makes the device's primary context current."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)


def facts() -> dict[str, Any]:
    """Driver version, and per GPU: name, UUID, compute capability, bytes, and the GPUs whose memory it can read."""
    driver = Driver()
    version = driver.integer("cuDriverGetVersion")
    count = driver.integer("cuDeviceGetCount")
    gpus = []
    for index in range(count):
        device = driver.integer("cuDeviceGet", index)
        name, uuid, size = ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
        driver.call("cuDeviceGetName", name, 128, device)
        driver.call("cuDeviceGetUuid", uuid, device)
        driver.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        capability = ".".join(str(driver.integer("cuDeviceGetAttribute", attribute, device)) for attribute in (MAJOR, MINOR))
        peers = [other for other in range(count) if other != index and driver.integer("cuDeviceCanAccessPeer", device, other)]
        gpus.append(
            {
                "name": name.value.decode(),
                "uuid": bytes(uuid).hex(),
                "capability": capability,
                "bytes": size.value,
                "peers": peers,
            }
        )
    return {"cuda": f"{version // 1000}.{version % 1000 // 10}", "gpus": gpus}


def offer(device: int) -> None:
    """Allocates on `device`, prints the IPC handle in hex, and keeps the memory until stdin closes."""
    driver = Driver()
    driver.enter(device)
    pointer, handle = ctypes.c_uint64(), Handle()
    driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(len(PATTERN)))
    driver.call("cuMemcpyHtoD_v2", pointer, PATTERN, ctypes.c_size_t(len(PATTERN)))
    driver.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    print(bytes(handle.reserved).hex(), flush=True)
    sys.stdin.read()


def take(device: int, text: str) -> bool:
    """Opens the handle `text` (hex) on `device`; whether the bytes are those that were offered."""
    driver = Driver()
    driver.enter(device)
    pointer, handle = ctypes.c_uint64(), Handle.from_buffer_copy(bytes.fromhex(text))
    driver.cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, 1)
    got = ctypes.create_string_buffer(len(PATTERN))
    driver.call("cuMemcpyDtoH_v2", got, pointer, ctypes.c_size_t(len(PATTERN)))
    driver.call("cuIpcCloseMemHandle", pointer)
    return got.raw == PATTERN


def hand_over(device: int) -> dict[str, Any]:
    """One hand-over from a child process to this one, on `device`: {"ok": bool}, or {"error": text}."""
    command = [sys.executable, __file__, "offer", str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        text = child.stdout.readline().strip()
        try:
            return {"ok": take(device, text)} if text else {"error": child.communicate()[1].strip().rsplit("\n", 1)[-1]}
        finally:
            child.stdin.close()


def ask(*arguments: str, program: str = "") -> dict[str, Any]:
    """Runs this file, or `program`, with `arguments` in its own process; its answer, or {"error": text}."""
    try:
        done = subprocess.run(
            [sys.executable, program or __file__, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {WAIT_SECONDS} s"}
    except OSError as error:
        return {"error": str(error)}
    try:
        answer = json.loads(done.stdout.rstrip().rpartition("\n")[2])  # what libraries print comes before
    except ValueError:
        last = done.stderr.strip().rsplit("\n", 1)[-1]
        return {"error": last or f"exit status {done.returncode}"}
    return answer if isinstance(answer, dict) else {"error": done.stdout.strip()}


def main() -> None:
    """The command line of this file."""
    command, *rest = sys.argv[1:]
    if command == "offer":
        offer(int(rest[0]))
        return
    try:
        answer = facts() if command == "facts" else hand_over(int(rest[0]))
    except OSError as error:
        answer = {"error": error.strerror or str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
