"""The Marlin GEMM's cases on a card: weights of known integers, float64 references, and the matrix of all options.

As a script it runs the whole matrix and prints a summary: ``python tests/gpu/marlin_cases.py --json FILE``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest does; a script finds only its own folder

from cudatma import detect, marlin_gemm
from cudatma.build import load_kernel
from cudatma.dtypes import activation_type
from cudatma.kernels.marlin.config import Feeds, Layer, choose, parse_feeds
from cudatma.kernels.marlin.plan import TEMPLATE
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.quantization import PackedWeight, pack
from cudatma.target import Target

ROOT = Path(__file__).resolve().parents[2]
TOKENS = (0, 1, 2, 7, 16, 17, 64, 100, 128, 333, 1024, 4096)
#: (K, N). Odd ones, tails of every tile, one value, a last one that is large enough for every tile of the table.
SHAPES = (
    *((10944, 2048), (4096, 7392), (333, 77), (64, 64), (1000, 136), (96, 40), (1, 1), (127, 65)),
    *((2048, 2048), (4096, 4096), (8192, 1024), (4608, 3584), (200, 4097), (576, 12288), (8192, 12288)),
)
DTYPES = ("float16", "bfloat16")
GROUP_SIZES = (32, 64, 128, -1)
FEEDS: dict[str, str | dict[str, str]] = {
    "tma": "tma",
    "cp_async": "cp_async",
    "scale by cp_async": {"scale": "cp_async"},
    "weight by cp_async": {"weight": "cp_async"},
    "activation by cp_async": {"activation": "cp_async"},
}
#: ||out - reference|| / ||reference||.
TOLERANCE = {"float16": 1e-3, "bfloat16": 6e-3}
#: Of one element: (in units of the reference's root mean square, relative to the element). One wrong element in a large
#: result would not show in the norm. The second is two roundings, of the weight and of the result.
ELEMENT_TOLERANCE = {"float16": (5e-3, 2.0**-10), "bfloat16": (4e-2, 2.0**-7)}
#: A NaN in both types: what a kernel forgets to write, or reads where it should not, spoils the norm.
POISON = 0xFFFF
GUARD_ROWS = 3
#: Random values are taken in turn from a pool whose length is prime, so that no two rows or columns are equal.
_POOL_ELEMS = 1_048_573
#: Keeps 0 / 0 from being a NaN where a reference is zero altogether, as a 1 x 1 weight may be.
_TINY = 1e-200


@dataclass(frozen=True, slots=True)
class Options:
    """Everything but the shape. feed: a key of FEEDS."""

    dtype: str = "float16"
    group_size: int = 128
    symmetric: bool = True
    feed: str = "tma"
    act_order: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One weight, its feeds and its numbers of tokens: feeds x tokens cases. ``options.feed`` is not looked at."""

    k: int
    n: int
    options: Options
    feeds: tuple[str, ...]
    tokens: tuple[int, ...] = TOKENS

    def __str__(self) -> str:
        o = self.options
        parts = [f"{self.k}x{self.n}", o.dtype, f"g{o.group_size}", "symmetric" if o.symmetric else "zeros"]
        parts += ["act_order"] * o.act_order + ["bias"] * o.bias
        return "-".join(parts + [feed.replace(" ", "_") for feed in self.feeds])


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """packed: on the card. dense: the same values as float64 (K, N) in the order of the activations' columns, computed
    from the integers that were packed and not from the packed layout."""

    packed: PackedWeight
    dense: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """error: relative, in norm. element: the worst element's error as a part of what is allowed. untouched: whether the
    rows behind the result kept their poison."""

    error: float
    element: float
    untouched: bool

    def problem(self, dtype: str) -> str:
        """What is wrong; empty if nothing is. A NaN is greater than any tolerance."""
        found = [] if self.untouched else ["rows behind the result were written"]
        if not self.error <= TOLERANCE[dtype]:
            found.append(f"relative error {self.error:.3g}, allowed {TOLERANCE[dtype]:g}")
        if not self.element <= 1:
            found.append(f"one element is off by {self.element:.3g} times what is allowed")
        return "; ".join(found)


