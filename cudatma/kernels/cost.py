"""Predicted time of a configuration, and the ranking of a problem's configurations by predicted time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.gpu import Gpu
from cudatma.target import Target


class _Divides(Protocol):
    """Members of a config that cheapest_first() reads."""

    def work(self, m: int) -> Hashable: ...


S = TypeVar("S", bound=_Divides)

#: Minimum number of stages. A shorter ring loads nothing while a stage is computed, and the cost model ignores this.
MIN_STAGES = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted microseconds of one launch with operands cold in L2. The sum of all terms is ``us``.

    Each term is an array if it was computed for many M at once.

    Attributes
    ----------
    launch_us : float
        Time of the launch, of the first loads and of the last stores.
    mainloop_us : float
        Time of the mainloop on the busiest SM.
    reduction_us : float
        Time to add partial sums of the CTAs of a grid or a cluster, or the results of a token's experts.
    memory_us, tensor_us : float
        Memory time and tensor-core time that the work of the SMs does not hide.
    """

    launch_us: float
    mainloop_us: float
    reduction_us: float
    memory_us: float
    tensor_us: float

    @property
    def us(self) -> float:
        return self.launch_us + self.mainloop_us + self.reduction_us + self.memory_us + self.tensor_us

    @property
    def bound(self) -> str:
        """Name of the largest term: ``"launch"``, ``"mainloop"``, ``"reduction"``, ``"memory"`` or ``"tensor"``."""
        return max((f.name for f in fields(self)), key=lambda name: float(getattr(self, name))).removesuffix("_us")

    def as_dict(self) -> dict[str, Any]:
        """Return the terms as a dict for JSON."""
        return {"us": self.us, "bound": self.bound} | {f.name: getattr(self, f.name) for f in fields(self)}


def runs(config: Any, problem: Any, target: Target) -> bool:
    """Return whether the config passes its check()."""
    try:
        config.check(problem, target)
    except (ArgumentError, TargetError):
        return False
    return True


def no_kernel(problem: Any, gpu: Gpu) -> ArgumentError:
    """Return the error for a problem that no kernel supports."""
    if not problem.version:
        return ArgumentError("problem", problem.description, f"a problem that a kernel for {gpu.target} supports")
    allowed = f"a version with a kernel for {problem.description}"
    return ArgumentError("version", problem.version, allowed, 'pass version="auto"')


def cheapest_first(
    times: Callable[[Any, NDArray[np.int64], Gpu], Sequence[tuple[S, NDArray[np.float64]]]], problem: Any, gpu: Gpu
) -> list[tuple[S, float]]:
    """Return (config, microseconds) for each configuration that ``Family.times`` returns, the cheapest first.

    Only the cheapest of several configurations with the same ``work(M)`` is listed.
    """
    ranked = [(config, float(us[0])) for config, us in times(problem, np.array([problem.m]), gpu) if us[0] < np.inf]
    ranked.sort(key=lambda pair: round(pair[1], 6))
    kept: dict[Any, tuple[S, float]] = {}
    for config, us in ranked:
        kept.setdefault(config.work(problem.m), (config, us))
    return list(kept.values())
