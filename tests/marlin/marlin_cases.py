"""The Marlin GEMM's cases on a GPU: the matrix of all shapes and options, run against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from marlin_operands import (
    DTYPES,
    LOAD_PATHS,
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
from cudatma.kernels.marlin.candidates import choose_mma_sync
from cudatma.kernels.marlin.choose import decide
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem

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
    """A weight with load paths and values of M, of which every combination is run. ``options.load_path`` is ignored."""

    k: int
    n: int
    options: Options
    load_paths: tuple[str, ...]
    m_values: tuple[int, ...] = M_VALUES

    def __str__(self) -> str:
        o = self.options
        parts = [f"{self.k}x{self.n}", o.format, o.dtype, f"g{o.group_size}", "symmetric" if o.symmetric else "zeros"]
        parts += ["act_order"] * o.act_order + ["bias"] * o.bias
        return "-".join(parts + [load_path.replace(" ", "_") for load_path in self.load_paths])


def run(weight: Weight, x: Any, reference: Any, load_path: str, bias: Any = None) -> Outcome:
    """One GEMM into a poisoned buffer that is longer than the result."""
    rows = x.shape[0]
    buffer = poisoned((rows + GUARD_ROWS, weight.packed.shape[1]), weight.packed.dtype)
    out = buffer[:rows]
    with use_load_path(weight.packed, rows, load_path):
        result = marlin_gemm(x, weight.packed, out=out, bias=bias)
    if result is not out:
        raise AssertionError("marlin_gemm returned another array than out")
    return compare(out, reference, is_poison(buffer[rows:]))


def run_job(job: Job) -> Iterator[tuple[str, int, Outcome]]:
    """Yield (load path, M, outcome) for every case of a job. A smaller batch consists of the first rows of a larger
    one."""
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
    """Return rows such that any two values of two factors occur together in at least one row. The search is greedy and
    deterministic."""
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
    """Return jobs for every shape with every M, by TMA and by another load path. The options rotate over the shapes."""
    turns = itertools.product((True, False), GROUP_SIZES, DTYPES)
    others = itertools.cycle([load_path for load_path in LOAD_PATHS if load_path != "tma"])
    return [
        Job(k, n, Options(dtype, group_size, symmetric), ("tma", other))
        for (k, n), (symmetric, group_size, dtype), other in zip(SHAPES, turns, others, strict=False)
    ]


def pairwise_jobs() -> list[Job]:
    """Return jobs for every pair of options, including act-order and bias, with two shapes and two values of M."""
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


def configs_of(jobs: Iterable[Job], gpu: Gpu) -> list[MarlinConfig]:
    """Return the configs that the jobs need, without duplicates."""
    found: dict[MarlinConfig, None] = {}
    for job in jobs:
        o = job.options
        layer = LinearShape(job.k, job.n, o.group_size, not o.symmetric, o.dtype, o.format)
        for load_path, m in itertools.product(job.load_paths, job.m_values):
            if m:
                by_tma = load_path == "tma"
                config = (
                    decide(Problem(layer, m), gpu).config
                    if by_tma
                    else choose_mma_sync(Problem(layer, m), gpu, **LOAD_PATHS[load_path])
                )
                form = "as_stored" if o.format == "int4" else "none"  # make_weight()'s scales allow it
                found[config.in_form(form)] = None
    return list(found)


def precompile(jobs: Iterable[Job]) -> int:
    """Compile the kernels of the jobs in parallel, and return their number."""
    target = detect()
    configs = configs_of(jobs, gpu_of(0))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda config: load_kernel(config.template, config, target), configs))
    return len(configs)


def free_memory() -> None:
    """Free the arrays of previous cases, because some references take gigabytes."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
