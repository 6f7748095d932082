"""What torch's dispatcher adds to a call: operators over direct calls, and the time to the first result."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout need not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import require_gpu
from benchmarks.host_cost import quantiles_us, time_calls
from benchmarks.report import ROOT, Cell, Result, Table, failure, print_table, shown

K, N = 4096, 4096
CALLS, ROUNDS, PROCESSES = 2000, 7, 5
BAR_OVERHEAD_US, BAR_FIRST_S = 8.0, 2.0
_WARM_UP = 200
_TIMEOUT_S = 300

Call = Callable[[int], object]


def pairs(device: str, k: int = K, n: int = N) -> dict[str, tuple[Call, Call]]:
    """Case -> (the direct call, the same by torch's dispatcher), of one row of x, or one query."""
    import torch

    import cudatma
    from cudatma.integrations.torch import MarlinLinear
    from cudatma.integrations.torch.weights import packed_weight

    layer = _layer(MarlinLinear, device, k, n)
    tensors = (layer.qweight, layer.scales, None, None)
    parts = (*tensors, None, k, n, 128)
    weight = packed_weight(*tensors, k, n, 128)
    half = {"dtype": torch.float16, "device": device}
    x, out = torch.ones((1, k), **half), torch.empty((1, n), **half)
    a, b, c = torch.ones((64, 256), **half), torch.ones((256, 128), **half), torch.empty((64, 128), **half)
    q, to = torch.ones((1, 64, 8, 64), **half), torch.empty((1, 64, 8, 64), **half)
    ops = torch.ops.cudatma
    marlin, marlin_out = ops.marlin_gemm.default, ops.marlin_gemm_out.default
    return {
        "marlin_gemm, out given": (
            lambda i: cudatma.marlin_gemm(x, weight, out=out),
            lambda i: marlin_out(x, *parts, out=out),
        ),
        "marlin_gemm": (lambda i: cudatma.marlin_gemm(x, weight), lambda i: marlin(x, *parts)),
        "MarlinLinear": (lambda i: cudatma.marlin_gemm(x, weight), lambda i: layer(x)),
        "gemm, out given": (lambda i: cudatma.gemm(a, b, out=c), lambda i: ops.gemm_out.default(a, b, out=c)),
        "attention, out given": (
            lambda i: cudatma.attention(q, q, q, out=to),
            lambda i: ops.attention_out.default(q, q, q, out=to),
        ),
    }


def _layer(kind: Any, device: str, k: int, n: int) -> Any:
    """A MarlinLinear without bias, of any values."""
    layer = kind(k, n, False, device=device)
    layer.qweight.fill_(0x79)
    layer.scales.fill_(0.01)
    return layer


def measure(case: str, direct: Call, operator: Call, drain: Callable[[], object], calls: int, rounds: int) -> Cell:
    """Both in turns; quantiles of all calls of each, and the difference of the medians."""
    samples: dict[str, list[int]] = {"direct": [], "operator": []}
    try:
        for call in (direct, operator):
            time_calls(call, drain, _WARM_UP)
        gc.collect()
        gc.disable()
        try:
            for _ in range(rounds):
                samples["direct"] += time_calls(direct, drain, calls)
                samples["operator"] += time_calls(operator, drain, calls)
        finally:
            gc.enable()
    except Exception as error:
        return {"case": case, "error": failure(error)}
    found = {name: quantiles_us(times) for name, times in samples.items()}
    overhead = found["operator"]["median_us"] - found["direct"]["median_us"]
    return {"case": case, "calls": calls * rounds, **found, "overhead_us": overhead}


def child(device: str, k: int, n: int) -> float:
    """Seconds from ``import torch`` done to the first result of a layer, in a fresh process."""
    import torch

    begin = time.perf_counter()
    from cudatma.integrations.torch import MarlinLinear

    with torch.inference_mode():
        _layer(MarlinLinear, device, k, n)(torch.ones((1, k), dtype=torch.float16, device=device))
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def first_result(device: str, k: int, n: int, processes: int) -> Cell:
    """child() with an empty cache of kernels, then with what that left: the median of several processes."""
    cell: Cell = {"case": "first result", "device": device}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", device, str(k), str(n)]
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    try:
        with tempfile.TemporaryDirectory(prefix="cudatma-torch-ops-") as cache:
            environment = {**os.environ, "CUDATMA_CACHE_DIR": cache, "PYTHONPATH": paths}
            times = []
            for _ in range(1 + processes):
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
                )
                if done.returncode:
                    words = done.stderr.strip().splitlines()
                    raise RuntimeError(f"child ended with {done.returncode}: {words[-1] if words else 'no message'}")
                times.append(float(json.loads(done.stdout.strip().splitlines()[-1])))
    except Exception as error:
        return cell | {"error": failure(error)}
    return cell | {"cold_s": times[0], "warm_s": statistics.median(times[1:])}


def torch_table(cells: Sequence[Cell]) -> Table:
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        if "overhead_us" in cell:
            medians = (shown(cell[name]["median_us"]) for name in ("direct", "operator"))
            rows.append((cell["case"], *medians, shown(cell["overhead_us"])))
    first = next((cell for cell in cells if "warm_s" in cell), None)
    note = "Host microseconds of a call (medians), in turns."
    if first:
        note += f" From `import torch` done to the first result: {first['warm_s']:.2f} s with a warm cache,"
        note += f" {first['cold_s']:.2f} s with an empty one."
    return Table(("call", "direct", "operator", "difference"), tuple(rows), note)


def misses(cells: Sequence[Cell]) -> list[str]:
    """What is over the bars: 8 us of overhead, 2 s to the first result; a cell that failed is a miss too."""
    found = []
    for cell in cells:
        if cell.get("error"):
            found.append(f"{cell['case']}: {cell['error']}")
        elif cell.get("overhead_us", 0.0) > BAR_OVERHEAD_US:
            found.append(f"{cell['case']}: {cell['overhead_us']:.2f} us, wanted at most {BAR_OVERHEAD_US:g}")
        elif cell.get("warm_s", 0.0) > BAR_FIRST_S:
            found.append(f"{cell['case']}: {cell['warm_s']:.2f} s, wanted at most {BAR_FIRST_S:g}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """``cudatma bench torch_ops``; returns the exit status: with --check 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="cudatma bench torch_ops", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the results there")
    add("--calls", type=int, default=CALLS, help=f"timed calls of a round (default: {CALLS})")
    add(
        "--check", action="store_true", help="exit status 1 if an operator adds over 8 us or the first result needs 2 s"
    )
    add("--child", nargs=3, metavar=("DEVICE", "K", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        device, k, n = options.child
        print(json.dumps(child(device, int(k), int(n))))
        return 0
    require_gpu(parser)
    import torch

    result = Result({"calls": options.calls, "rounds": ROUNDS, "k": K, "n": N}, torch_table, options.json)
    with torch.inference_mode():
        for case, (direct, operator) in pairs("cuda").items():
            cell = measure(case, direct, operator, torch.cuda.synchronize, options.calls, ROUNDS)
            result.add(cell, f"{case}: {shown(cell.get('overhead_us'))} us more than the direct call")
    cell = first_result("cuda", K, N, PROCESSES)
    result.add(cell, f"first result: {shown(cell.get('warm_s'))} s with a warm cache")
    print_table(result.console, torch_table(result.cells), "torch operators")
    missed = misses(result.cells)
    result.say("\n".join(missed) if missed else "met: at most 8 us over a direct call, first result within 2 s")
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
