"""Files of shared memory: one process makes a file, others of the same user on this host map it.

A file is locked and filled before it gets its name, and its owner holds the lock as long as it lives. So a file whose lock is
free is a leftover, whatever pid namespace its owner was in, and everybody may remove it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
import warnings
import weakref
from pathlib import Path

import torch

from vllm_refit_ext.core.errors import WireError
from vllm_refit_ext.core.hosts import not_shared

FOLDER = Path("/dev/shm")
NAME = re.compile(r"refit-[0-9]+-[0-9]+-[0-9a-f]{16}-r([0-9]+)")
"""Of a file: user, process, a random part, the trainer rank."""
_NEW = ".new"
_NEW_S = 60.0
"""Seconds after which a file without its final name is a leftover too: its owner died between making and naming it."""


_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""No link is followed, and a pipe of that name keeps nobody waiting."""


class SharedFile:
    """A mapped file. `memory`: for structs. `bytes`: uint8 [nbytes].

    Closing gives up the name, the lock and the descriptor. The memory stays mapped for as long as anything views it: nothing
    unmaps it under a view.
    """

    def __init__(self, name: str, fd: int, nbytes: int, *, owner: bool, write: bool) -> None:
        """Map the open file `fd`, which belongs to this object from now on, also where this raises OSError."""
        self.name, self.nbytes, self._fd = name, nbytes, fd
        # Runs at collection and at exit, so that only a killed process leaves its file behind.
        self._end = weakref.finalize(self, _close, fd, FOLDER / name if owner else None, os.getpid())
        self.memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # read-only memory; nothing here writes to it
            self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._end.alive

    def owner_is_gone(self) -> bool:
        """Whether the process that made this file has ended or given it up. Only for those that opened it by name."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Remove the name if this process made the file, and let go of it. Safe to call twice."""
        self._end()
        self.memory, self.bytes = _NOTHING, torch.empty(0, dtype=torch.uint8)


_NOTHING = mmap.mmap(-1, mmap.PAGESIZE)


def create(rank: int, nbytes: int) -> SharedFile:
    """A new file of trainer rank `rank`. Raises WireError where shared memory has too little room, and leaves nothing then."""
    remove_leftovers()
    name = f"refit-{os.geteuid()}-{os.getpid()}-{secrets.token_hex(8)}-r{rank}"
    path = FOLDER / (name + _NEW)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Reserved now: a file that grows page by page would end the process with SIGBUS when shared memory is full.
            os.posix_fallocate(fd, 0, nbytes)
            os.rename(path, FOLDER / name)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return SharedFile(name, fd, nbytes, owner=True, write=True)
    except (OSError, OverflowError) as error:
        free = os.statvfs(FOLDER) if FOLDER.exists() else None
        full = free is not None and (isinstance(error, OverflowError) or error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG))
        raise WireError(
            "shared memory is too small" if full else "shared memory can't be used",
            where=f"trainer rank {rank}",
            got=f"{free.f_bavail * free.f_frsize} bytes free in {FOLDER}" if free is not None and full else error,
            wanted=f"{nbytes} bytes",
            do="give the container more shared memory, or use another wire",
        ) from None


def open_file(name: str, rank: int, nbytes: int, where: str, host: str, *, write: bool = False) -> SharedFile:
    """Map the first `nbytes` of a file that trainer rank `rank` made. host: where that rank is, for errors.

    A name comes from a peer: it is checked, no link is followed, and the file must be this user's. Raises WireError.
    """
    found = NAME.fullmatch(name)
    if found is None or found[1] != str(rank):
        raise WireError("not a name of shared memory of this rank", where=where, got=ascii(name)[:80], wanted=NAME.pattern)
    try:
        fd = os.open(FOLDER / name, (os.O_RDWR if write else os.O_RDONLY) | _OPEN)
    except OSError as error:
        raise WireError("it can't be opened", where=where, got=error.strerror or error, do=not_shared(host)) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            got, wanted = f"uid {status.st_uid}", f"a file of uid {os.geteuid()}"
            raise WireError("it belongs to another user", where=where, got=got, wanted=wanted)
        if not 0 < nbytes <= status.st_size:
            raise WireError("it is too short", where=where, got=f"{status.st_size} bytes", wanted=f"{nbytes} bytes")
    except WireError:
        os.close(fd)
        raise
    return SharedFile(name, fd, nbytes, owner=False, write=write)


def remove_leftovers() -> list[str]:
    """Remove this user's files whose owner is gone, and return their names. A killed trainer can't do it itself."""
    gone = []
    for path in FOLDER.glob(f"refit-{os.geteuid()}-*"):
        if not NAME.fullmatch(path.name.removesuffix(_NEW)):
            continue
        with contextlib.suppress(OSError):  # ended or removed by its owner meanwhile
            fd = os.open(path, os.O_RDONLY | _OPEN)
            try:
                if path.name.endswith(_NEW) and time.time() - os.fstat(fd).st_mtime < _NEW_S:
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                gone.append(path.name)
            finally:
                os.close(fd)
    return gone


def _close(fd: int, path: Path | None, process: int) -> None:
    # A forked child holds the same lock and must not end its parent's file.
    if path is not None and os.getpid() == process:
        path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
