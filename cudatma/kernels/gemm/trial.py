"""Random operands of a dense GEMM on a GPU, with enough copies of b to keep it cold, for the tuner."""

from __future__ import annotations

from functools import partial
from typing import Any

from cudatma.arrays import describe
from cudatma.kernels.gemm.gemm import plan_gemm
from cudatma.kernels.gemm.problem import Problem
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.shortlist import Listed
from cudatma.kernels.trial import Launch, cold_copies, copied_rows, empty_rows, in_turn, random_rows
from cudatma.target import detect


class GemmTrial:
    """A Trial (kernels/trial.py). Raises DriverError without CuPy or a GPU."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.out: Any = None
        self._a: Any = None
        self._b: list[Any] = []
        self._fixed: Any = None

    @property
    def copies(self) -> int:
        return len(self._b)

    def prepare(self, problem: Problem) -> None:
        """Random a; random b, unless it is there."""
        import cupy

        m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
        self._a = self.out = None
        if problem.fixed != self._fixed:
            self._fixed, self._b = None, []
            cupy.get_default_memory_pool().free_all_blocks()
            b = _operand(k, n, problem.layout[1], dtype, seed=1)
            copies = cold_copies(2 * n * k) - 1
            self._b = [b, *(copied_rows(b.T).T if problem.layout[1] == "C" else copied_rows(b) for _ in range(copies))]
            self._fixed = problem.fixed
        self._a, self.out = _operand(m, k, problem.layout[0], dtype, seed=0), empty_rows(m, n, dtype)

    def launcher(self, candidate: Listed[GemmSpec], copies: int, stream: int) -> Launch:
        """launch(i) enqueues the candidate on the i-th of so many copies of b; its kernel is loaded now."""
        target, sm_count = detect(self.device), gpu_of(self.device).sm_count
        a, out = describe(self._a), describe(self.out)
        launches = [plan_gemm(a, describe(b), out, candidate.spec, target, sm_count) for b in self._b[:copies]]
        kernel = launches[0].loaded(target, self.device, stream)
        return in_turn([partial(launch.plan(kernel, self.device).launch, stream) for launch in launches])


def _operand(rows: int, columns: int, layout: str, dtype: str, seed: int) -> Any:
    """Row-major, or column-major."""
    if layout == "R":
        return random_rows(rows, columns, dtype, seed)
    return random_rows(columns, rows, dtype, seed).T
