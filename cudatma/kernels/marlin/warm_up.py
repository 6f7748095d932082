"""Compile and load the kernels that marlin_gemm may need, before the first call needs them.

The choice table of a shape lists every kernel used for some M.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from cudatma.build.kernel import is_cached, load_kernel, wants_debug
from cudatma.build.prebuild import compile_all, usable_cores
from cudatma.errors import ArgumentError, ArgumentTypeError, CompileError, counted
from cudatma.kernels.choice_table import ChoiceTable, choice_table
from cudatma.kernels.gpu import Gpu, gpu_of
from cudatma.kernels.marlin.choose import MARLIN, resolve_fused
from cudatma.kernels.marlin.permute_columns import TEMPLATE as ARRANGE
from cudatma.kernels.marlin.permute_columns import choose_arrangement
from cudatma.kernels.marlin.problem import Problem
from cudatma.quantization import PackedWeight
from cudatma.target import Target, detect

#: Up to this many kernels are compiled in this process: starting a worker takes as long as compiling one.
_FEW_KERNELS = 2
#: Largest bound.
_LARGEST_M = 1 << 17
_log = logging.getLogger(__name__)

Kernels = dict[tuple[str, Any], None]
#: Requests whose kernels this process has loaded, with their choice tables: a model has many layers of few shapes.
_done: dict[tuple[Any, ...], ChoiceTable] = {}


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
    by_device: dict[int, Kernels] = {}
    requests: dict[tuple[Any, ...], ChoiceTable] = {}
    for w in weights:
        if w.device is None:
            raise ArgumentError("weights", "a weight in host memory", "weights on a CUDA device", "call to_device()")
        target, gpu, problem = detect(w.device), gpu_of(w.device), Problem.of(w, 1, batch_invariant=batch_invariant)
        table = choice_table(MARLIN, problem, gpu, max_m)
        request = (w.device, problem, w.scale_fit.form, w.perm is None, max_m, wants_debug(None))
        if _done.get(request) is not table:
            requests[request] = table
            by_device.setdefault(w.device, {}).update(kernels_of(table, w, gpu, target, max_m))
    for device, kernels in by_device.items():
        target = detect(device)
        missing = [one for one in kernels if not is_cached(*one, target)]
        if len(missing) > _FEW_KERNELS:
            with _bar(len(missing), progress) as advance:
                compile_all(missing, target, usable_cores(), advance)
        for template, spec in kernels:
            load_kernel(template, spec, target).load(device)
    _done.update(requests)


def check_max_m(max_m: Any) -> None:
    """Raise ArgumentError or ArgumentTypeError unless this is a bound that warm_up() takes."""
    if type(max_m) is not int:
        raise ArgumentTypeError("max_m", type(max_m).__name__, "int, rows of x")
    if not 1 <= max_m <= _LARGEST_M:
        raise ArgumentError("max_m", max_m, f"1 to {_LARGEST_M} rows", "larger batches compile at their first call")


def kernels_of(table: ChoiceTable, w: PackedWeight, gpu: Gpu, target: Target, max_m: int) -> Kernels:
    """Return (template, spec) of every kernel that calls with this weight and up to ``max_m`` rows may launch."""
    specs = (resolve_fused(spec, w.scale_fit.form) for spec in table.specs_up_to(max_m))
    kernels: Kernels = {(spec.template, spec): None for spec in specs}
    for m in (1, max_m):
        for is_aligned in (False,) if w.perm is None else (False, True):
            kernels[ARRANGE, choose_arrangement(w, m, is_aligned, target, gpu.sm_count)] = None
    return kernels


@contextmanager
def _bar(total: int, show: bool | None) -> Iterator[Callable[[Any, CompileError | None], None]]:
    """Show how many of ``total`` kernels are compiled; yields what compile_all() calls after each."""
    from rich.console import Console  # only who compiles pays for the import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    hidden = not (sys.stderr.isatty() if show is None else show)
    if hidden:
        _log.info("cudatma compiles %s", counted(total, "kernel"))
    columns = TextColumn("compiling kernels"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        task = progress.add_task("compile", total=total)

        def advance(spec: Any, refusal: CompileError | None) -> None:
            if refusal is not None:
                raise refusal
            progress.advance(task)

        yield advance
