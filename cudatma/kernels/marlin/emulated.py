"""marlin_gemm on the emulator: the kernel that a card would run, on NumPy arrays, its hazards raised as errors."""

from __future__ import annotations

import os

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.build import TARGET_VARIABLE, default_target, load_kernel
from cudatma.emulator import Report, load
from cudatma.kernels.marlin.config import Feeds, Layer, choose
from cudatma.kernels.marlin.host import host_bytes
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.plan import TEMPLATE, resolve_feeds, tensor_maps
from cudatma.kernels.marlin.problem import ProblemStruct, fill_problem, schedule
from cudatma.quantization import PackedWeight
from cudatma.target import Target, get_target

#: The card that is imagined: an H200's multiprocessors, so that tiles are divided as they would be there.
_PROCESSORS = 132
_DEFAULT_TARGET = "sm_90a"


def imagined_target() -> Target:
    """$CUDATMA_TARGET, else sm_90a: no card is asked, and none is needed."""
    return default_target() if os.environ.get(TARGET_VARIABLE) else get_target(_DEFAULT_TARGET)


def emulated_gemm(
    x: Rows, w: PackedWeight, out: Rows, bias: ArrayInfo | None, feeds: Feeds, *, schedules: int = 1
) -> Report:
    """Run the kernel for these operands, all on the host; out holds the result.

    schedules: interleavings to try; the first is in order, the second delays every completion as far as it can.
    Raises HazardError where the kernel races, hangs or miscounts, CompileError, DriverError (no NVRTC).
    """
    target = imagined_target()
    k, n = w.shape
    feeds = resolve_feeds(feeds, w, x.pitch_bytes)
    choice = choose(Layer(k, n, w.group_size, not w.symmetric, w.dtype), x.rows, target, _PROCESSORS, feeds)
    spec = choice.spec
    work = schedule(spec, x.rows, n, k, _PROCESSORS * choice.blocks_per_sm)
    problem = ProblemStruct()
    fill_problem(problem, spec, work, x.rows, n, k, w.groups)
    problem.activation_pitch, problem.output_pitch = x.pitch_bytes // 2, out.pitch_bytes // 2
    problem.output_vectors = int(out.is_vectorised and out.info.pointer % 16 == 0)
    slots = max(1, work.partial_blocks)
    partials = np.full(slots * spec.partial_bytes, 0x7F, np.uint8)
    flags = np.zeros(slots * spec.warps_m * spec.warps_n, np.uint32)
    memory = [None if array is None else describe(array) for array in (w.qweight, w.scales, w.zeros, w.perm)]
    weight, scales, zeros, perm = memory
    memory = [weight, scales, zeros, x.info, perm, bias, out.info, describe(partials), describe(flags)]
    maps = tensor_maps(w, x, spec, target)[0]
    arguments = [*maps, *(0 if info is None else info.pointer for info in memory), bytes(problem)]
    module = load(load_kernel(TEMPLATE, spec, target).ptx)
    return module.launch(
        spec.entry,
        work.blocks,
        spec.threads,
        arguments,
        shared_bytes=spec.smem_bytes,
        schedules=schedules,
        arrays=[host_bytes(info) for info in memory if info is not None],
        target=target,
    )