@lru_cache(maxsize=4)
def _pool(kind: str) -> Any:
    """On the card: "values": uint8 0..15; a dtype's name: the bits of normal values of that type."""
    import cupy

    rng = np.random.default_rng(20)
    if kind == "values":
        return cupy.asarray(rng.integers(0, 16, _POOL_ELEMS, dtype=np.uint8))
    normal = rng.standard_normal(_POOL_ELEMS, dtype=np.float32)
    return cupy.asarray(normal.astype(activation_type(kind).numpy).view(np.uint16))


def _drawn(kind: str, shape: tuple[int, ...], seed: int) -> Any:
    import cupy

    places = cupy.arange(math.prod(shape), dtype=np.int64) + 7919 * seed
    return _pool(kind)[places % _POOL_ELEMS].reshape(shape)


def activations(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Normal values on the card."""
    return _drawn(dtype, shape, seed).view(activation_type(dtype).numpy)


def make_weight(k: int, n: int, options: Options = Options(), seed: int = 0) -> Weight:
    """Random integers, scales that differ by up to three times and bring results near 1, zero points 0..16."""
    import cupy

    rng = np.random.default_rng((k, n, seed))
    groups = 1 if options.group_size == -1 else -(-k // options.group_size)
    q = _drawn("values", (k, n), seed)
    scales = rng.uniform(0.5, 1.5, (groups, n)) / (4.8 * math.sqrt(k))
    scales = scales.astype(activation_type(options.dtype).numpy)
    zeros = None if options.symmetric else rng.integers(0, 17, (groups, n), dtype=np.uint8)
    perm = rng.permutation(k) if options.act_order else None
    packed = pack(q, scales, zeros, group_size=options.group_size, perm=perm)
    dense = q.astype(np.float64)
    size = k if groups == 1 else options.group_size
    for group in range(groups):
        rows = dense[group * size : (group + 1) * size]
        rows -= 8 if zeros is None else cupy.asarray(zeros[group].astype(np.float64))
        rows *= cupy.asarray(scales[group].astype(np.float64))
    if perm is not None:
        ordered = cupy.empty_like(dense)
        ordered[cupy.asarray(perm)] = dense
        dense = ordered
    return Weight(packed, dense)


def make_bias(n: int, dtype: str) -> Any:
    return activations((n,), dtype, seed=5)


def bits(array: Any) -> Any:
    return array.view(np.uint16)


def to_float64(array: Any) -> Any:
    """fp16 or bf16 on the card as float64; bf16 by way of its bits, whatever CuPy can do with it."""
    if array.dtype == np.float16:
        return array.astype(np.float64)
    return (bits(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def poisoned(shape: tuple[int, ...], dtype: str) -> Any:
    import cupy

    return cupy.full(shape, POISON, np.uint16).view(activation_type(dtype).numpy)


def is_poison(array: Any) -> bool:
    """Whether every element still is what poisoned() left; True where there is none."""
    return bool((bits(array) == POISON).all())


def compare(out: Any, reference: Any, untouched: bool = True) -> Outcome:
    """out (fp16 or bf16) against float64, both on the card. Synchronises."""
    import cupy

    if out.size == 0:
        return Outcome(0.0, 0.0, untouched)
    near, relative = ELEMENT_TOLERANCE[out.dtype.name]
    difference = cupy.abs(to_float64(out) - reference)
    power = (reference * reference).sum() + _TINY
    allowed = near * cupy.sqrt(power / out.size) + relative * cupy.abs(reference)
    error = cupy.sqrt((difference * difference).sum() / power)
    return Outcome(float(error), float((difference / allowed).max()), untouched)


def run(weight: Weight, x: Any, reference: Any, feed: str, bias: Any = None) -> Outcome:
    """One GEMM into a poisoned buffer that is longer than the result."""
    rows = x.shape[0]
    buffer = poisoned((rows + GUARD_ROWS, weight.packed.shape[1]), weight.packed.dtype)
    out = buffer[:rows]
    if marlin_gemm(x, weight.packed, out, bias, feed=FEEDS[feed]) is not out:
        raise AssertionError("marlin_gemm returned another array than out")
    return compare(out, reference, is_poison(buffer[rows:]))


def run_job(job: Job) -> Iterator[tuple[str, int, Outcome]]:
    """Every case of a job as (feed, tokens, outcome). The rows of a smaller batch are the first of a larger one."""
    options = job.options
    weight = make_weight(job.k, job.n, options)
    x = activations((max(job.tokens), job.k), options.dtype)
    reference = to_float64(x) @ weight.dense
    bias = make_bias(job.n, options.dtype) if options.bias else None
    if bias is not None:
        reference += to_float64(bias)
    for feed, m in itertools.product(job.feeds, job.tokens):
        yield feed, m, run(weight, x[:m], reference[:m], feed, bias)


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
    """Every shape with every number of tokens, by TMA and another feed; the options rotate over the shapes."""
    turns = itertools.product((True, False), GROUP_SIZES, DTYPES)
    others = itertools.cycle([feed for feed in FEEDS if feed != "tma"])
    return [
        Job(k, n, Options(dtype, group_size, symmetric), ("tma", other))
        for (k, n), (symmetric, group_size, dtype), other in zip(SHAPES, turns, others, strict=False)
    ]


def pairwise_jobs() -> list[Job]:
    """Any two options together, act-order and bias among them, at two shapes and two numbers of tokens."""
    factors = {
        "group_size": GROUP_SIZES,
        "feed": tuple(FEEDS),
        "dtype": DTYPES,
        "symmetric": (True, False),
        "act_order": (False, True),
        "bias": (False, True),
    }
    rows = [Options(**row) for row in pairwise(factors)]
    return [Job(k, n, row, (row.feed,), (7, 100)) for k, n in ((1000, 136), (2048, 1024)) for row in rows]


def full_jobs() -> list[Job]:
    """Every shape x tokens x dtype x group size x symmetric or zero points x three feeds, and the pairwise rows."""
    feeds = ("tma", "cp_async", "scale by cp_async")
    product = itertools.product(SHAPES, DTYPES, GROUP_SIZES, (True, False))
    return [Job(k, n, Options(d, g, s), feeds) for (k, n), d, g, s in product] + pairwise_jobs()


def specs_of(jobs: Iterable[Job], target: Target, processors: int) -> list[MarlinSpec]:
    """The kernels that jobs will ask for, each once."""
    found: dict[MarlinSpec, None] = {}
    for job in jobs:
        o = job.options
        layer = Layer(job.k, job.n, o.group_size, not o.symmetric, o.dtype)
        for feed, m in itertools.product(job.feeds, job.tokens):
            feeds = parse_feeds(FEEDS[feed])
            if o.act_order or job.k % 8:
                feeds = Feeds(feeds.weight, feeds.scale, "gather" if o.act_order else "plain")
            if m:
                found[choose(layer, m, target, processors, feeds).spec] = None
    return list(found)


def precompile(jobs: Iterable[Job]) -> int:
    """Compile what jobs need, many kernels at a time; how many there are."""
    from cudatma import context

    target = detect()
    specs = specs_of(jobs, target, context.device(0).multiprocessors)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: load_kernel(TEMPLATE, spec, target), specs))
    return len(specs)


class Summary:
    """Gathers the outcomes of many jobs."""

    def __init__(self) -> None:
        self.cases = 0
        self.failures: list[str] = []
        self.worst: dict[str, dict[str, Any]] = {}
        self.table: dict[str, dict[str, float]] = {}

    def add(self, job: Job, feed: str, m: int, outcome: Outcome) -> None:
        dtype, case = job.options.dtype, f"M={m} {replace(job, feeds=(feed,))}"
        self.cases += 1
        if problem := outcome.problem(dtype):
            self.failures.append(f"{case}: {problem}")
        worst = self.worst.setdefault(f"{dtype}, {feed}", {"cases": 0, "error": 0.0, "case": ""})
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

    from cudatma.compiler import nvrtc_version

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
        for feed, m, outcome in run_job(job):
            summary.add(job, feed, m, outcome)
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
