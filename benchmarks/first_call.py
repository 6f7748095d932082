"""Time the first call in a new process with a cold and a warm cache. Without a GPU, only the compilation is timed."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # The checkout need not be installed.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.report import ROOT, Cell, Result, Table, failure, make_parser, shown
from cudatma.backend import selected_backend

K, N = 8192, 28672
M_VALUES = (1, 1024)
WARM_RUNS = 5
_TIMEOUT_S = 120
#: Steps that a child process times, with their names in the table.
_STEPS = ("load", "module", "call", "second call")
_LABELS = {
    "load": "load_kernel: render, compile or find the artifact",
    "module": "onto the device",
    "call": "marlin_gemm: plan, workspace and launch, until the result is available",
    "second call": "marlin_gemm again, until the result is available",
}


def child(m: int, target_name: str | None) -> dict[str, Any]:
    """Return the milliseconds of each step and of the compiler in a new process, after imports.

    If a target is given, no GPU is used.
    """
    from cudatma.build.kernel import load_kernel
    from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
    from cudatma.kernels.marlin.choose import decide
    from cudatma.kernels.marlin.problem import LinearShape, Problem
    from cudatma.target import detect, get_target

    layer, call = LinearShape(K, N, 128, False, "float16"), None
    if target_name is None:
        call, device = _prepared(m)
    target = detect() if target_name is None else get_target(target_name)
    import cuda.bindings.nvrtc  # noqa: F401  (imported before timing)

    times: dict[str, Any] = {}
    begin = time.perf_counter()
    gpu = imagined_gpu(target, H200.sm_count) if call is None else gpu_of(device)
    # The weight of _prepared() has scales of similar size, so the kernel uses the form "as_stored".
    config = decide(Problem(layer, m), gpu).config.in_form("as_stored")
    kernel = load_kernel(config.template, config, target)
    times["load"] = _ms_since(begin)
    if call is not None:
        begin = time.perf_counter()
        kernel.load()
        times["module"] = _ms_since(begin)
        for step in _STEPS[2:]:
            begin = time.perf_counter()
            call()
            times[step] = _ms_since(begin)
    if kernel.folder is not None:
        times["compile"] = 1e3 * json.loads((kernel.folder / "config.json").read_text())["seconds"]
    return times


def _prepared(m: int) -> tuple[Any, int]:
    """Create a context and arrays. Return a function that calls marlin_gemm and waits, and the device."""
    import cupy

    from benchmarks.operands import random_packed
    from cudatma import context, marlin_gemm

    weight = random_packed(cupy, K, N, "float16", 1)[0]
    x, out = cupy.ones((m, K), cupy.float16), cupy.zeros((m, N), cupy.float16)
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()

    def call() -> None:
        marlin_gemm(x, weight, out=out)
        stream.synchronize()

    return call, context.current_device()


def _ms_since(begin: float) -> float:
    return 1e3 * (time.perf_counter() - begin)


def run_child(m: int, target_name: str | None, cache: Path) -> dict[str, Any]:
    """Run child() in a new process with this artifact cache. Raises RuntimeError with the last line of stderr."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(m)]
    command += ["--target", target_name] if target_name else []
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "CUDATMA_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if process.returncode:
        words = process.stderr.strip().splitlines()
        raise RuntimeError(f"child exited with status {process.returncode}: {words[-1] if words else 'no message'}")
    times: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return times


def measure(m: int, target_name: str | None, warm_runs: int) -> Cell:
    """Measure one process with an empty cache, and the medians of ``warm_runs`` processes with the filled cache."""
    cell: Cell = {"m": m, "k": K, "n": N}
    try:
        with tempfile.TemporaryDirectory(prefix="cudatma-first-call-") as folder:
            cold = run_child(m, target_name, Path(folder))
            warm = [run_child(m, target_name, Path(folder)) for _ in range(warm_runs)]
    except Exception as error:
        return cell | {"error": failure(error)}
    cell["compile_ms"] = cold.get("compile")
    cell["cold_ms"] = {step: cold[step] for step in _STEPS if step in cold}
    cell["warm_ms"] = {step: statistics.median(run[step] for run in warm) for step in _STEPS if step in cold}
    return cell


def first_call_table(cells: Sequence[Cell]) -> Table:
    rows: list[tuple[str, str, str, str]] = []
    for cell in cells:
        if cell.get("error"):
            continue
        m_values = f"M = {cell['m']}"
        rows.append((f"{m_values}: NVRTC alone", "", shown(cell["compile_ms"], 0), ""))
        for step, label in _LABELS.items():
            if step in cell["cold_ms"]:
                rows.append((m_values, label, shown(cell["cold_ms"][step]), shown(cell["warm_ms"][step])))
    note = "Milliseconds in a fresh process after the imports, in this order. Warm: the artifact is on disk (median)."
    return Table(("kernel", "step", "cold cache", "warm cache"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cudatma bench first_call`` and return the exit status (1 if a process failed)."""
    parser = make_parser("first_call", __doc__)
    add = parser.add_argument
    add(
        "--target",
        metavar="NAME",
        help="compile for this architecture without using a GPU (default if there is no GPU: sm_90a)",
    )
    add("--m", type=int, action="append", metavar="M", help="number of rows of x, repeatable (default: 1 and 1024)")
    add(
        "--warm-runs", type=int, default=WARM_RUNS, help=f"number of processes with a warm cache (default: {WARM_RUNS})"
    )
    add("--child", type=int, metavar="M", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        print(json.dumps(child(options.child, options.target)))
        return 0
    target = options.target or (None if selected_backend() == "cuda" else "sm_90a")
    result = Result({"target": target or "the GPU's", "k": K, "n": N}, first_call_table, options.json)
    for m in options.m or M_VALUES:
        cell = measure(m, target, options.warm_runs)
        warm = cell.get("warm_ms", {}).get("load")
        result.add(cell, f"M = {m}: compile {shown(cell.get('compile_ms'), 0)} ms, warm load {shown(warm)} ms")
    return result.finish("First call")


if __name__ == "__main__":
    raise SystemExit(main())
