"""The first call in a fresh process: cold cache, warm cache, compile time. Without a GPU it stops at the cubin."""

from __future__ import annotations

import sys
from pathlib import Path

from cudatma.kernels.marlin.problem import Problem

if __name__ == "__main__":  # the checkout need not be installed
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

from benchmarks.report import ROOT, Cell, Result, Table, failure, print_table, shown
from cudatma.backend import selected_backend

K, N = 8192, 28672
M_VALUES = (1, 1024)
WARM_RUNS = 5
BARS_MS = {"compile": 2000.0, "load, warm cache": 10.0}
_TIMEOUT_S = 120
#: What a child prints -> what it is called in the table, for a cold and for a warm cache.
_STEPS = ("load", "module", "call", "second call")
_LABELS = {
    "load": "load_kernel: render, compile or find the artifact",
    "module": "onto the device",
    "call": "marlin_gemm: plan, workspace, launch, until the result is there",
    "second call": "marlin_gemm again, until the result is there",
}


def child(m: int, target_name: str | None) -> dict[str, Any]:
    """In a fresh process: milliseconds of each step, imports and the weight excluded; compile seconds of the artifact.

    With a target named, nothing touches a GPU.
    """
    from cudatma.build.kernel import load_kernel
    from cudatma.kernels.gpu import H200, gpu_of, imagined_gpu
    from cudatma.kernels.marlin.choose import decide, resolve_fused
    from cudatma.kernels.marlin.problem import LinearShape
    from cudatma.target import detect, get_target

    layer, call = LinearShape(K, N, 128, False, "float16"), None
    if target_name is None:
        call, device = _prepared(m)
    target = detect() if target_name is None else get_target(target_name)
    import cuda.bindings.nvrtc  # noqa: F401  imports are not what is timed

    times: dict[str, Any] = {}
    begin = time.perf_counter()
    gpu = imagined_gpu(target, H200.sm_count) if call is None else gpu_of(device)
    # As the weight of _prepared() has it, whose scales differ by little.
    spec = resolve_fused(decide(Problem(layer, m), gpu).spec, "as_stored")
    kernel = load_kernel(spec.template, spec, target)
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
        times["compile"] = 1e3 * json.loads((kernel.folder / "spec.json").read_text())["seconds"]
    return times


def _prepared(m: int) -> tuple[Any, int]:
    """A call of marlin_gemm that waits for its result, and its device; context and arrays are made."""
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
    """child() in a process of its own, whose artifact cache is ``cache``. Raises RuntimeError with its last words."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(m)]
    command += ["--target", target_name] if target_name else []
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "CUDATMA_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise RuntimeError(f"child ended with {done.returncode}: {words[-1] if words else 'no message'}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(m: int, target_name: str | None, warm_runs: int) -> Cell:
    """One cold process and ``warm_runs`` warm ones over the same, at first empty, cache; medians of the warm ones."""
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
    note = "Milliseconds in a fresh process, imports done, in this order; warm: the artifact is on disk (median)."
    return Table(("kernel", "step", "cold cache", "warm cache"), tuple(rows), note)


def misses(cells: Sequence[Cell]) -> list[str]:
    """What stays over the bars: 2 s of compilation, 10 ms for a warm load; a cell that failed is a miss too."""
    found = []
    for cell in cells:
        if cell.get("error"):
            found.append(f"M = {cell['m']}: {cell['error']}")
            continue
        values = {"compile": cell["compile_ms"], "load, warm cache": cell["warm_ms"]["load"]}
        for name, limit in BARS_MS.items():
            if values[name] is None or values[name] > limit:
                found.append(f"M = {cell['m']}: {name}: {shown(values[name])} ms, wanted at most {limit:g}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench first_call``; returns the exit status: with --check 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="cudatma bench first_call", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--target", metavar="NAME", help="compile for this architecture and use no GPU (default without one: sm_90a)")
    add("--m", type=int, action="append", metavar="M", help="rows of x, repeatable (default: 1 and 1024)")
    add("--warm-runs", type=int, default=WARM_RUNS, help=f"processes with a warm cache (default: {WARM_RUNS})")
    add("--check", action="store_true", help="exit status 1 if compiling or a warm load takes too long")
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
    print_table(result.console, first_call_table(result.cells), "First call")
    missed = misses(result.cells)
    result.say("\n".join(missed) if missed else "met: compilation in 2 s, warm load in 10 ms")
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
