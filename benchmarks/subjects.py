"""The GEMM in the forms that are compared with each other: as it is chosen, and the portable kernel with each feed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cudatma.kernels.marlin.layer import AnyMarlinSpec
from cudatma.target import Target
from tools.model_layers import Shape
from tools.sass import disassemble

#: Name -> the ``feed`` argument of marlin_gemm. Scales alone are what an existing cp.async kernel can migrate first.
FEEDS: dict[str, Any] = {
    "tma": "tma",
    "scales": {"weight": "cp_async", "scale": "tma", "activation": "cp_async"},
    "cp_async": "cp_async",
}
TITLES = {"ours": "ours", "tma": "TMA", "scales": "TMA for scales only", "cp_async": "cp.async"}
#: What a profiler can be shown: the kernel that marlin_gemm chooses, or the portable one with a feed.
SUBJECTS = tuple(TITLES)


@contextlib.contextmanager
def portable_kernel() -> Iterator[None]:
    """Let marlin_gemm choose among the portable kernel's instances alone: the others know TMA only."""
    from cudatma.kernels.marlin import config, plan

    def choose(*problem: Any, batch_invariant: bool = False) -> Any:
        return config.choose_portable(*problem)

    chosen = vars(plan)["choose"]
    vars(plan)["choose"] = choose
    try:
        yield
    finally:
        vars(plan)["choose"] = chosen


def disassembled(spec: AnyMarlinSpec, target: Target) -> tuple[str, str]:
    """(SASS, ptxas' log) of a spec compiled for a target. Raises LookupError where nothing disassembles it."""
    from cudatma.build import load_kernel

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

    k, n = shape
    x = filled(cupy, (m, k), random_numbers(cupy, 1 << 20, dtype, 4))
    out = cupy.zeros((m, n), cupy.uint16).view(x.dtype)
    weight = random_packed(cupy, k, n, dtype, 1)[0]
    with contextlib.nullcontext() if subject == "ours" else portable_kernel():
        marlin_gemm(x, weight, out=out, feed=FEEDS.get(subject, "tma"))
    cupy.cuda.get_current_stream().synchronize()
