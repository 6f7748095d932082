"""Host cost of marlin_gemm(x, w, out=out), with x and out changing every call, and of torch.mm."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from benchmarks.harness import require_gpu
from benchmarks.operands import filled, random_numbers, random_packed, to_torch
from benchmarks.report import Cell, Result, Table, failure, print_table, shown

PAIRS = 64
CALLS = 10_000
#: Calls between two waits for the GPU, so that a full launch queue is never what is measured.
DRAIN_EVERY = 500
BAR_US = 10.0
_WARM_UP = 200
_CASES = (
    "CuPy",
    "CuPy, bias",
    "CuPy, named stream",
    "CuPy, out made by the call",
    "torch",
    "torch, bias",
    "torch.mm, fp16, out given",
)


def time_calls(
    call: Callable[[int], object],
    drain: Callable[[], object],
    calls: int = CALLS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[int]:
    """Nanoseconds of each ``call(i)``; ``drain()`` waits for the GPU every DRAIN_EVERY calls, outside the timing."""
    samples = [0] * calls
    for index in range(calls):
        if index % DRAIN_EVERY == 0:
            drain()
        begin = clock()
        call(index)
        samples[index] = clock() - begin
    drain()
    return samples


def quantiles_us(samples_ns: Sequence[int]) -> dict[str, float]:
    """Median, mean, least, 90th and 99th percentile, in microseconds."""
    ordered = sorted(samples_ns)
    at = {f"p{p}_us": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] / 1e3 for p in (90, 99)}
    return {
        "median_us": statistics.median(ordered) / 1e3,
        "mean_us": statistics.fmean(ordered) / 1e3,
        "least_us": ordered[0] / 1e3,
        **at,
    }


class Operands:
    """One packed weight, PAIRS of x and out, a bias: CuPy arrays, and torch tensors that share their memory."""

    def __init__(self, m: int, k: int, n: int) -> None:
        import cupy

        numbers = random_numbers(cupy, 1 << 20, "float16", 5)
        xs = filled(cupy, (PAIRS, m, k), numbers)
        outs, bias = cupy.zeros((PAIRS, m, n), cupy.float16), filled(cupy, (n,), numbers)
        self.weight = random_packed(cupy, k, n, "float16", 1)[0]
        self.xs, self.outs, self.bias = [xs[i] for i in range(PAIRS)], [outs[i] for i in range(PAIRS)], bias

    def case(self, name: str) -> Callable[[int], object]:
        """The call that a case times. Raises ImportError for a torch case without torch."""
        import cupy

        from cudatma import marlin_gemm

        xs, outs, bias, w = self.xs, self.outs, self.bias, self.weight
        if name.startswith("torch"):
            xs, outs, bias = [to_torch(x) for x in xs], [to_torch(out) for out in outs], to_torch(bias)
        if name.startswith("torch.mm"):
            return _torch_mm(xs, outs, w)
        if name.endswith("bias"):
            return lambda i: marlin_gemm(xs[i % PAIRS], w, out=outs[i % PAIRS], bias=bias)
        if name.endswith("made by the call"):
            return lambda i: marlin_gemm(xs[i % PAIRS], w)
        if name.endswith("named stream"):
            stream = cupy.cuda.Stream(non_blocking=True)
            return lambda i: marlin_gemm(xs[i % PAIRS], w, out=outs[i % PAIRS], stream=stream)
        return lambda i: marlin_gemm(xs[i % PAIRS], w, out=outs[i % PAIRS])


def _torch_mm(xs: list[Any], outs: list[Any], w: Any) -> Callable[[int], object]:
    import torch

    dense = torch.zeros(w.shape, dtype=xs[0].dtype, device=xs[0].device)
    return lambda i: torch.mm(xs[i % PAIRS], dense, out=outs[i % PAIRS])


def measure(operands: Operands, name: str, calls: int) -> Cell:
    """One case, without the garbage collector, which would stop a few calls for milliseconds."""
    import cupy

    try:
        call, drain = operands.case(name), cupy.cuda.Device().synchronize
        with _no_grad():
            time_calls(call, drain, _WARM_UP)
            gc.collect()
            gc.disable()
            try:
                samples = time_calls(call, drain, calls)
            finally:
                gc.enable()
    except Exception as error:
        return {"case": name, "error": failure(error)}
    return {"case": name, "calls": calls, **quantiles_us(samples)}


def _no_grad() -> Any:
    """Inference as torch's users run it; nothing where torch was not imported."""
    torch = sys.modules.get("torch")
    return torch.inference_mode() if torch else nullcontext()


def host_table(cells: Sequence[Cell]) -> Table:
    keys = ("median_us", "p90_us", "p99_us", "least_us")
    rows = [(c["case"], *(shown(c.get(key)) for key in keys)) for c in cells]
    note = f"Host microseconds of one call; {PAIRS} pairs of x and out in turn, nothing synchronised in between."
    return Table(("arrays", "median", "p90", "p99", "least"), tuple(rows), note)


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench host_cost``; returns the exit status: with --check 1 if the CuPy case's median is over 10 us."""
    parser = argparse.ArgumentParser(prog="cudatma bench host_cost", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--calls", type=int, default=CALLS, help=f"timed calls a case (default: {CALLS})")
    add("--m", type=int, default=1, help="rows of x (default: 1)")
    add("--check", action="store_true", help="exit status 1 if the CuPy case's median is over 10 us")
    options = parser.parse_args(argv)
    require_gpu(parser)
    k = n = 4096
    result = Result({"calls": options.calls, "m": options.m, "k": k, "n": n}, host_table, options.json)
    operands = Operands(options.m, k, n)
    for name in _CASES:
        cell = measure(operands, name, options.calls)
        result.add(cell, f"{name}: {shown(cell.get('median_us'))} us")
    print_table(result.console, host_table(result.cells), "Host cost")
    median = result.cells[0].get("median_us")
    held = median is not None and median <= BAR_US
    result.say(f"{'met' if held else 'missed'}: at most {BAR_US:g} us for marlin_gemm(x, w, out=out)")
    return int(options.check and not held)


if __name__ == "__main__":
    raise SystemExit(main())
