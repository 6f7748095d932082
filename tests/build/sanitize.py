"""Small launches of every kernel for compute-sanitizer.

compute-sanitizer --tool memcheck python3 tests/build/sanitize.py      (or racecheck, synccheck, initcheck)
compute-sanitizer --tool racecheck python3 tests/build/sanitize.py --part 3/8      (which is slow: parts, side by side)
compute-sanitizer --tool racecheck python3 tests/build/sanitize.py --only attention

Every array has its own cudaMalloc, so that memcheck knows where it ends. References are computed on the host, so that
the tools see few other kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
for folder in ("shared", "marlin", "data_movement", "experts"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

from marlin_builders import skinny, wgmma
from marlin_operands import LOAD_PATHS, POISON, TOLERANCE, Options, use_load_path
from moe_cases import LAYERS
from movement_cases import CASES as MOVEMENTS
from movement_cases import Case, check, check_ragged, ragged_arrays

from cudatma import (
    PackedWeight,
    Workspace,
    attention,
    attention_decode,
    attention_varlen,
    gemm,
    marlin_gemm,
    marlin_moe,
    ragged_copy,
)
from cudatma.arrays import describe
from cudatma.dtypes import activation_type
from cudatma.kernels.attention.choose import times as attention_times
from cudatma.kernels.attention.config import VERSIONS as ATTENTION_VERSIONS
from cudatma.kernels.attention.problem import Problem as AttentionProblem
from cudatma.kernels.cost import cheapest_first
from cudatma.kernels.gemm.config import PRESETS, WITH_BLOCK_SCALES, GemmConfig
from cudatma.kernels.gemm.problem import LAYOUTS
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.tuning import pinned
from cudatma.quantization import pack
from cudatma.target import detect

#: (K, N): tails in every dimension; tiles that several CTAs share, both small.
SHAPES = ((333, 77), (1000, 192))
M_VALUES = (1, 17, 100)
CASES = (
    *(Options(load_path=load_path) for load_path in LOAD_PATHS),
    Options("bfloat16", 32, False, bias=True),
    Options("float16", -1, False),
    Options("bfloat16", 64, True, act_order=True),
)
#: What the cost model chooses for other layers only: config, M, K, N.
CONFIGS: dict[str, tuple[MarlinConfig, int, int, int]] = {
    "skinny, M = 1": (
        skinny(tile_m=1, tile_n=32, tile_k=1024, slice_k=8, stages=3, deep_box=True), *(1, 2048, 96),
    ),
    "skinny, three CTAs divide K": (
        skinny(tile_m=16, tile_n=96, tile_k=128, slice_k=2, stages=3, cluster_k=3), *(27, 712, 200),
    ),
    "skinny, two blocks": (
        skinny(tile_m=8, tile_n=64, tile_k=256, slice_k=4, stages=3, ctas_per_sm=2), *(8, 1000, 192),
    ),
    "multicast": (
        wgmma(
            tile_m=128, tile_k=128, warpgroups=2, stages=4, cluster_n=2, mmas_per_commit=1, commits_in_flight=3
        ),
        *(200, 712, 400),
    ),
    "multicast, M = 256": (
        wgmma(tile_m=256, tile_k=64, warpgroups=2, stages=6, cluster_n=2, consumer_registers=232), *(300, 400, 300),
    ),
    "stacked": (wgmma(tile_m=64, tile_n=256, tile_k=128, warpgroups=2, stages=4), 100, 712, 300),
    "pingpong": (
        wgmma(
            tile_m=128, tile_n=128, tile_k=128, stages=4, cluster_n=2, mmas_per_commit=1, commits_in_flight=3,
            consumer_registers=232, pingpong=True,
        ),
        *(700, 712, 500),
    ),
    "three warpgroups": (
        wgmma(tile_m=128, tile_k=128, warpgroups=3, stages=3, mmas_per_commit=1, commits_in_flight=3),
        *(128, 712, 400),
    ),
    "K divided twice": (wgmma(tile_m=40, tile_k=256, stages=3, slice_k=2, cluster_k=3), 75, 1024, 200),
}  # fmt: skip
#: Attention's batch, heads of q and of k and v, queries, keys; head dim; options. Tails of queries and keys, queries
#: that see no key, persistent CTAs with several tiles.
ATTENTION_CASES: dict[str, tuple[tuple[int, int, int, int, int], int, dict[str, Any]]] = {
    "full": ((1, 2, 2, 200, 333), 64, {}),
    "causal, groups": ((2, 4, 2, 333, 200), 128, {"causal": True}),
    "window": ((1, 2, 1, 333, 333), 64, {"window": (70, 9)}),
    "many tiles": ((5, 16, 4, 200, 136), 64, {"causal": True}),
}
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


def run_case(k: int, n: int, m: int, options: Options, space: Workspace) -> str:
    """Run one GEMM and return what is wrong, or "" if nothing is."""
    weight, x = host_weight(k, n, options), values((m, k), options.dtype)
    reference, bias = x.astype(np.float64) @ weight.dequantize(), None
    if options.bias:
        bias = values((n,), options.dtype)
        reference += bias.astype(np.float64)
    out = upload(np.full((m, n), POISON, np.uint16).view(x.dtype))
    device_bias = None if bias is None else upload(bias)
    on_gpu = weight.to_device()
    with use_load_path(on_gpu, m, options.load_path):
        marlin_gemm(upload(x), on_gpu, out=out, bias=device_bias, workspace=space)
    found = out.view(np.uint16).get().view(x.dtype).astype(np.float64)
    error = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
    return "" if error <= TOLERANCE[options.dtype] else f"relative error {error:.3g}"


def run_spec(config: MarlinConfig, m: int, k: int, n: int, space: Workspace) -> str:
    """Run one GEMM with a given kernel, and return what is wrong."""
    with pinned(config):
        return run_case(k, n, m, Options(), space)


def run_chain(space: Workspace) -> str:
    """Run three GEMMs, each launched while the previous one may still be running."""
    weights = [host_weight(512, 512, Options()).to_device() for _ in range(3)]
    buffers = [upload(values((16, 512), "float16")) for _ in range(4)]
    results = []
    for programmatic in (False, True):
        for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
            marlin_gemm(source, weight, out=target, programmatic=programmatic, workspace=space)
        results.append(buffers[-1].get())
    return "" if (results[0] == results[1]).all() else "dependent launches changed the result"


def run_dense(version: str, layout: str) -> str:
    """Run a version of the dense GEMM on several tiles with tails."""
    m, n, k = 700, 904, 136
    a, b = (values(shape, "float16") for shape in ((m, k), (n, k)))
    left, right = upload(a), upload(b).T
    if layout[0] == "C":
        left = upload(np.ascontiguousarray(np.pad(a, ((0, 4), (0, 0))).T)).T[:m]
    if layout[1] == "R":
        right = upload(np.ascontiguousarray(b.T))
    y = gemm(left, right, version=version).get()
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    error = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
    return "" if error < 1e-3 else f"off by {error:.1e}"


def run_fp8(has_blocks: bool, version: str) -> str:
    """Run the dense GEMM on fp8 operands with scales and a bias, on several tiles with tails."""
    import cupy

    m, n, k = 300, 392, 400
    a, b = (values(shape, "float16").astype(ml_dtypes.float8_e4m3fn) for shape in ((m, k), (n, k)))
    left, right = (replace(describe(cupy.asarray(one.view(np.uint8))), dtype=one.dtype) for one in (a, b))
    right = replace(right, shape=right.shape[::-1], strides_bytes=right.strides_bytes[::-1])
    scales = cupy.ones((4, m) if has_blocks else m, np.float32).T, cupy.ones((4, 4) if has_blocks else n, np.float32)
    bias = cupy.ones(n, np.float32)
    given = {"a_scale": scales[0], "b_scale": scales[1], "bias": bias, "out_dtype": "float32", "version": version}
    scope: Any = contextlib.nullcontext()
    if has_blocks:  # a tile whose stages hold the scales
        kind = {"out_dtype": "float32", "epilogue": "linear", "block_scales": True, "scales_by_tma": True}
        tile = {"tile_m": 256, "tile_n": 128, "tile_k": 128, "stages": 2, "warpgroups": 2}
        scope = pinned(GemmConfig.of(version, dtype=a.dtype.name, layout="RC", **kind, **tile))
    with scope:
        y = gemm(left, right, **given).get()
    wanted = a.astype(np.float64) @ b.astype(np.float64).T + 1
    error = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
    return "" if error < 2e-3 else f"off by {error:.1e}"


def run_attention(version: str, case: str) -> str:
    """Run a version of attention with its first and its last tile and with lse. Poison surrounds the result."""
    (batch, heads, kv_heads, q_length, k_length), dim, options = ATTENTION_CASES[case]
    of_k = batch, k_length, kv_heads, dim
    q, k, v = (values(shape, "float16") for shape in ((batch, q_length, heads, dim), of_k, of_k))
    wanted, sums = attention(q, k, v, return_lse=True, backend="reference", **options)
    is_causal, has_window = "causal" in options, "window" in options
    masks = {"is_causal": is_causal, "has_window": has_window}
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_length": q_length, "k_length": k_length}
    problem = AttentionProblem.of(**sizes, head_dim=dim, dtype="float16", **masks, version=version)
    on_gpu, configs = [upload(each) for each in (q, k, v)], cheapest_first(attention_times, problem, gpu_of(0))
    for config, _ in (configs[0], configs[-1])[: len(configs)]:
        whole = upload(np.full((batch, q_length + 2, heads, dim), POISON, np.uint16).view(q.dtype))
        with pinned(config):
            _, lse = attention(*on_gpu, out=whole[:, 1:-1], return_lse=True, **options)
        found = whole.view(np.uint16).get()
        if (found[:, (0, -1)] != POISON).any():
            return f"{config.entry} wrote around the result"
        found = found[:, 1:-1].view(q.dtype).astype(np.float64)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        if not error < 1e-3 or not np.allclose(lse.get(), sums, atol=1e-3):
            return f"{config.entry} is off by {error:.1e}"
    return ""


def run_varlen(dim: int) -> str:
    """Run attention_varlen on concatenated sequences, some of which are empty."""
    q_lengths, k_lengths = (65, 1, 0, 200), (130, 64, 40, 300)
    begins = [np.cumsum([0, *lengths]).astype(np.int32) for lengths in (q_lengths, k_lengths)]
    q = values((sum(q_lengths), 4, dim), "float16")
    k, v = (values((sum(k_lengths), 2, dim), "float16") for _ in range(2))
    options: dict[str, Any] = {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths), "causal": True}
    wanted = attention_varlen(q, k, v, *begins, backend="reference", **options)
    found = attention_varlen(*(upload(each) for each in (q, k, v)), *(upload_words(each) for each in begins), **options)
    return wrong(found.get(), wanted)


def run_decode(page_size: int, dim: int, has_fp8_cache: bool = False) -> str:
    """Run attention_decode on a cache that several CTAs per sequence read. page_size: 0 for a cache without pages."""
    lengths, capacity, pages = np.array([0, 1, 900, 2048], np.int32), 2048, 0
    q = values((len(lengths), 2, 8, dim), "float16")
    k, v = (values((len(lengths), capacity, 2, dim), "float16") for _ in range(2))
    table = None
    if page_size:
        pages = capacity // page_size
        k, v = (each[:, : pages * page_size].reshape(-1, page_size, 2, dim) for each in (k, v))
        table = RNG.permutation(len(lengths) * pages).reshape(len(lengths), pages).astype(np.int32)
        lengths = np.minimum(lengths, pages * page_size).astype(np.int32)
    if has_fp8_cache:
        k, v = (each.astype(ml_dtypes.float8_e4m3fn) for each in (k, v))
    wanted = attention_decode(q, k, v, lengths, page_table=table, backend="reference")
    given = None if table is None else upload_words(table)
    caches = [upload_bytes(each) if has_fp8_cache else upload(each) for each in (k, v)]
    found = attention_decode(upload(q), *caches, upload_words(lengths), page_table=given)
    return wrong(found.get(), wanted)


def run_experts(name: str) -> str:
    """Run marlin_moe."""
    operands = LAYERS[name].operands()
    expected = marlin_moe(**operands, backend="reference")

    def uploaded(field: str, value: Any) -> Any:
        if value is None or field == "activation":
            return value
        if field in ("w1", "w2"):
            return value.to_device()
        return upload(value) if field in ("x", "bias1", "bias2") else upload_words(value)

    given = {field: uploaded(field, value) for field, value in operands.items()}
    return wrong(marlin_moe(**given).get(), expected, 1e-2)


def upload_bytes(array: Any) -> Any:
    """Upload fp8 values as bytes, because CuPy has no fp8."""
    return replace(describe(upload_words(array.view(np.uint8))), dtype=array.dtype)


def upload_words(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def wrong(found: Any, wanted: Any, limit: float = 1e-3) -> str:
    error = np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted.astype(np.float64))
    return "" if error < limit else f"off by {error:.1e}"


def run_movement(case: Case) -> str:
    import cupy

    try:
        check(case, cupy)
    except AssertionError as error:
        return f"wrong {error}"
    return ""


def run_ragged() -> str:
    import cupy

    sources, destinations, buffers = ragged_arrays(cupy, "float32", count=300, max_rows=40, max_chunks=24, seed=5)
    ragged_copy(sources, destinations)
    try:
        check_ragged(sources, destinations, buffers)
    except AssertionError as error:
        return f"wrong {error}"
    return ""


def cases(space: Workspace) -> dict[str, Callable[[], str]]:
    """Return the cases to run, by name."""
    named: dict[str, Callable[[], str]] = {
        f"M={m} K={k} N={n} {options}": functools.partial(run_case, k, n, m, options, space)
        for k, n in SHAPES
        for m in M_VALUES
        for options in CASES
    }
    named |= {name: functools.partial(run_spec, *CONFIGS[name], space) for name in CONFIGS}
    versions = [version for version in PRESETS if version == "mma_sync" or detect().has_wgmma]
    dense = {
        f"gemm {version} {layout}": functools.partial(run_dense, version, layout)
        for version in versions
        for layout in LAYOUTS
    }
    of_fp8 = [one for one in versions if one != "mma_sync" or detect().has("mma_sync_fp8")]
    dense |= {f"gemm fp8 {one}": functools.partial(run_fp8, False, one) for one in of_fp8}
    if detect().has_wgmma:
        dense |= {f"gemm fp8 blocks {one}": functools.partial(run_fp8, True, one) for one in WITH_BLOCK_SCALES}
    of_attention = {
        f"attention {version} {case}": functools.partial(run_attention, version, case)
        for version in ATTENTION_VERSIONS.names
        for case in ATTENTION_CASES
        if detect().has_wgmma
    }
    of_attention |= {f"attention_varlen {dim}": functools.partial(run_varlen, dim) for dim in (64, 128)}
    of_attention |= {
        f"attention_decode {dim}, pages of {size}": functools.partial(run_decode, size, dim)
        for size in (0, 16, 5)
        for dim in (64, 128)
    }
    of_attention |= {
        f"attention_decode e4m3, pages of {size}": functools.partial(run_decode, size, 128, True) for size in (0, 16)
    }
    movements: dict[str, Callable[[], str]] = {
        str(case): functools.partial(run_movement, case)
        for case in MOVEMENTS
        if not case.large and detect().has(case.needs)
    }
    movements["ragged_copy"] = run_ragged
    movements |= {f"experts {name}": functools.partial(run_experts, name) for name in LAYERS if name != "all_skipped"}
    return named | {"chain": functools.partial(run_chain, space)} | dense | of_attention | movements


def part_of(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: write PART/PARTS, as 1/8")
    return int(part), int(parts)


def main() -> int:
    import cupy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="every N-th case, from the I-th on")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with this in their names")
    options = parser.parse_args()
    part, parts = options.part
    cupy.cuda.set_allocator(None)
    named = cases(Workspace(0)).items()
    mine = [(case, run) for case, run in named if options.only in case][part - 1 :: parts]
    failures = 0
    for case, run in mine:
        problem = run()
        failures += bool(problem)
        print(f"FAILED {case}: {problem}" if problem else f"right: {case}", flush=True)
    print(f"{len(mine)} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
