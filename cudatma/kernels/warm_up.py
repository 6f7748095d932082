"""Compile and load the kernels of calls before the first call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cudatma import context
from cudatma.build.kernel import compiling_alone, is_cached, load_kernel
from cudatma.build.prebuild import compile_all, usable_cores
from cudatma.errors import ArgumentError, ArgumentTypeError, CompileError, alternatives, counted
from cudatma.kernels.engine import intercept, launch_of
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.operation import Checked, Operation, Weight
from cudatma.target import Target, detect

#: Maximum number of kernels that are compiled in this process. Starting a worker process takes as long as compiling one
#: kernel.
_FEW_KERNELS = 2
#: Largest allowed max_m.
LARGEST_M = 1 << 17
_FUNCTIONS = ("attention", "attention_decode", "attention_varlen", "gemm", "marlin_gemm", "marlin_moe")
_log = logging.getLogger(__name__)


def warm_up(
    function: Callable[..., Any],
    operands: Sequence[Any],
    *,
    max_m: int,
    progress: bool | None = None,
    **options: Any,
) -> None:
    """Compile and load every kernel that calls to a function may need.

    Later calls with the same kinds of operands, the same options and sizes up to ``max_m`` do not compile anything.
    Kernels that are not in the cache are compiled in parallel. Nothing is launched. Results are bitwise identical with
    and without warm-up.

    Parameters
    ----------
    function : callable
        ``gemm``, ``attention``, ``attention_varlen``, ``attention_decode``, ``marlin_gemm`` or ``marlin_moe``.
    operands : sequence
        Positional arguments of a representative call, on a CUDA device. The arrays must have at least two rows. Their
        values are ignored.
    max_m : int
        Upper bound on the size, from 1 to 131072. For ``gemm`` and ``marlin_gemm``, it limits the number of rows of a
        or x, counted over all matrices that share b. For attention, it limits the number of queries and the number of
        keys per sequence, but not the number of sequences.
    progress : bool, optional
        Whether to show a progress bar on stderr while kernels compile. Default: True if stderr is a
        terminal.
    **options
        Keyword arguments of the calls, including arrays. ``backend`` and ``stream`` are ignored.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the arguments of the call are invalid, or if ``max_m`` is out of range.
    TargetError, CompileError, DriverError
        If no kernel exists for the GPU, or if a kernel does not compile or load.

    Notes
    -----
    Later calls may differ from this call in the sizes that ``max_m`` limits, and in the alignment and pitch of a or x.
    Calls with other options, dtypes, head dims or head counts, or with another layout of b, need a separate
    warm-up.

    Examples
    --------
    Prepare calls with torch tensors a (M, 4096) and w (11008, 4096) on a GPU:

    >>> cudatma.warm_up(cudatma.gemm, (a, w.T), activation="silu", max_m=8192)  # doctest: +SKIP
    """
    check_max_m(max_m)
    if not isinstance(operands, tuple | list):
        raise ArgumentTypeError("operands", type(operands).__name__, "a tuple of the call's arrays, such as (a, b)")
    name = getattr(function, "__name__", type(function).__name__)
    if name not in _FUNCTIONS or not function.__module__.startswith("cudatma."):
        raise ArgumentError("function", name, alternatives(_FUNCTIONS))

    def prepare_call(operation: Operation[Any, Any], checked: Checked[Any], device: int, weight: Weight | None) -> None:
        prepare([(operation, checked, weight)], device, max_m, progress)

    token = intercept.set(prepare_call)
    try:
        function(*operands, **options | {"backend": "cuda"})
    finally:
        intercept.reset(token)


def prepare(
    calls: Sequence[tuple[Operation[Any, Any], Checked[Any], Weight | None]],
    device: int,
    max_m: int,
    progress: bool | None,
) -> None:
    """Compile and load the kernels of calls on a device for sizes up to ``max_m``, and create their plans."""
    gpu = gpu_of(device)
    kernels = (kernel for operation, checked, _ in calls for kernel in operation.kernels_up_to(checked, max_m, gpu))
    compile_and_load(kernels, device, progress)
    for operation, checked, weight in calls:
        for problem in operation.problems_up_to(checked, max_m, gpu):
            launch_of(operation, problem, device, 0, weight=weight)


def check_max_m(max_m: Any) -> None:
    """Raise ArgumentError or ArgumentTypeError unless ``max_m`` is an int in the range of warm_up()."""
    if type(max_m) is not int:
        raise ArgumentTypeError("max_m", type(max_m).__name__, "int")
    if not 1 <= max_m <= LARGEST_M:
        raise ArgumentError(
            "max_m", max_m, f"1 to {LARGEST_M}", f"pass {LARGEST_M}; larger calls compile their own kernels"
        )


def compile_and_load(kernels: Iterable[tuple[str, Any]], device: int, progress: bool | None = None) -> None:
    """Load kernels, given as (template, config), and compile in parallel those that are not in the cache.

    Other processes that use the same cache wait and then find the kernels there.
    """
    context.require_no_fork()
    target, unique = detect(device), dict.fromkeys(kernels)
    if len(_missing(unique, target)) > _FEW_KERNELS:
        with compiling_alone() as are_kept:
            missing = _missing(unique, target)
            if missing:
                with _bar(len(missing), progress) as advance:
                    compile_all(missing, target, usable_cores() if are_kept else 1, advance)
    for template, config in unique:
        load_kernel(template, config, target).load(device)


def _missing(kernels: Iterable[tuple[str, Any]], target: Target) -> list[tuple[str, Any]]:
    return [kernel for kernel in kernels if not is_cached(*kernel, target)]


@contextmanager
def _bar(total: int, show: bool | None) -> Iterator[Callable[[Any, CompileError | None], None]]:
    """Show a progress bar for ``total`` kernels, and yield the function that compile_all() calls after each kernel."""
    from rich.console import Console  # Imported only if kernels are compiled.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    hidden = not (sys.stderr.isatty() if show is None else show)
    if hidden:
        _log.info("cudatma compiles %s", counted(total, "kernel"))
    columns = TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        task = progress.add_task("compile", total=total)

        def advance(config: Any, failure: CompileError | None) -> None:
            if failure is not None:
                raise failure
            progress.advance(task)

        yield advance
