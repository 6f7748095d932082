"""The Marlin GEMM's cases on a GPU: the matrix of all shapes and options, run against float64.

As a script it runs the whole matrix and prints a summary: ``python tests/gpu/marlin_cases.py --json FILE``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import Problem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest does; a script finds only its own folder

from marlin_operands import (
    DTYPES,
    LOAD_PATHS,
    TOLERANCE,
    Options,
    Outcome,
    Weight,
    activations,
    compare,
    is_poison,
    make_bias,
    make_weight,
    poisoned,
    to_float64,
    use_load_path,
)

from cudatma import detect, marlin_gemm
from cudatma.build.kernel import load_kernel
from cudatma.kernels.gpu import Gpu, gpu_of
from cudatma.kernels.marlin.choose import decide
from cudatma.kernels.marlin.problem import LinearShape

ROOT = Path(__file__).resolve().parents[2]
M_VALUES = (0, 1, 2, 7, 16, 17, 64, 100, 128, 333, 1024, 4096)
#: (K, N). Odd ones, tails of every tile, one value, a last one that is large enough for every tile of the table.
SHAPES = (
    *((10944, 2048), (4096, 7392), (333, 77), (64, 64), (1000, 136), (96, 40), (1, 1), (127, 65)),
    *((2048, 2048), (4096, 4096), (8192, 1024), (4608, 3584), (200, 4097), (576, 12288), (8192, 12288)),
)
GROUP_SIZES = (32, 64, 128, -1)
GUARD_ROWS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """One weight, its load paths and its values of M, each with each. ``options.load_path`` is ignored."""

    k: int
    n: int
    options: Options
    load_paths: tuple[str, ...]
    m_values: tuple[int, ...] = M_VALUES

    def __str__(self) -> str:
        o = self.options
        parts = [f"{self.k}x{self.n}", o.dtype, f"g{o.group_size}", "symmetric" if o.symmetric else "zeros"]
        parts += ["act_order"] * o.act_order + ["bias"] * o.bias
        return "-".join(parts + [load_path.replace(" ", "_") for load_path in self.load_paths])


def run(weight: Weight, x: Any, reference: Any, load_path: str, bias: Any = None) -> Outcome:
    """One GEMM into a poisoned buffer that is longer than the result."""
    rows = x.shape[0]
    buffer = poisoned((rows + GUARD_ROWS, weight.packed.shape[1]), weight.packed.dtype)
    out = buffer[:rows]
    with use_load_path(weight.packed, rows, load_path):
        result = marlin_gemm(x, weight.packed, out, bias)
    if result is not out:
        raise AssertionError("marlin_gemm returned another array than out")
    return compare(out, reference, is_poison(buffer[rows:]))


def run_job(job: Job) -> Iterator[tuple[str, int, Outcome]]:
    """Every case of a job as (load path, M, outcome). The rows of a smaller batch are the first of a larger one."""
    options = job.options
    weight = make_weight(job.k, job.n, options)
    x = activations((max(job.m_values), job.k), options.dtype)
    reference = to_float64(x) @ weight.dense
    bias = make_bias(job.n, options.dtype) if options.bias else None
    if bias is not None:
        reference += to_float64(bias)
    for load_path, m in itertools.product(job.load_paths, job.m_values):
        yield load_path, m, run(weight, x[:m], reference[:m], load_path, bias)


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows such that any two values of two factors meet in one of them; greedy and deterministic."""
    names = list(factors)
    missing = {(a, u, b, v): None for a, b in itertools.combinations(names, 2) for u in factors[a] for v in factors[b]}
    rows: list[dict[str, Any]] = []
    while missing:
        first, u, second, v = next(iter(missing))
        row = {first: u, second: v}
        for name in names:
            if name not in row:
                row[name] = max(factors[name], key=lambda value: _gain(row | {name: value}, names, missing))
        rows.append(row)
        for a, b in itertools.combinations(names, 2):
            missing.pop((a, row[a], b, row[b]), None)
    return rows


def _gain(row: Mapping[str, Any], names: Sequence[str], missing: Mapping[Any, None]) -> int:
    chosen = [name for name in names if name in row]
    return sum((a, row[a], b, row[b]) in missing for a, b in itertools.combinations(chosen, 2))


def rotated_jobs() -> list[Job]:
    """Every shape with every M, by TMA and another load path; the options rotate over the shapes."""
    turns = itertools.product((True, False), GROUP_SIZES, DTYPES)
    others = itertools.cycle([load_path for load_path in LOAD_PATHS if load_path != "tma"])
    return [
        Job(k, n, Options(dtype, group_size, symmetric), ("tma", other))
        for (k, n), (symmetric, group_size, dtype), other in zip(SHAPES, turns, others, strict=False)
    ]


