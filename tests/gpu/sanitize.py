"""A few small Marlin GEMMs for the sanitizers: every feed, shared tiles, tails, dependent launches.

compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py      (or racecheck, synccheck, initcheck)

Every array has a cudaMalloc of its own, so that memcheck knows where it ends; references are computed on the host, so
that the tools see few kernels but these.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from marlin_operands import FEEDS, POISON, TOLERANCE, Options

from cudatma import MarlinWorkspace, PackedWeight, marlin_gemm
from cudatma.dtypes import activation_type
from cudatma.quantization import pack

#: (K, N): tails in every dimension; tiles that several blocks share, both small.
SHAPES = ((333, 77), (1000, 192))
TOKENS = (1, 17, 100)
CASES = (
    *(Options(feed=feed) for feed in FEEDS),
    Options("bfloat16", 32, False, bias=True),
    Options("float16", -1, False),
    Options("bfloat16", 64, True, act_order=True),
)
RNG = np.random.default_rng(4)


def values(shape: tuple[int, ...], dtype: str) -> Any:
    return RNG.standard_normal(shape, dtype=np.float32).astype(activation_type(dtype).numpy)


def upload(array: Any) -> Any:
    import cupy

    return cupy.asarray(array.view(np.uint16)).view(array.dtype)


def host_weight(k: int, n: int, options: Options) -> PackedWeight:
    groups = 1 if options.group_size == -1 else -(-k // options.group_size)
    scales = (RNG.uniform(0.5, 1.5, (groups, n)) / (5 * np.sqrt(k))).astype(activation_type(options.dtype).numpy)
    zeros = None if options.symmetric else RNG.integers(0, 17, (groups, n))
    perm = RNG.permutation(k) if options.act_order else None
    return pack(RNG.integers(0, 16, (k, n), dtype=np.uint8), scales, zeros, group_size=options.group_size, perm=perm)


def run_case(k: int, n: int, m: int, options: Options, space: MarlinWorkspace) -> str:
    """What is wrong with one GEMM; empty if nothing is."""
    weight, x = host_weight(k, n, options), values((m, k), options.dtype)
    reference, bias = x.astype(np.float64) @ weight.dequantize(), None
    if options.bias:
        bias = values((n,), options.dtype)
        reference += bias.astype(np.float64)
    out = upload(np.full((m, n), POISON, np.uint16).view(x.dtype))
    device_bias = None if bias is None else upload(bias)
    marlin_gemm(upload(x), weight.to_device(), out, device_bias, feed=FEEDS[options.feed], workspace=space)
    found = out.view(np.uint16).get().view(x.dtype).astype(np.float64)
    error = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
    return "" if error <= TOLERANCE[options.dtype] else f"relative error {error:.3g}"


def run_chain(space: MarlinWorkspace) -> str:
    """Three GEMMs, each launched while the one before it may still run."""
    weights = [host_weight(512, 512, Options()).to_device() for _ in range(3)]
    buffers = [upload(values((16, 512), "float16")) for _ in range(4)]
    results = []
    for programmatic in (False, True):
        for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
            marlin_gemm(source, weight, target, programmatic=programmatic, workspace=space)
        results.append(buffers[-1].get())
    return "" if (results[0] == results[1]).all() else "dependent launches changed the result"


def main() -> int:
    import cupy

    cupy.cuda.set_allocator(None)
    space = MarlinWorkspace(0)
    problems = {
        f"M={m} K={k} N={n} {options}": run_case(k, n, m, options, space)
        for k, n in SHAPES
        for m in TOKENS
        for options in CASES
    }
    problems["chain"] = run_chain(space)
    found = {case: problem for case, problem in problems.items() if problem}
    for case, problem in found.items():
        print(f"FAILED {case}: {problem}")
    print(f"{len(problems)} cases, {len(found)} failures")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
