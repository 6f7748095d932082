"""marlin_gemm on the emulator: the kernel that a card would run, on NumPy arrays, its hazards raised as errors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo, describe
from cudatma.build import TARGET_VARIABLE, default_target, load_kernel
from cudatma.emulator import EmulatedModule, Report, load
from cudatma.kernels.marlin.config import Feeds, Layer, choose
from cudatma.kernels.marlin.host import host_bytes
from cudatma.kernels.marlin.layer import AnyMarlinSpec
from cudatma.kernels.marlin.operands import Rows
from cudatma.kernels.marlin.plan import resolve_feeds, tensor_maps
from cudatma.kernels.marlin.problem import ProblemStruct, Schedule, fill_problem, schedule
from cudatma.quantization import PackedWeight
from cudatma.target import Target, get_target

#: The card that is imagined: an H200's multiprocessors, so that tiles are divided as they would be there.
_PROCESSORS = 132
_DEFAULT_TARGET = "sm_90a"


def imagined_target() -> Target:
    """$CUDATMA_TARGET, else sm_90a: no card is asked, and none is needed."""
    return default_target() if os.environ.get(TARGET_VARIABLE) else get_target(_DEFAULT_TARGET)


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

    def run(self, module: EmulatedModule, **options: Any) -> Report:
        """Launch it; options as for ``EmulatedModule.launch``."""
        return module.launch(
            self.spec.entry,
            self.work.blocks,
            self.spec.threads,
            self.arguments,
            cluster=self.spec.cluster if self.spec.cluster > 1 else None,
            shared_bytes=self.spec.smem_bytes,
            arrays=self.arrays,
            **options,
        )


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
    problem = ProblemStruct()
    fill_problem(problem, spec, work, x.rows, n, k, w.groups, programmatic=programmatic)
    problem.activation_pitch, problem.output_pitch = x.pitch_bytes // 2, out.pitch_bytes // 2
    problem.output_vectors = int(out.is_vectorised and out.info.pointer % 16 == 0)
    slots = max(1, work.partial_blocks)
    partials = np.full(slots * spec.partial_bytes, 0x7F, np.uint8)
    flags = np.zeros(slots * spec.warp_tiles, np.uint32)
    packed = [None if array is None else describe(array) for array in (w.qweight, w.scales, w.zeros, w.perm)]
    weight, scales, zeros, perm = packed
    memory = [weight, scales, zeros, x.info, perm, bias, out.info, describe(partials), describe(flags)]
    maps = tensor_maps(w, x, spec, target)[0]
    arguments = (*maps, *(0 if info is None else info.pointer for info in memory), bytes(problem))
    arrays = tuple(host_bytes(info) for info in memory if info is not None)
    return EmulatedLaunch(spec, work, arguments, arrays, flags, (partials, x, w, out, bias))


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
    work = schedule(choice.spec, x.rows, n, k, _PROCESSORS * choice.blocks_per_sm)
    launch = prepare(x, w, out, bias, choice.spec, work, target)
    return launch.run(
        load(load_kernel(choice.spec.template, choice.spec, target).ptx), schedules=schedules, target=target
    )
