"""The dense GEMM's versions on the emulator, against float64 and without hazards, with tails and rings that wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gemm_builders import config
from gemm_cases import E4M3, LIMITS, calls, numbers
from gemm_cases import check as compare
from ptx_of import kernel_for_emulator

from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.gemm.config import PRESETS, GemmConfig
from cudatma.kernels.gemm.gemm import gemm
from cudatma.kernels.gemm.problem import LAYOUTS, Problem, is_fp8
from cudatma.kernels.gemm.sample import checked_call, gemm_call, sample
from cudatma.kernels.tuning import pinned
from cudatma.target import SMEM_RESERVED_BYTES, Target, get_target

SM90A, SM120A = get_target("sm_90a"), get_target("sm_120a")
#: Clusters of these versions are tried with tiles of this many columns.
WIDE = {"v5": 128, "v6": 128}
CALLS = calls()
#: An SM or two, so that persistent CTAs take several tiles.
SMS = 2


def matrix(rows: int, columns: int, letter: str, dtype: str, seed: int) -> Any:
    """Return random rows or columns with a pitch that is a multiple of 16 bytes, surrounded by NaNs."""
    if letter == "C":
        return matrix(columns, rows, "R", dtype, seed).T
    whole = np.full((rows, -(-columns // 8) * 8 + 8), np.nan, activation_type(dtype).numpy)
    whole[:, :columns] = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return whole[:, :columns]


def emulated(
    of: GemmConfig | Callable[[Problem], GemmConfig],
    a: Any,
    b: Any,
    out: Any,
    *,
    target: Target = SM90A,
    schedules: int = 1,  # tests/mutants runs each kernel in others
    **options: Any,
) -> None:
    """Run gemm() with this configuration or the one that ``of`` returns, and check that there are no hazards."""
    chosen = of if isinstance(of, GemmConfig) else of(checked_call(a, b, out, **options).problem)
    arguments, arrays = gemm_call(chosen, target, SMS, a, b, out, **options)
    kernel = kernel_for_emulator(arguments.template, arguments.config, target)
    report = arguments.emulate(target, arrays, kernel=kernel, schedules=schedules)
    assert report.is_clean, str(report)


def check(
    made: GemmConfig, m: int, n: int, k: int, out: Any = None, *, schedules: int = 1, target: Target = SM90A
) -> None:
    a, b = matrix(m, k, made.layout[0], made.dtype, 0), matrix(k, n, made.layout[1], made.dtype, 1)
    y = np.full((m, n), np.nan, a.dtype) if out is None else out
    emulated(made, a, b, y, target=target, schedules=schedules)
    compare(y, a.astype(np.float64) @ b.astype(np.float64), LIMITS[made.dtype])


#: M, N, K and fields of the configuration.
CASES: list[tuple[int, int, int, dict[str, Any]]] = [
    (65, 200, 129, {}),  # tails of each tile
    (3, 8, 321, {"stages": 3}),  # six stages: the ring of three wraps
    (63, 136, 70, {"tile_n": 128, "stages": 8}),  # K of two stages, in a ring of eight
    (130, 261, 264, {"tile_m": 128, "warpgroups": 2, "dtype": "bfloat16"}),
    (130, 64, 192, {"tile_m": 128, "tile_k": 128}),  # two wgmmas of 64 rows, two spans of K
    (257, 264, 72, {"tile_m": 256, "tile_n": 128, "warpgroups": 2}),
]


#: Each version runs two cases, and each case runs in two versions or more.
RUNS = [
    (version, case) for number, version in enumerate(PRESETS) for case in range(len(CASES)) if (number + case) % 3 == 0
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("version", "case"), RUNS)
def test_products_are_right_and_clean(version: str, case: int) -> None:
    m, n, k, fields = CASES[case]
    layout = LAYOUTS[(case + list(PRESETS).index(version)) % 4]
    given = {"tile_m": 64, "tile_n": 64, "warpgroups": 1} | fields
    if version == "v6":  # two CTAs for each tile
        m, n = min(m, 130), min(n, 136)
    given["tile_n"] = max(given["tile_n"], WIDE.get(version, 0))
    if version == "v7":  # a tile for each warpgroup
        given |= {"tile_m": min(128, given["tile_m"]), "warpgroups": 1}
    check(config(version, layout=layout, **given), m, n, k)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "layout", "tile_m"),
    [
        ("v2", "RC", 64),
        ("v3", "CC", 128),
        ("v4", "RC", 64),
        ("v5", "CC", 128),
        ("v6", "RC", 64),
        ("v7", "CC", 128),
        ("mma_sync", "RC", 64),
    ],
)
def test_boxes_of_a_have_no_more_rows_than_a(version: str, layout: str, tile_m: int) -> None:
    m = 20
    made = config(version, layout=layout, tile_m=tile_m, tile_n=WIDE.get(version, 64), warpgroups=1)
    rows = min(-(-m // 8) * 8, tile_m)
    assert rows in made.a_box(m)
    stage_rows = rows * (tile_m // 64 if layout[0] == "C" else 1) + made.tile_n
    assert made.boxes_bytes(made.a_box_rows(m)) == 2 * made.tile_k * stage_rows
    check(made, m, 72, 200)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("layout", "m", "n", "stages"),
    [("RC", 24, 200, 2), ("RR", 100, 72, 2), ("CR", 140, 200, 3), ("CC", 24, 200, 2)],
)
def test_ctas_of_a_cluster_share_the_larger_tile(layout: str, m: int, n: int, stages: int) -> None:
    """The CTAs are neighbors along N and share A. The last CTA may have no columns, and one A has few rows."""
    made = config("v5", dtype="bfloat16", layout=layout, tile_m=128, stages=stages)
    assert (made.cluster_m, made.cluster_n) == (1, 2)
    check(made, m, n, 200)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "tile_m", "tile_n", "layout", "m", "n", "k", "out_dtype"),
    [
        ("v4", 128, 208, "CR", 40, 215, 200, "float32"),
        ("v5", 64, 80, "RR", 129, 215, 72, ""),
        ("v5", 256, 112, "CC", 40, 215, 200, "float32"),
    ],
)
def test_tiles_whose_columns_are_not_whole_boxes(
    version: str, tile_m: int, tile_n: int, layout: str, m: int, n: int, k: int, out_dtype: str
) -> None:
    """A slot contains whole boxes of an N-major B, and the CTAs of a cluster divide the K of each box."""
    tile = {"tile_m": tile_m, "tile_n": tile_n}
    out = np.full((m, n), np.nan, np.float32) if out_dtype else None
    check(config(version, dtype="bfloat16", layout=layout, out_dtype=out_dtype, **tile), m, n, k, out)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "tile_m", "tile_n", "out_dtype"),
    [
        ("v3", 64, 80, "float16"),
        ("v4", 192, 112, "float16"),
        ("v4", 64, 240, "float32"),
    ],
)
def test_an_epilogue_of_tiles_of_any_columns(version: str, tile_m: int, tile_n: int, out_dtype: str) -> None:
    layout = LAYOUTS[(tile_n // 16 + int(version[1])) % 4]
    m, n, k = tile_m - 3, tile_n + 5, 136
    a, b = matrix(m, k, layout[0], "float16", 0), matrix(k, n, layout[1], "float16", 1)
    options: dict[str, Any] = {"bias": numbers(n, dtype=np.dtype(out_dtype)), "beta": 0.5, "activation": "relu"}
    y, wanted = np.ones((2, m, n), np.dtype(out_dtype))
    gemm(a, b, out=wanted, backend="reference", **options)
    made = config(version, layout=layout, tile_m=tile_m, tile_n=tile_n)
    emulated(made.adapted, a, b, y, **options)
    assert np.allclose(y, wanted, atol=0.05, rtol=2e-3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("version", "pitch", "offset"),
    [
        ("v3", 67, 0),  # dense rows
        ("v4", 72, 0),
        ("v4", 72, 1),  # an unaligned window
        ("v6", 72, 1),
        ("mma_sync", 72, 0),
        ("mma_sync", 67, 0),
    ],
)
def test_what_surrounds_the_result_is_left_alone(version: str, pitch: int, offset: int) -> None:
    """Aligned rows are stored by TMA or in vectors, and other rows by elements. The last columns fill part of a
    vector."""
    m, n = 66, 64 if offset else 67
    whole = np.full((m, pitch), 7, np.float16)
    k = 136 if version == "v6" else 72
    check(config(version), m, n, k, whole[:, offset : offset + n])
    assert (np.delete(whole, np.s_[offset : offset + n], axis=1) == 7).all()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("call", "version"), [(name, version) for name, call in CALLS.items() for version in call.emulated]
)
def test_what_versions_share(call: str, version: str) -> None:
    """Results are compared with the reference, and the bytes around the result must not change."""
    a, b, options = CALLS[call].a, CALLS[call].b, CALLS[call].options
    wanted = np.ones_like(gemm(a, b, backend="reference", **(options | {"beta": 0})))
    n = wanted.shape[-1]
    whole = np.ones((*wanted.shape[:-1], -(-n // 8) * 8 + 8), wanted.dtype)
    gemm(a, b, out=wanted, backend="reference", **options)
    run_small(version, a, b, whole[..., : wanted.shape[-1]], **options)
    compare(whole[..., : wanted.shape[-1]], wanted)
    assert (whole[..., wanted.shape[-1] :] == 1).all()


def test_matrices_of_a_result_off_16_bytes() -> None:
    """The rows of one matrix start at multiples of 16 bytes, and the rows of the next do not."""
    whole = np.full(2 * (66 * 80 + 1), np.nan, np.float16)
    out = np.lib.stride_tricks.as_strided(whole, (2, 66, 72), (2 * (66 * 80 + 1), 160, 2))
    a, b = numbers(2, 66, 72), numbers(2, 72, 72)
    run_small("v4", a, b, out)
    np.testing.assert_allclose(out.astype(np.float64), a.astype(np.float64) @ b, rtol=1e-3, atol=1e-2)
    assert np.isnan(whole).sum() == whole.size - out.size


def run_small(
    version: str, a: Any, b: Any, out: Any, *, target: Target = SM90A, tile_m: int = 64, **options: Any
) -> None:
    """Run gemm() on a small tile of a version."""
    target = SM120A if version == "mma_sync" and is_fp8(a.dtype.name) else target
    tile_k = 128 // a.dtype.itemsize
    tile = {"tile_m": tile_m, "tile_n": WIDE.get(version, 64), "tile_k": tile_k, "warpgroups": 1}
    emulated(config(version, dtype=a.dtype.name, **tile).adapted, a, b, out, target=target, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("version", "batch", "by_tma"), [("v4", 1, True), ("v4", 2, False), ("v5", 2, True)])
def test_scales_of_blocks(version: str, batch: int, by_tma: bool) -> None:
    """Block scales of A in column-major order, with and without TMA, in a batch with bias and activation, and for more
    blocks than are loaded at a time."""
    a, b = numbers(batch, 70, 592, dtype=E4M3), numbers(batch, 168, 592, dtype=E4M3).swapaxes(1, 2)
    a_scale = abs(numbers(batch, 5, 72 if by_tma else 70, dtype=np.float32))[..., :70].swapaxes(1, 2)
    options: dict[str, Any] = {"a_scale": a_scale, "b_scale": numbers(5, 2, dtype=np.float32)}
    if batch > 1:
        options["b_scale"] = numbers(batch, 5, 4, dtype=np.float32)[..., ::2]
        options |= {"bias": numbers(168, dtype=np.float32), "activation": "silu", "out_dtype": "float32", "alpha": 0.5}
    wanted = gemm(a, b, backend="reference", **options)
    out = np.full_like(wanted, np.nan)
    assert checked_call(a, b, out, **options).problem.scales_by_tma == by_tma
    run_small(version, a, b, out, tile_m=128 if by_tma else 64 * batch, **options)
    compare(out, wanted, 6e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "tile_m"), [(100, 128), (384, 64), (512, 128), (520, 64), (1000, 128)])
def test_no_more_blocks_of_scales_than_are_loaded_ahead(k: int, tile_m: int) -> None:
    """The numbers of blocks are the number loaded ahead, one more, and several laps, with one and two wgmmas of 64
    rows."""
    blocks = -(-k // 128)
    a, b = numbers(40, k, dtype=E4M3), numbers(72, k, dtype=E4M3).T
    options = {"a_scale": abs(numbers(40, blocks, dtype=np.float32)), "b_scale": numbers(blocks, 1, dtype=np.float32)}
    wanted = gemm(a, b, backend="reference", **options)
    out = np.full_like(wanted, np.nan)
    run_small("v4", a, b, out, tile_m=tile_m, **options)
    compare(out, wanted, 6e-3)


@pytest.mark.slow
def test_columns_have_more_scales_than_a_warp_has_lanes() -> None:
    a, b = numbers(40, 4300, dtype=E4M3), numbers(40, 4300, dtype=E4M3).T
    a_scale = abs(numbers(34, 40, dtype=np.float32)).T
    options = {"a_scale": a_scale, "b_scale": numbers(34, 1, dtype=np.float32)}
    wanted = gemm(a, b, backend="reference", **options)
    out = np.full_like(wanted, np.nan)
    assert checked_call(a, b, out, **options).problem.scales_by_tma
    run_small("v4", a, b, out, tile_m=64, **options)
    compare(out, wanted, 6e-3)


@pytest.mark.slow
@pytest.mark.parametrize("by_tma", [False, True])
def test_scales_of_blocks_beyond_the_last_column_are_not_read(by_tma: bool) -> None:
    """The second CTA of the last cluster has no columns. A cluster computes several tiles."""
    a, b = numbers(70, 272, dtype=E4M3), numbers(344, 272, dtype=E4M3).T
    a_scale = abs(numbers(3, 72, dtype=np.float32))[:, :70].T
    a_scale = a_scale if by_tma else np.ascontiguousarray(a_scale)
    options = {"a_scale": a_scale, "b_scale": numbers(3, 3, dtype=np.float32)}
    wanted = gemm(a, b, backend="reference", **options)
    out = np.full_like(wanted, np.nan)
    made = config("v5", dtype=a.dtype.name, tile_m=128, tile_n=128, warpgroups=1)
    assert made.adapted(checked_call(a, b, out, **options).problem).ring_has_scales == by_tma
    emulated(made.adapted, a, b, out, **options)
    compare(out, wanted, 6e-3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("call", ["tanh_fp32", "batch", "fp8_strided_scales"])
def test_mma_sync_for_sm_120a(call: str) -> None:
    a, b, options = CALLS[call].a, CALLS[call].b, CALLS[call].options
    wanted = gemm(a, b, backend="reference", **options)
    out = np.full_like(wanted, np.nan)
    run_small("mma_sync", a, b, out, target=SM120A, **options)
    np.testing.assert_allclose(out.astype(np.float64), wanted.astype(np.float64), rtol=6e-3, atol=6e-3)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tile_n", "n", "out_dtype"), [(64, 40, "float16"), (128, 72, "float32")])
def test_four_ctas_divide_k(tile_n: int, n: int, out_dtype: str) -> None:
    a, b = numbers(40, 328), numbers(n, 328).T
    wanted = gemm(a, b, activation="relu", out_dtype=out_dtype, backend="reference")
    out = np.full_like(wanted, np.nan)
    emulated(config("v6", tile_n=tile_n, cluster_k=4).adapted, a, b, out, activation="relu")
    np.testing.assert_allclose(out.astype(np.float64), wanted.astype(np.float64), rtol=1e-3, atol=1e-3)


def test_a_batch_whose_matrices_are_interleaved() -> None:
    """Strides of no array without gaps in C or Fortran order."""
    a, b = numbers(2, 70, 72), np.stack([numbers(40, 72).T] * 2)
    out = np.full((70, 2, 40), np.nan, np.float16).swapaxes(0, 1)
    assert gemm(a, b, out=out, version="v3", backend="emulator") is out
    np.testing.assert_allclose(out.astype(np.float64), (a.astype(np.float64) @ b), rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_the_tile_does_not_change_the_bits() -> None:
    """The emulator adds as the hardware's documentation lets it; what batch_invariant promises, a GPU has to show."""
    a, b, seen = numbers(70, 136), numbers(136, 72), set()
    for made in (
        config("v1", layout="RR"),
        config("v2", layout="RR", tile_n=128),
        config("v3", layout="RR", tile_m=128, tile_n=128),
        config("v4", layout="RR", tile_m=128),
        config("v5", layout="RR", tile_n=128),
    ):
        out = np.empty((70, 72), np.float16)
        emulated(made, a, b, out, schedules=1, batch_invariant=True)
        seen.add(out.tobytes())
    assert len(seen) == 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("layout", "m", "n", "k", "fields"),
    [
        # The consumers' registers are raised by setmaxnreg.
        ("RC", 130, 264, 72, {"tile_m": 128, "tile_n": 256, "tile_k": 32, "stages": 4, "warpgroups": 2}),
        ("CR", 257, 130, 40, {"tile_m": 256, "tile_n": 128, "tile_k": 32, "warpgroups": 2, "dtype": "bfloat16"}),
        # Rows of 64 bytes, and a ring that wraps.
        ("RR", 70, 69, 200, {"tile_k": 32, "stages": 3}),
        ("CC", 70, 69, 200, {"tile_k": 32, "stages": 3}),
        # K is shorter than the ring.
        ("CR", 130, 140, 33, {"tile_m": 128, "tile_n": 128, "tile_k": 32, "stages": 6}),
        # Each tile has one stage.
        ("CC", 200, 136, 1, {"tile_m": 128, "tile_n": 128, "ctas_per_sm": 2, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_mma_sync_on_sm120(layout: str, m: int, n: int, k: int, fields: dict[str, Any]) -> None:
    check(config("mma_sync", layout=layout, **fields), m, n, k, target=SM120A)


def test_one_row_off_16_bytes() -> None:
    whole = np.full(50, 7, np.float16)
    check(config("v4"), 1, 40, 64, whole[1:41].reshape(1, 40))
    assert (whole[[0, *range(41, 50)]] == 7).all()


def test_the_public_function_runs_the_kernel() -> None:
    a, b = matrix(5, 72, "R", "float16", 0), matrix(72, 9, "C", "float16", 1)
    with pinned(config("v3")):
        y = gemm(a, b, backend="emulator")
    np.testing.assert_array_equal(y, gemm(a, b, backend="reference"))


@pytest.mark.parametrize(("rows", "alone"), [(128, True), (129, False)])
def test_a_wave_of_ctas_leaves_the_next_kernel_no_room_beside_them(rows: int, alone: bool) -> None:
    """Its CTAs, which may start before this one has ended, would gather on some SMs."""
    a, b = np.ones((rows, 64), np.float16), np.ones((64, 64), np.float16).T
    launch, _ = gemm_call(config("v3"), SM90A, SMS, a, b, np.ones((rows, 64), np.float16))
    assert launch.sizes.programmatic
    assert (2 * (launch.shared_bytes + SMEM_RESERVED_BYTES) > SM90A.smem_per_sm_bytes) == alone


def test_the_sample() -> None:
    made = sample("v3", SM90A, m=16, n=72, k=200, layout="CR", stages=2)
    assert made.run(schedules=2).is_clean
    assert made.error() <= made.limit
    with pytest.raises(ArgumentError, match=r"^k must be .*got 4"):
        sample("v3", SM90A, k=4)
