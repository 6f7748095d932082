"""Read a file that may come from another user: never waits for a pipe, never reads a device without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: More than any file that the project writes.
MOST_BYTES = 256 << 20


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file, or of what a link to one points to. Raises OSError for anything else."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than {MOST_BYTES}", str(path))
        return file.read()
