"""Random operands of a dense GEMM on a GPU, with enough copies of b to keep it cold, for the tuner."""

from __future__ import annotations

from typing import Any

from cudatma.arrays import describe
from cudatma.kernels.gemm.gemm import plan_gemm
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.wgmma import WgmmaSpec
from cudatma.kernels.shortlist import Listed
from cudatma.kernels.trial import Launch, cold_copies, copied_rows, empty_rows, random_rows
from cudatma.target import detect


class GemmTrial:
    """A Trial (kernels/trial.py). Raises DriverError without CuPy or a GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._a: Any = None
        self._b: list[Any] = []

    @property
    def copies(self) -> int:
        return len(self._b)

    def prepare(self, problem: Problem) -> None:
        """Random a and b."""
        import cupy

        m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
        self._a = self.out = None
        self._b.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        b = random_rows(n, k, dtype, k)
        self._b += [b, *(copied_rows(b) for _ in range(cold_copies(2 * n * k) - 1))]
        self._a, self.out = random_rows(m, k, dtype, m), empty_rows(m, n, dtype)

    def launcher(self, candidate: Listed[WgmmaSpec], copies: int, stream: int) -> Launch:
        """launch(i) enqueues the candidate on the i-th of so many copies of b; its kernel is loaded now."""
        target, a, out = detect(self.device), describe(self._a), describe(self.out)
        launches = [plan_gemm(a, describe(b), out, candidate.spec, target) for b in self._b[:copies]]
        kernel = launches[0].loaded(target, self.device, stream)
        plans = [launch.plan(kernel, self.device) for launch in launches]

        def launch(index: int) -> None:
            plans[index % len(plans)].launch(stream)

        return launch
