"""Time and peak memory of quantizing a dense weight, by library and type, the first call apart."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.report import Cell, Result, Table, failure, print_table, shown
from cudatma.quantization import quantize

LIBRARIES, TYPES = ("numpy", "cupy", "torch"), ("float16", "bfloat16", "float32")
REPEATS = 5
#: At most: milliseconds on a GPU and on a CPU of two cores, and bytes taken over bytes of the weight.
BAR_GPU_MS, BAR_CPU_MS, BAR_MEMORY = 50.0, 3000.0, 2.0


def weight_of(library: str, kind: str, k: int, n: int) -> Any:
    """A random weight (K, N) in an array of the library. Raises ImportError where it is not installed."""
    import ml_dtypes

    dense = np.random.default_rng(0).standard_normal((k, n), dtype=np.float32)
    if library == "torch":
        import torch

        return torch.from_numpy(dense).to("cuda", getattr(torch, kind))
    host = dense.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    if library == "numpy":
        return host
    import cupy

    return cupy.asarray(host)


def timed_ms(call: Callable[[], object]) -> float:
    """Until the result is there: quantize() waits for the GPU itself, because it reads the scales back."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def peak_bytes(call: Callable[[], object], library: str) -> int:
    """The most memory that the call takes where the weight is, its result included."""
    if library == "numpy":
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    import cupy

    pool = cupy.cuda.MemoryPool()  # gives nothing back while the call runs
    with cupy.cuda.using_allocator(pool.malloc):
        call()
        return int(pool.total_bytes())


def measure(library: str, kind: str, options: argparse.Namespace) -> Cell:
    cell: Cell = {"library": library, "dtype": kind}
    try:
        weight = weight_of(library, kind, options.k, options.n)

        def call() -> object:
            return quantize(weight, group_size=options.group_size, symmetric=not options.zeros)

        first = timed_ms(call)
        later = statistics.median(timed_ms(call) for _ in range(REPEATS))
        memory = peak_bytes(call, library) / (options.k * options.n * (4 if kind == "float32" else 2))
    except Exception as error:
        return {**cell, "error": failure(error)}
    bar = BAR_CPU_MS if library == "numpy" else BAR_GPU_MS
    return {**cell, "first_ms": first, "ms": later, "memory": memory, "met": later <= bar and memory <= BAR_MEMORY}


def quantize_table(cells: Sequence[Cell]) -> Table:
    keys = ("ms", "first_ms", "memory")
    rows = tuple((f"{c['library']}, {c['dtype']}", *(shown(c.get(key)) for key in keys)) for c in cells)
    note = "Median of calls after the first; peak memory of a call, its result included, over the bytes of the weight."
    return Table(("arrays", "ms", "ms, first call", "memory"), rows, note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench quantize``; returns the exit status: with --check 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="cudatma bench quantize", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--k", type=int, default=8192, help="rows of the weight (default: 8192)")
    add("--n", type=int, default=8192, help="columns of the weight (default: 8192)")
    add("--group-size", type=int, default=128, help="rows that share a scale (default: 128)")
    add("--zeros", action="store_true", help="with zero points")
    add("--libraries", default=",".join(LIBRARIES), help=f"of {','.join(LIBRARIES)} (default: all)")
    add("--check", action="store_true", help="exit status 1 if a bar is missed")
    options = parser.parse_args(argv)
    settings = {"k": options.k, "n": options.n, "group_size": options.group_size, "zeros": options.zeros}
    result = Result(settings, quantize_table, options.json)
    for library in options.libraries.split(","):
        for kind in TYPES:
            cell = measure(library, kind, options)
            result.add(cell, f"{library}, {kind}: {shown(cell.get('ms'))} ms")
    print_table(result.console, quantize_table(result.cells), "Quantizing a weight")
    missed = [f"{c['library']}, {c['dtype']}" for c in result.cells if not c.get("met")]
    bars = f"at most {BAR_GPU_MS:g} ms on a GPU, {BAR_CPU_MS:g} ms on a CPU, {BAR_MEMORY:g} times the weight's bytes"
    result.say(f"missed by {'; '.join(missed)}: {bars}" if missed else f"met: {bars}")
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
