"""marlin_gemm on the emulator: the kernel that a GPU would run, on NumPy arrays, its hazards raised as errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.build.kernel import default_target
from cudatma.emulator import Report
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_bytes
from cudatma.kernels.launch import Launch
from cudatma.kernels.marlin.choose import AnyMarlinSpec, decide, resolve_fused
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.permute_columns import (
    TEMPLATE,
    arranged_rows,
    choose_arrangement,
    needs_arranging,
    permute_arguments,
    permute_grid,
    result_pitch_bytes,
)
from cudatma.kernels.marlin.plan import gemm_launch
from cudatma.kernels.marlin.problem import Problem
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.quantization import PackedWeight
from cudatma.target import Target

#: SMs of the imagined GPU: an H200's. Tiles are then divided as on that GPU.
_SM_COUNT = 132


@dataclass(frozen=True, slots=True)
class HostWorkspace:
    """Partial sums and flags in host memory, for one launch. flags: all zero before and after it."""

    partials: np.ndarray[Any, np.dtype[np.uint8]]
    flags: np.ndarray[Any, np.dtype[np.uint32]]

    @classmethod
    def of(cls, spec: AnyMarlinSpec, work: Schedule) -> HostWorkspace:
        """As large as a launch needs it; partial sums that nobody wrote are large numbers."""
        slots = max(1, work.partial_ctas)
        return cls(np.full(slots * spec.partial_bytes, 0x7F, np.uint8), np.zeros(slots * spec.warp_tiles, np.uint32))


def prepare(
    x: Rows,
    w: PackedWeight,
    out: Rows,
    bias: ArrayInfo | None,
    spec: AnyMarlinSpec,
    work: Schedule,
    target: Target,
    *,
    workspace: HostWorkspace | None = None,
    programmatic: bool = False,
) -> Launch:
    """The launch that the GPU's plan would make, with a workspace of its own unless given. All arrays on the host.

    programmatic: as for a dependent launch, in which the kernel loads weights before it waits for activations.
    """
    space = HostWorkspace.of(spec, work) if workspace is None else workspace
    partials, flags = describe(space.partials), describe(space.flags)
    return gemm_launch(x, w, out, bias, spec, work, target, partials=partials, flags=flags, programmatic=programmatic)


def emulated_gemm(
    x: Rows,
    w: PackedWeight,
    out: Rows,
    bias: ArrayInfo | None,
    *,
    target: Target | None = None,
    batch_invariant: bool = False,
    schedules: int = 1,
    **options: Any,
) -> Report:
    """Run the kernels for these operands, all on the host; out holds the result. The report is the last kernel's.

    target: None is default_target(). batch_invariant: as in marlin_gemm.
    schedules: interleavings to try; the first is in order, the second delays every completion as far as it can.
    options: of ``EmulatedModule.launch``, for the GEMM itself.
    Raises HazardError where a kernel races, hangs or miscounts, CompileError, DriverError (no NVRTC).
    """
    target = default_target() if target is None else target
    k, n = w.shape
    arranged = needs_arranging(w, x)
    if arranged:
        x = _arranged(x, w, target, schedules)
    problem = Problem.of(w, x.rows, batch_invariant=batch_invariant)
    spec = resolve_fused(decide(problem, imagined_gpu(target, _SM_COUNT)).spec, w.scale_fit.form)
    work = schedule(spec, x.rows, n, k, _SM_COUNT * spec.blocks_per_sm, divide=not batch_invariant)
    launch = prepare(x, w, out, bias, spec, work, target, programmatic=arranged)
    # The GEMM is a dependent launch of the kernel that copies activations, and has to wait for them.
    previous = (host_bytes(x.info),) if arranged else ()
    return launch.emulate(target, schedules=schedules, produced_by_previous=previous, **options)


def _arranged(x: Rows, w: PackedWeight, target: Target, schedules: int) -> Rows:
    """The rows that the copying kernel writes. As a dependent launch, it waits for the kernel that wrote x."""
    k = w.shape[0]
    spec = choose_arrangement(w, x.rows, x.is_aligned, target, _SM_COUNT)
    result = np.full((x.rows, result_pitch_bytes(k) // 2), np.nan).astype(x.info.dtype)
    source, order = host_bytes(x.info), None if w.perm is None else describe(w.perm).pointer
    args = permute_arguments(x.info.pointer, order, result.ctypes.data, x.rows, k, x.pitch_bytes)
    touched = (x.info, describe(result)) if w.perm is None else (x.info, describe(result), describe(w.perm))
    launch = Launch(TEMPLATE, spec, permute_grid(spec, x.rows, k, _SM_COUNT), args, touched)
    launch.emulate(target, schedules=schedules, produced_by_previous=(source,))
    return arranged_rows(x, result.ctypes.data, result)
