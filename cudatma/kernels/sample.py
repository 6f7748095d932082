"""A registry kernel with made-up operands, ready to be run on the emulator: what `cudatma emulate NAME` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudatma.emulator import Report
    from cudatma.runtime.launch import Kernel


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch.

    title: what is run, in a line. kernel: compiled. run: launches it on the emulator, with the options of
    ``EmulatedModule.launch``. error: ||out - reference|| / ||reference|| of the last schedule, against float64;
    limit: what it may be at most.
    """

    title: str
    kernel: Kernel
    run: Callable[..., Report]
    error: Callable[[], float]
    limit: float
