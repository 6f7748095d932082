"""Progress line for long launches in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Time until the line appears, and time between updates.
_FIRST_S, _PERIOD_S = 5.0, 1.0


def of_next(steps: int) -> str:
    """Return the progress of the current schedule as text, or "" between schedules."""
    return f", {steps:,} steps of the next schedule" if steps else ""


@contextmanager
def progress_line(kernel: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """Show the number of finished schedules on stderr if it is a terminal."""
    next_at = time.monotonic() + _FIRST_S
    shown = False

    def show(done: int, steps: int) -> None:
        nonlocal next_at, shown
        now = time.monotonic()
        if now >= next_at and sys.stderr.isatty():
            next_at, shown = now + _PERIOD_S, True
            sys.stderr.write(f"\r\x1b[Kcudatma: {kernel}: {done} of {total} schedules{of_next(steps)}")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
