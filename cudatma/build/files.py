"""Functions that read files, and a lock between processes and threads.

The lock is flock(2) on a file that the last holder unlinks. The operating system closes the files of a killed process
and thereby releases its lock. The lock file then stays until the next holder removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from cudatma.errors import ArgumentError, CacheError, reason_of

#: Maximum file size in bytes. All files that the project writes are smaller.
MAX_BYTES = 256 << 20
#: Maximum size of a source file in bytes. All kernels are smaller.
MAX_SOURCE_BYTES = 64 << 20


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file, or of the regular file that is the target of a link.

    Raises OSError if the path is anything else.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > MAX_BYTES:
            raise OSError(
                errno.EFBIG, f"file of {status.st_size} bytes exceeds the limit of {MAX_BYTES} bytes", str(path)
            )
        return file.read()


def read_source(path: str | os.PathLike[str], field: str) -> str:
    """Return the text of a PTX or CUDA file.

    Raises an ArgumentError with the name ``field`` if the file cannot be read.
    """
    name = os.fspath(path)
    try:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError(field, ascii(name), "a regular file")
        if status.st_size > MAX_SOURCE_BYTES:
            raise ArgumentError(field, f"{name} of {status.st_size} bytes", f"at most {MAX_SOURCE_BYTES} bytes")
        # Replace invalid bytes, because PTX is ASCII except in comments and file names.
        return Path(name).read_text(encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(field, f"{name!a} ({reason_of(error)})", "a readable file") from error


def file_state(path: str) -> tuple[int, int, int]:
    """Return numbers that identify the current version of a file.

    Raises OSError or ValueError if the file cannot be examined.
    """
    state = os.stat(path)
    return state.st_ctime_ns, state.st_size, state.st_ino


def content(path: str) -> bytes:
    """Return a file's bytes, which are read again only if the file has changed.

    Raises OSError or ValueError if the file cannot be read.
    """
    return _content(path, *file_state(path))


@lru_cache(maxsize=1024)
def _content(path: str, *version: int) -> bytes:
    """Return the bytes of a file. The caller changes ``version`` when the file changes, so that it is read again."""
    del version
    with open(path, "rb") as file:
        return file.read()


_POLL_SECONDS = 0.005
#: Error numbers from file systems without flock.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
#: Descriptors of the lock files that this process has open. They are not a part of the Runtime, because a forked child
#: must close its copies.
_held: set[int] = set()


def _forget_after_fork() -> None:
    """Close a forked child's copies of its parent's lock files. They would hold the locks after the parent exits."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock on a file inside a ``with`` block. The folder of ``path`` must exist.

    The block runs without a lock if the file system does not support locks, or if the file cannot be created. Raises
    CacheError if the lock is not free within ``timeout_s`` seconds.
    """
    descriptor = _acquire(path, time.monotonic() + timeout_s)
    if descriptor is None:
        yield
        return
    owner = os.getpid()
    _held.add(descriptor)
    try:
        yield
    finally:
        # A child that was forked inside the block has closed its copies and must not unlink its parent's file.
        if os.getpid() == owner:
            _held.discard(descriptor)
            # Unlink the file before releasing the lock, so that a process that has opened the old file detects that
            # this file is no longer at the path.
            with contextlib.suppress(OSError):
                path.unlink()
            # Release the lock explicitly, because a child that was not forked by Python may have a copy of the
            # descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _acquire(path: Path, deadline: float) -> int | None:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            if not _wait(descriptor, deadline):
                os.close(descriptor)
                raise CacheError(f"{path} is locked by another process; terminate that process or delete the file")
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                return None
            raise CacheError(f"{path} cannot be locked ({error})") from error
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def _wait(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the locked file is still the file at the path. An earlier holder may have unlinked it."""
    try:
        here, held = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)
