"""The GEMM as it is chosen, and the mma.sync kernel on each load path, which are compared with each other."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from cudatma.kernels.marlin.choose import AnyMarlinSpec
from cudatma.kernels.marlin.mma_sync import LoadPaths, MmaSyncSpec
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.target import Target
from tools.model_layers import Shape
from tools.sass import disassemble

#: Name -> load paths. Scales alone are what an existing cp.async kernel can migrate first.
LOAD_PATHS = {
    "tma": LoadPaths(),
    "scales": LoadPaths("cp_async", "tma", "cp_async"),
    "cp_async": LoadPaths("cp_async", "cp_async", "cp_async"),
}
TITLES = {"ours": "ours", "tma": "TMA", "scales": "TMA for scales only", "cp_async": "cp.async"}
#: What a profiler can be shown: the kernel that marlin_gemm chooses, or the mma.sync kernel on a load path.
SUBJECTS = tuple(TITLES)


def spec_of(path: str, layer: LinearShape, m: int) -> MmaSyncSpec:
    """What the mma.sync kernel runs for M = ``m`` on this GPU, on a load path of LOAD_PATHS."""
    from cudatma import context
    from cudatma.kernels.gpu import gpu_of
    from cudatma.kernels.marlin.mma_sync_candidates import choose_mma_sync

    return choose_mma_sync(Problem(layer, m), gpu_of(context.current_device()), LOAD_PATHS[path])


def disassembled(spec: AnyMarlinSpec, target: Target) -> tuple[str, str]:
    """(SASS, ptxas' log) of a spec compiled for a target. Raises LookupError where nothing disassembles it."""
    from cudatma.build.kernel import load_kernel

    kernel = load_kernel(spec.template, spec, target)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.cubin)
        sass = disassemble(cubin)
    if sass.text is None:
        raise LookupError(sass.note)
    return sass.text, kernel.log


def run_once(subject: str, shape: Shape, m: int, dtype: str = "float16") -> None:
    """One launch of one subject, for a profiler to look at; waits for its end."""
    import cupy

    from benchmarks.operands import filled, random_numbers, random_packed
    from cudatma import marlin_gemm
    from cudatma.kernels.choosing import pinned

    k, n = shape
    x = filled(cupy, (m, k), random_numbers(cupy, 1 << 20, dtype, 4))
    out = cupy.zeros((m, n), cupy.uint16).view(x.dtype)
    weight = random_packed(cupy, k, n, dtype, 1)[0]
    with contextlib.nullcontext() if subject == "ours" else pinned(spec_of(subject, LinearShape.of(weight), m)):
        marlin_gemm(x, weight, out=out)
    cupy.cuda.get_current_stream().synchronize()
