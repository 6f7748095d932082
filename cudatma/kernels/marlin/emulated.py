"""marlin_gemm on the emulator: the kernel that a card would run, on NumPy arrays, its hazards raised as errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.build.kernel import default_target, load_kernel
from cudatma.emulator import EmulatedModule, Report
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.host import host_array, host_bytes
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.marlin.arranged import arranged_rows, choose_arrangement, needs_arranging
from cudatma.kernels.marlin.choose import decide
from cudatma.kernels.marlin.dense import serves_dense
from cudatma.kernels.marlin.dequantize import check_dense, dense_pitch_bytes, emulate
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.permute_columns import TEMPLATE, permute_arguments, permute_grid, result_pitch_bytes
from cudatma.kernels.marlin.plan import bound, scale_exponent_of, tensor_maps
from cudatma.kernels.marlin.problem import AnyMarlinSpec, LinearShape, resolve_fused
from cudatma.kernels.marlin.problem_struct import problem_values
from cudatma.kernels.schedule import Schedule, schedule
from cudatma.quantization import PackedWeight
from cudatma.runtime.hang.emulated import ListeningModule
from cudatma.target import Target

#: The card that is imagined: an H200's multiprocessors, so that tiles are divided as they would be there.
_PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class EmulatedLaunch:
    """The kernel's launch on host arrays. arrays: the memory behind the pointers; flags: all zero before and after.

    workspace: what owns that memory; the launch itself knows addresses alone.
    """

    spec: AnyMarlinSpec
    work: Schedule
    arguments: tuple[Any, ...]
    arrays: tuple[Any, ...]
    flags: np.ndarray[Any, np.dtype[np.uint32]]
    workspace: tuple[Any, ...]

    def run(self, module: EmulatedModule | ListeningModule, **options: Any) -> Report:
        """Launch it; options as for ``EmulatedModule.launch``."""
        report: Report = module.launch(
            self.spec.entry,
            self.work.blocks,
            self.spec.threads,
            self.arguments,
            cluster=self.spec.launch_cluster if self.spec.launch_cluster > 1 else None,
            shared_bytes=self.spec.smem_bytes,
            arrays=self.arrays,
            **options,
        )
        return report


def prepare(
    x: Rows,
    w: PackedWeight,
    out: Rows,
    bias: ArrayInfo | None,
    spec: AnyMarlinSpec,
    work: Schedule,
    target: Target,
    *,
    programmatic: bool = False,
) -> EmulatedLaunch:
    """The arguments that the GPU's plan would pass, with a workspace of this launch's own. All arrays on the host.

    programmatic: as for a dependent launch, in which the kernel asks for weights before it waits for activations.
    """
    k, n = w.shape
    values = problem_values(
        spec,
        work,
        x.rows,
        n,
        k,
        w.groups,
        activation_pitch=x.pitch_bytes // 2,
        output_pitch=out.pitch_bytes // 2,
        output_vectors=out.is_vectorised and out.info.pointer % 16 == 0,
        programmatic=programmatic,
        scale_exponent=scale_exponent_of(w, spec),
    )
    slots = max(1, work.partial_blocks)
    partials = np.full(slots * spec.partial_bytes, 0x7F, np.uint8)
    flags = np.zeros(slots * spec.warp_tiles, np.uint32)
    memory = {
        "weight": describe(w.qweight),
        "scales": describe(w.scales),
        "zeros": None if w.zeros is None else describe(w.zeros),
        "activations": x.info,
        "bias": bias,
        "output": out.info,
        "partials": describe(partials),
        "flags": describe(flags),
    }
    pointers = {name: 0 if info is None else info.pointer for name, info in memory.items()}
    arguments = bound(
        spec, {**tensor_maps(w, x, spec, target), **pointers, "problem": pack(spec.problem_members, values)}
    )
    arrays = tuple(host_bytes(info) for info in memory.values() if info is not None)
    return EmulatedLaunch(spec, work, tuple(arguments), arrays, flags, (partials, x, w, out, bias))


def emulated_gemm(
    x: Rows,
    w: PackedWeight,
    out: Rows,
    bias: ArrayInfo | None,
    *,
    target: Target | None = None,
    dense_bytes: int = 0,
    batch_invariant: bool = False,
    schedules: int = 1,
    **options: Any,
) -> Report:
    """Run the kernels for these operands, all on the host; out holds the result. The report is the last kernel's.

    target: None is default_target(). dense_bytes, batch_invariant: as in marlin_gemm; NumPy stands in for cuBLAS.
    schedules: interleavings to try; the first is in order, the second delays every completion as far as it can.
    options: of ``EmulatedModule.launch``, for the GEMM itself.
    Raises HazardError where a kernel races, hangs or miscounts, CompileError, DriverError (no NVRTC).
    """
    target = default_target() if target is None else target
    if dense_bytes and serves_dense(w, x.rows, dense_bytes, target):
        return _dense(x, w, out, bias, target, schedules)
    k, n = w.shape
    arranged = needs_arranging(w, x)
    if arranged:
        x = _arranged(x, w, target, schedules)
    card = imagined_gpu(target, _PROCESSORS)
    decision = decide(LinearShape.of(w), x.rows, card, batch_invariant=batch_invariant)
    spec = resolve_fused(decision.spec, w.scale_fit.form)
    work = schedule(spec, x.rows, n, k, _PROCESSORS * spec.blocks_per_sm, divide=decision.divide)
    launch = prepare(x, w, out, bias, spec, work, target, programmatic=arranged)
    # Behind the kernel that arranges them it is a dependent launch, which has to wait for them.
    previous = (host_bytes(x.info),) if arranged else ()
    return launch.run(
        load_kernel(spec.template, spec, target).emulated,
        schedules=schedules,
        target=target,
        produced_by_previous=previous,
        **options,
    )


def _arranged(x: Rows, w: PackedWeight, target: Target, schedules: int) -> Rows:
    """The rows that the copying kernel leaves; as in a dependent launch, it waits for who writes the activations."""
    k = w.shape[0]
    spec = choose_arrangement(w, x.rows, x.is_aligned, target, _PROCESSORS)
    result = np.full((x.rows, result_pitch_bytes(k) // 2), np.nan).astype(x.info.dtype)
    source, order = host_bytes(x.info), None if w.perm is None else describe(w.perm).pointer
    load_kernel(TEMPLATE, spec, target).emulate(
        permute_grid(spec, x.rows, k, _PROCESSORS),
        spec.threads,
        permute_arguments(x.info.pointer, order, result.ctypes.data, x.rows, k, x.pitch_bytes),
        shared_bytes=spec.smem_bytes,
        schedules=schedules,
        arrays=[source, result] if order is None else [source, result, w.perm],
        produced_by_previous=(source,),
    )
    return arranged_rows(x, result.ctypes.data, result)


def _dense(x: Rows, w: PackedWeight, out: Rows, bias: ArrayInfo | None, target: Target, schedules: int) -> Report:
    """The weight dequantised by its kernel, and the product in fp32 by NumPy, rounded once."""
    k, n = w.shape
    whole = np.empty((k, dense_pitch_bytes(n) // 2), x.info.dtype)
    report = emulate(w, check_dense(whole[:, :n], w), target, schedules=schedules)
    values = host_array(x.info).astype(np.float32) @ whole[:, :n].astype(np.float32)
    if bias is not None:
        values += host_array(bias).astype(np.float32)
    host_array(out.info)[...] = values.astype(out.info.dtype)
    return report
