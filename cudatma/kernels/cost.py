"""What a configuration is predicted to take, and those that may serve a problem, ranked by it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.gpu import Gpu
from cudatma.target import Target, get_target

Spec = TypeVar("Spec", covariant=True)
S = TypeVar("S")

#: A ring of fewer stages loads nothing while one is computed. The cost model does not know the ring: candidates with a
#: shorter one are ranked last.
LEAST_STAGES, _SHORTEST_RING = 3, 2


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted microseconds of one launch, operands cold in L2; their sum is ``us``.

    launch_us: launch, first loads, last stores. sm_us: the main loop of the busiest SM. reduction_us: partial sums that
    the CTAs of a grid or of a cluster exchange. memory_us: what the SMs' work does not hide of reading memory.
    tensor_us: the same of all tensor cores' operations.
    """

    launch_us: float
    sm_us: float
    reduction_us: float
    memory_us: float
    tensor_us: float

    @property
    def us(self) -> float:
        return self.launch_us + self.sm_us + self.reduction_us + self.memory_us + self.tensor_us

    @property
    def bound(self) -> str:
        """The largest term: ``"launch"``, ``"sm"``, ``"reduction"``, ``"memory"`` or ``"tensor"``."""
        return max((f.name for f in fields(self)), key=lambda name: float(getattr(self, name))).removesuffix("_us")

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"us": self.us, "bound": self.bound} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Spec]):
    """cost: predicted. build(least_stages): the spec with as many stages as are useful, None where the target's shared
    memory does not hold ``least_stages``. Choosing among some hundred candidates builds the first alone."""

    cost: Cost
    build: Callable[[int], Spec | None]


def runs(spec: Any, problem: Any, target: Target) -> bool:
    """Whether the spec's check() raises nothing."""
    try:
        spec.check(problem, target)
    except (ArgumentError, TargetError):
        return False
    return True


def candidates_of(
    specs: Iterable[S], problem: Any, gpu: Gpu, deepest: Callable[[S, Target, int], S | None]
) -> list[Candidate[S]]:
    """Those of the specs that can serve a problem of a family with versions. deepest: what builds one, as Candidate has
    it. ArgumentError where there is none."""
    target = get_target(gpu.target)
    able: list[Any] = [spec for spec in specs if runs(spec, problem, target)]
    if not able:
        if not problem.version:
            raise ArgumentError("problem", problem.description, f"one that a kernel for {gpu.target} serves")
        allowed = f"one with a kernel for {problem.description}"
        raise ArgumentError("version", problem.version, allowed, 'version="auto"')
    return [Candidate(spec.cost(problem, gpu), partial(deepest, spec, target)) for spec in able]


def ranked(candidates: Iterable[Candidate[Spec]]) -> Iterator[tuple[Spec, Cost]]:
    """Those that fit the target, the cheapest first; of equal ones the first."""
    short = []
    for candidate in sorted(candidates, key=lambda one: round(one.cost.us, 6)):
        if (spec := candidate.build(LEAST_STAGES)) is not None:
            yield spec, candidate.cost
        else:
            short.append(candidate)
    for candidate in short:
        if (spec := candidate.build(_SHORTEST_RING)) is not None:
            yield spec, candidate.cost


def cheapest_first(
    times: Callable[[Any, NDArray[np.int64], Gpu], Sequence[tuple[S, NDArray[np.float64]]]], problem: Any, gpu: Gpu
) -> list[tuple[S, float]]:
    """Return (spec, microseconds) of the configurations that ``Family.times`` gives a problem, the cheapest first.

    Of tiles that differ in their rows alone and cut M into the same number of tiles, only the cheapest is listed.
    """
    found = [(spec, float(us[0])) for spec, us in times(problem, np.array([problem.m]), gpu) if us[0] < np.inf]
    found.sort(key=lambda one: round(one[1], 6))
    kept: dict[Any, tuple[S, float]] = {}
    for spec, us in found:
        kept.setdefault(_apart_from_rows(spec, problem.m), (spec, us))
    return list(kept.values())


def _apart_from_rows(spec: Any, m: int) -> tuple[Any, ...]:
    tile = spec.block_n, spec.block_k, spec.threads, spec.blocks_per_sm, spec.cluster, spec.cluster_k
    return type(spec), *tile, -(-m // spec.block_m)