def pairwise_jobs() -> list[Job]:
    """Any two options together, act-order and bias among them, at two shapes and two values of M."""
    factors = {
        "group_size": GROUP_SIZES,
        "load_path": tuple(LOAD_PATHS),
        "dtype": DTYPES,
        "symmetric": (True, False),
        "act_order": (False, True),
        "bias": (False, True),
    }
    rows = [Options(**row) for row in pairwise(factors)]
    return [Job(k, n, row, (row.load_path,), (7, 100)) for k, n in ((1000, 136), (2048, 1024)) for row in rows]


def full_jobs() -> list[Job]:
    """Every shape x M x dtype x group size x symmetric or zero points x three load paths, and the pairwise rows."""
    load_paths = ("tma", "cp_async", "scale by cp_async")
    product = itertools.product(SHAPES, DTYPES, GROUP_SIZES, (True, False))
    return [Job(k, n, Options(d, g, s), load_paths) for (k, n), d, g, s in product] + pairwise_jobs()


def specs_of(jobs: Iterable[Job], gpu: Gpu) -> list[MarlinConfig]:
    """The kernels that jobs will ask for, each once."""
    found: dict[MarlinConfig, None] = {}
    for job in jobs:
        o = job.options
        layer = LinearShape(job.k, job.n, o.group_size, not o.symmetric, o.dtype)
        for load_path, m in itertools.product(job.load_paths, job.m_values):
            if m:
                by_tma = load_path == "tma"
                spec = (
                    decide(Problem(layer, m), gpu).spec
                    if by_tma
                    else choose_mma_sync(Problem(layer, m), gpu, **LOAD_PATHS[load_path])
                )
                found[spec.in_form("as_stored")] = None  # make_weight()'s scales allow it
    return list(found)


def precompile(jobs: Iterable[Job]) -> int:
    """Compile what jobs need, many kernels at a time; how many there are."""
    target = detect()
    specs = specs_of(jobs, gpu_of(0))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: load_kernel(spec.template, spec, target), specs))
    return len(specs)


def free_memory() -> None:
    """Give the arrays of the cases so far back: references of some take gigabytes."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


class Summary:
    """Gathers the outcomes of many jobs."""

    def __init__(self) -> None:
        self.cases = 0
        self.failures: list[str] = []
        self.worst: dict[str, dict[str, Any]] = {}
        self.table: dict[str, dict[str, float]] = {}

    def add(self, job: Job, load_path: str, m: int, outcome: Outcome) -> None:
        dtype, case = job.options.dtype, f"M={m} {replace(job, load_paths=(load_path,))}"
        self.cases += 1
        if problem := outcome.problem(dtype):
            self.failures.append(f"{case}: {problem}")
        worst = self.worst.setdefault(f"{dtype}, {load_path}", {"cases": 0, "error": 0.0, "case": ""})
        worst["cases"] += 1
        # Not "greater than": a NaN should replace what is there.
        if not outcome.error <= worst["error"]:
            worst |= {"error": outcome.error, "case": case}
        row = self.table.setdefault(f"{job.k}x{job.n}", dict.fromkeys(DTYPES, 0.0))
        row[dtype] = row[dtype] if outcome.error <= row[dtype] else outcome.error

    def print(self) -> None:
        print(f"{'K x N':>14}" + "".join(f"{dtype:>12}" for dtype in DTYPES))
        for shape, errors in self.table.items():
            print(f"{shape:>14}" + "".join(f"{errors[dtype]:12.2e}" for dtype in DTYPES))
        for name, row in self.worst.items():
            print(f"{name}: worst of {row['cases']} cases {row['error']:.2e} ({row['case']})")
        for failure in self.failures[:40]:
            print(f"FAILED {failure}")
        print(f"{self.cases} cases, {len(self.failures)} failures")


def machine() -> dict[str, Any]:
    import cupy

    from cudatma.build.nvrtc import nvrtc_version

    runtime = cupy.cuda.runtime
    return {
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "cupy": cupy.__version__,
        "python": sys.version.split()[0],
    }


def commit() -> str:
    """The checkout's commit; "unknown" where there is no repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here as well")
    parser.add_argument("--quick", action="store_true", help="the cases of the test suite instead of the product")
    parser.add_argument("--commit", default=None, help="what to note as the commit, where this is no git checkout")
    options = parser.parse_args()
    jobs = rotated_jobs() + pairwise_jobs() if options.quick else full_jobs()
    start = time.perf_counter()
    kernels = precompile(jobs)
    print(f"{kernels} kernels compiled or found in {time.perf_counter() - start:.1f} s", flush=True)
    summary = Summary()
    for job in jobs:
        for load_path, m, outcome in run_job(job):
            summary.add(job, load_path, m, outcome)
        free_memory()
    summary.print()
    seconds = round(time.perf_counter() - start, 1)
    print(f"{seconds} s")
    if options.json is not None:
        facts = {"machine": machine(), "commit": options.commit or commit(), "cases": summary.cases}
        facts |= {"kernels": kernels, "seconds": seconds, "tolerance": TOLERANCE, "failures": summary.failures}
        facts |= {"worst": summary.worst, "table": summary.table}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
