"""Compile and load the kernels that marlin_gemm may need for the weights of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from cudatma.build.kernel import wants_debug
from cudatma.context import runtime
from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, weight_of
from cudatma.kernels.marlin.permute_columns import ELEMENT_BYTES
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.operation import Checked
from cudatma.kernels.tuning import FILE_VARIABLE
from cudatma.kernels.warm_up import check_max_m, prepare
from cudatma.quantization import PackedWeight

#: Number of 2-byte elements in 16 bytes.
_ALIGNED_ELEMS = 16 // ELEMENT_BYTES


class _WarmedUp(set[tuple[Any, ...]]):
    """Completed warm-ups of a Runtime, which are recorded because a model has many layers but few shapes."""

    #: choice.forget() drops this cache.
    holds_choices = True


def warm_up(
    weights: Iterable[PackedWeight],
    max_m: int,
    *,
    batch_invariant: bool = False,
    progress: bool | None = None,
) -> None:
    """Compile and load every kernel that ``marlin_gemm`` may need for these weights and up to ``max_m`` rows.

    Later calls with at most ``max_m`` rows do not compile anything, regardless of the alignment of x and of a bias.
    Kernels that are not in the cache are compiled in parallel. Results are bitwise identical with and without warm-up.

    Parameters
    ----------
    weights : iterable of PackedWeight
        Weights on CUDA devices. Weights with the same shape and format need the same kernels.
    max_m : int
        Maximum number of rows of x, from 1 to 131072.
    batch_invariant : bool, default False
        Whether to prepare calls with ``batch_invariant=True``.
    progress : bool, optional
        Whether to show a progress bar on stderr while kernels compile. Default: True if stderr is a
        terminal.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If ``max_m`` is out of range, or if a weight is not on a device.
    CompileError, DriverError, TargetError
        If the first call would raise this error.
    """
    check_max_m(max_m)
    loaded: _WarmedUp = runtime().part(_WarmedUp)
    missing: dict[tuple[Any, ...], tuple[int, Problem, PackedWeight]] = {}
    for w in weights:
        if w.device is None:
            raise ArgumentError(
                "weights", "a weight in host memory", "on a CUDA device", "move the weight with to_device()"
            )
        problem = dense_problem(w, 1, batch_invariant=batch_invariant)
        key = w.device, problem.plan_key, max_m, wants_debug(None), os.environ.get(FILE_VARIABLE)
        if key not in loaded:
            missing[key] = w.device, problem, w
    for device in {device for device, _, _ in missing.values()}:
        calls = [
            (MARLIN_GEMM, Checked(problem, (), None, None, None), weight_of(w))
            for place, problem, w in missing.values()
            if place == device
        ]
        prepare(calls, device, max_m, progress)
    loaded.update(missing)


def dense_problem(w: PackedWeight, m: int, *, batch_invariant: bool) -> Problem:
    """Return the problem for M dense rows of an x that begins at a multiple of 16 bytes, and a dense result."""
    k, n = w.shape
    return Problem.of(
        w,
        m,
        batch_invariant=batch_invariant,
        x_pitch_bytes=k * ELEMENT_BYTES,
        out_pitch_bytes=n * ELEMENT_BYTES,
        has_aligned_x=k % _ALIGNED_ELEMS == 0,
        has_aligned_out=n % _ALIGNED_ELEMS == 0,
    )
