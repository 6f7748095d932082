"""Decide which waits time out. Some loops retry forever, and others give up after a number of attempts.

mbarrier.try_wait may return false at any time because it is "potentially blocking" up to a system-dependent time limit.
Source: PTX ISA, "mbarrier.test_wait, mbarrier.try_wait".
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from cudatma.emulator.machine.state import Frame, Split, Warp

#: Maximum number of timeouts of the try_waits at one place in a schedule. Later try_waits at this place block.
MAX_TIMEOUTS = 10_000
#: Number of steps without progress after which splits are considered to repeat, even if their states differ.
_MAX_FRUITLESS = 1_000_000
#: Maximum number of recorded states. Longer cycles are not detected.
_MAX_STATES = 100_000


def state_of(split: Split) -> int:
    """Return a hash of the state that determines the next steps of a split while memory does not change."""
    warp, mask = split.warp, split.mask
    parts: list[Any] = [split.pc, mask.tobytes()]
    frame: Frame | None = split.frame
    pc = split.pc
    while frame is not None:
        if pc >= 0:
            for index in frame.program.live_registers(pc):
                value = frame.registers[index]
                parts.append(value.tobytes() if split.is_full else value[..., mask].tobytes())
        pc, frame = frame.return_to, frame.caller
        parts.append(pc)
    if warp.local_bytes:
        parts.append(warp.local.data.tobytes())
    return hash(tuple(parts))


class Retries:
    """Timeouts of try_waits.

    A loop that returns to an unchanged state would retry forever, so its waits block until their phase ends. All other
    waits may time out again, so that their loops can give up.
    """

    def __init__(self, chance: float, draw: random.Random) -> None:
        """Create the state. ``chance`` is the probability of a timeout of waits that are not known to retry forever."""
        self._chance, self._draw = chance, draw
        self._endless: set[tuple[Any, int, int]] = set()
        self._tried: dict[tuple[Any, int, int], set[tuple[Warp, int]]] = {}

    def times_out(self, split: Split, at: int) -> bool:
        """Return whether a try_wait for a phase that has not ended returns false instead of blocking."""
        place = split.frame.program, at, split.frame.return_to
        if not self._chance or place in self._endless:
            return False
        tried = self._tried.setdefault(place, set())
        state = split.warp, state_of(split)
        if state in tried:
            self._endless.add(place)
            return False
        if len(tried) >= MAX_TIMEOUTS or self._draw.random() >= self._chance:
            return False
        tried.add(state)
        return True


class Stall:
    """Detector of splits that only repeat their states, except for counters of attempts."""

    def __init__(self) -> None:
        self.progress = -1
        self._began = 0
        self._seen: set[tuple[Warp, int]] = set()

    def repeats(self, progress: int, steps: int, splits: Iterable[Split]) -> bool:
        """Return whether every split has already been in its current state since the last progress.

        ``progress`` counts the events that may have released a waiter. ``steps`` counts the steps of all splits.
        """
        if progress != self.progress:
            self.progress, self._began = progress, steps
            self._seen.clear()
        elif len(self._seen) > _MAX_STATES:
            self._seen.clear()
        states = {(split.warp, state_of(split)) for split in splits}
        is_repeated = states <= self._seen
        self._seen |= states
        return is_repeated or steps - self._began > _MAX_FRUITLESS
