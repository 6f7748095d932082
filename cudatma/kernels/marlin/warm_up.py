"""Compile and load the kernels that marlin_gemm may need for the weights of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from cudatma.build.kernel import wants_debug
from cudatma.context import runtime
from cudatma.errors import ArgumentError
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.marlin.gemm import MARLIN_GEMM
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.operation import Checked
from cudatma.kernels.tuning_file import FILE_VARIABLE
from cudatma.kernels.warm_up import check_max_m, compile_and_load
from cudatma.quantization import PackedWeight


class _Loaded(set[tuple[Any, ...]]):
    """The warm-ups that are complete, a part of the Runtime: a model has many layers of few shapes."""

    #: forget() of choice_table drops it.
    holds_choices = True


def warm_up(
    weights: Iterable[PackedWeight],
    max_m: int,
    *,
    batch_invariant: bool = False,
    progress: bool | None = None,
) -> None:
    """Compile and load every kernel that ``marlin_gemm`` can need for these weights and up to ``max_m`` rows of x.

    Afterwards no call with at most ``max_m`` rows compiles anything, aligned or not, with or without a bias. Kernels
    that the cache lacks are compiled in parallel. Results have the same bits with and without warm-up.

    Parameters
    ----------
    weights : iterable of PackedWeight
        Weights on CUDA devices. Weights of one shape and format need the same kernels.
    max_m : int
        Largest number of rows of x, 1 to 131072.
    batch_invariant : bool, default False
        Warm up the kernels of calls with ``batch_invariant=True``.
    progress : bool, optional
        Show a progress bar on stderr while kernels compile. Default: only if stderr is a terminal.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If ``max_m`` is out of range, or a weight is not on a device.
    CompileError, DriverError, TargetError
        As the first call would.
    """
    check_max_m(max_m)
    loaded: _Loaded = runtime().part(_Loaded)
    requests: dict[tuple[Any, ...], Problem] = {}
    for w in weights:
        if w.device is None:
            raise ArgumentError("weights", "a weight in host memory", "weights on a CUDA device", "call to_device()")
        problem = Problem.of(w, 1, batch_invariant=batch_invariant)
        key = w.device, problem.plan_key, max_m, wants_debug(None), os.environ.get(FILE_VARIABLE)
        if key not in loaded:
            requests[key] = problem
    for device in {key[0] for key in requests}:
        gpu, problems = gpu_of(device), [problem for key, problem in requests.items() if key[0] == device]
        calls = [Checked(problem, (), None, None, None) for problem in problems]
        kernels = (kernel for call in calls for kernel in MARLIN_GEMM.kernels_up_to(call, max_m, gpu))
        compile_and_load(kernels, device, progress)
    loaded.update(requests)
