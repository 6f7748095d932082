"""A registry kernel with made-up operands, ready to be run on the emulator: what `cudatma emulate NAME` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from cudatma.emulator import Report
    from cudatma.runtime.launch import Kernel


#: relative_error() that one rounding to the dtype, after fp32 accumulation, must keep.
LIMITS = {"float16": 1e-3, "bfloat16": 6e-3}


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch.

    title: what is run, in a line. kernel: compiled. run: launches it on the emulator, with the options of
    ``EmulatedModule.launch``. error: relative_error() of the last schedule, against float64; limit: what it may be
    at most.
    """

    title: str
    kernel: Kernel
    run: Callable[..., Report]
    error: Callable[[], float]
    limit: float


def relative_error(result: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    """||result - reference|| / ||reference||."""
    return float(np.linalg.norm(result.astype(np.float64) - reference) / np.linalg.norm(reference))
