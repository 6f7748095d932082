"""The progress of a long launch, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds before the line appears, and between two updates.
_FIRST_S, _PERIOD_S = 5.0, 1.0


def describe(done: float, total: int) -> str:
    """Say how many schedules have run, and how far the running one has come."""
    return f"{int(done)} of {total} schedules, the next one at {done % 1:.1%} of its step limit"


@contextmanager
def progress_line(kernel: str, total: int) -> Iterator[Callable[[float], None]]:
    """Show on stderr, if it is a terminal, how many of a kernel's ``total`` schedules have run."""
    next_at = time.monotonic() + _FIRST_S
    shown = False

    def show(done: float) -> None:
        nonlocal next_at, shown
        now = time.monotonic()
        if now >= next_at and sys.stderr.isatty():
            next_at, shown = now + _PERIOD_S, True
            sys.stderr.write(f"\r\x1b[Kcudatma: {kernel}: {describe(done, total)}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
