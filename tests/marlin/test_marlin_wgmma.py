"""The wgmma Marlin kernel on the emulator: right, and free of hazards, however the work is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_builders import wgmma
from marlin_runner import TOLERANCE, launch_programmatically, operands, relative_error, run_marlin

from cudatma import marlin_gemm
from cudatma.errors import ArgumentError, HazardError
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin import gemm as marlin
from cudatma.kernels.marlin.candidates import WGMMA_TILES, WgmmaTile, fitted
from cudatma.kernels.marlin.choose import choose_untuned
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.schedule import schedule
from cudatma.quantization import PackedWeight
from cudatma.quantization.scale_range import ScaleFit
from cudatma.target import get_target

SCHEDULES = 1  # tests/mutants runs these kernels in others


def config(**fields: Any) -> MarlinConfig:
    """A small tile with a short ring."""
    return wgmma(**{"tile_m": 16, "tile_k": 64, "stages": 2} | fields)


#: Several tiles a CTA, tiles of several CTAs, a ring that wraps, tails in M, N and K.
CASES = {
    "stream_k": (13, 384, 136, 2, config()),
    "stream_k_of_three_ctas": (13, 384, 64, 3, config()),
    "stack_2_odd_chunks": (20, 200, 136, 1, config(tile_m=24, tile_k=128, tile_n=128, stages=3)),
    "multicast_stream_k": (13, 384, 200, 6, config(cluster_n=2)),
    "multicast_whole_tiles_setmaxnreg": (
        13,
        256,
        300,
        4,
        config(cluster_n=2, mmas_per_commit=1, commits_in_flight=3, tile_k=128, consumer_registers=232, group_size=64),
    ),
    "bf16_zeros": (16, 192, 200, 2, config(dtype="bfloat16", has_zeros=True, warpgroups=2, group_size=64)),
    "depth_divided": (13, 640, 200, 3, config(slice_k=2, tile_k=128, mmas_per_commit=1, commits_in_flight=3)),
    "depth_divided_32": (21, 520, 72, 2, config(slice_k=2, tile_k=256, tile_m=24, group_size=32, has_zeros=True)),
    "depth_divided_stack_group_64": (
        40,
        512,
        136,
        2,
        config(slice_k=2, tile_k=256, tile_n=128, tile_m=24, group_size=64, has_zeros=True),
    ),
    "depth_divided_column_cluster": (
        20,
        768,
        200,
        4,
        config(slice_k=2, tile_k=256, cluster_n=2, group_size=-1, dtype="bfloat16", has_zeros=True),
    ),
    "group_32_steps_4": (9, 232, 72, 2, config(group_size=32, has_zeros=True, mmas_per_commit=4, tile_k=128)),
    "pingpong_stream_k": (40, 456, 300, 2, config(tile_n=128, pingpong=True, stages=3)),
    "pingpong_multicast": (
        44,
        320,
        300,
        2,
        config(cluster_n=2, pingpong=True, stages=5, scale_form="as_stored", consumer_registers=152),
    ),
    # Several chunks of staging rows, and tiles shorter than the ring: each warpgroup stores while the other one does.
    "pingpong_short_k": (250, 64, 136, 1, config(tile_m=88, stages=4, pingpong=True)),
    "pingpong_multicast_stream_k": (60, 384, 150, 6, config(cluster_n=2, tile_n=128, stages=3, pingpong=True)),
    "pingpong_column_zeros": (
        40,
        320,
        200,
        1,
        config(pingpong=True, stages=4, tile_n=128, group_size=-1, has_zeros=True, dtype="bfloat16"),
    ),
    "column_zeros": (
        9,
        512,
        136,
        2,
        config(group_size=-1, has_zeros=True, dtype="bfloat16", tile_k=256, mmas_per_commit=4, commits_in_flight=3),
    ),
}
#: Tiles of an odd number of 8 rows of M: the last chunk of the result's rows is a part of one, or ends with 8 of its
#: own.
CASES |= {
    f"{tile_m}_rows_stack_{stack}": (2 * tile_m - 3, 128, 200, 2, config(tile_m=tile_m, tile_n=64 * stack))
    for tile_m, stack in ((8, 2), (88, 1))
}


@pytest.mark.parametrize("name", [name for name in CASES if "stream_k" in name])
def test_tiles_are_divided(name: str) -> None:
    m, k, n, processors, of, *_ = CASES[name]
    assert schedule(of, m, n, k, processors, eager=True).stream_tiles


#: Cases that test_prefetched_weights and test_the_bits_are_those_of_the_other_way run.
COVERED = ("stream_k", "stack_2_odd_chunks", "multicast_whole_tiles_setmaxnreg", "depth_divided")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [name for name in CASES if name not in COVERED])
def test_products_are_right_and_clean(name: str) -> None:
    m, k, n, processors, of = CASES[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, processors=processors, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "k", "n", "ranges"),
    [
        ("stream_k", 448, 200, 5),  # a tile's last part is one stage
        ("multicast_stream_k", 384, 400, 3),
        ("pingpong_multicast_stream_k", 384, 300, 3),
    ],
)
def test_a_partial_wave_is_divided_alone(name: str, k: int, n: int, ranges: int) -> None:
    """Work ranges shorter than a tile, and whole tiles after them."""
    of = CASES[name][4]
    x, w, bias = operands(4 * of.tile_m - 3, k, n, of)
    work = schedule(of, len(x), n, k, ranges * of.cluster, divide=False)
    work = replace(work, stream_tiles=work.tiles_m * work.tiles_n % work.work_ranges)
    assert 0 < work.stream_tiles < work.work_ranges
    out, report = run_marlin(x, w, config=of, work=work, bias=bias, schedules=1)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("stream_k", 1),
        ("stack_2_odd_chunks", 2),
        ("multicast_stream_k", 1),
        ("multicast_stream_k", 16),
        ("depth_divided", 2),
    ],
)
def test_prefetched_weights(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A programmatic dependent launch: the first stages' weights come before the wait, and are not asked for twice."""
    monkeypatch.setattr(MarlinConfig, "prefetch_stages", lambda config, weight_bytes: stages)
    launch_programmatically(monkeypatch)
    m, k, n, processors, of = CASES[name]
    x, w, _ = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, processors=processors, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w) < TOLERANCE[of.dtype]


#: Every tile from which candidates are derived, with its smallest M or its largest, half of each divided.
TILES = [(tile, (tile.min_m, tile.max_m)[number % 2], number // 2 % 2 == 1) for number, tile in enumerate(WGMMA_TILES)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("tile", "size", "divide"),
    TILES,
    ids=[f"{size}x{tile.n}x{tile.k}-{'divided' if divide else 'whole'}" for tile, size, divide in TILES],
)
def test_every_tile_is_right_and_clean(tile: WgmmaTile, size: int, divide: bool) -> None:
    """Two tiles of clusters, the second with a tail of N, for one work range or three; tails of M and K."""
    dtype = ("float16", "bfloat16")[TILES.index((tile, size, divide)) // 4 % 2]
    width = tile.n * tile.cluster_n
    layer = LinearShape((5 if divide else 3) * tile.k + 64, 2 * width - 24, 128, divide, dtype)
    of = fitted(tile.config(layer, size), get_target("sm_90a"))
    x, w, bias = operands(size - 3, layer.k, layer.n, of)
    work = schedule(of, len(x), layer.n, layer.k, tile.cluster_n, divide=False)
    if divide:  # although it does not pay for this K
        work = replace(work, ctas=3 * work.cluster, stream_tiles=2)
    out, report = run_marlin(x, w, config=of, work=work, bias=bias, schedules=1)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[dtype]


@pytest.mark.slow
def test_the_order_of_additions_is_fixed() -> None:
    m, k, n, processors, of = CASES["multicast_stream_k"]
    x, w, _ = operands(m, k, n, of)
    first, again = (
        run_marlin(x, w, config=of, processors=processors, schedules=1, replay=replay)[0] for replay in (0, 7)
    )
    assert first.tobytes() == again.tobytes()


def test_a_loop_body_of_too_few_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MarlinConfig refuses: the next stage's weights go into registers that a wgmma in flight still reads."""
    monkeypatch.setattr(MarlinConfig, "_check_groups", lambda _: None)
    of = config(mmas_per_commit=4, commits_in_flight=1)
    x, w, _ = operands(8, 256, 64, of)
    with pytest.raises(HazardError, match="wgmma_registers"):
        run_marlin(x, w, config=of, processors=1, schedules=1)


# ---- Clusters that divide K


def cluster_config(**fields: Any) -> MarlinConfig:
    return wgmma(**{"tile_k": 128, "stages": 2, "mmas_per_commit": 1, "commits_in_flight": 3} | fields)


#: Parts of K that are even or not; rows of M for each CTA, for some, fewer for the last; several tiles; tails.
CLUSTERS = {
    "2_blocks": (60, 1024, 128, cluster_config(tile_m=64, cluster_k=2, warpgroups=2)),
    "3_blocks_of_5_fragments": (40, 1160, 200, cluster_config(tile_m=40, cluster_k=3, slice_k=2)),
    "4_blocks_stacked_column": (
        70, 600, 120, cluster_config(tile_m=72, cluster_k=4, tile_n=128, group_size=-1, dtype="bfloat16"),
    ),
    "8_blocks_for_3_fragments_zeros": (17, 1088, 100, cluster_config(tile_m=24, cluster_k=8, has_zeros=True, stages=3)),
    "several_tiles": (60, 520, 72, cluster_config(tile_m=56, cluster_k=4, group_size=64)),
    "fused_bf16_ring_that_wraps": (
        90, 1928, 64, cluster_config(tile_m=96, cluster_k=3, scale_form="as_stored", dtype="bfloat16"),
    ),
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_that_divide_k_are_right_and_clean(name: str) -> None:
    m, k, n, of = CLUSTERS[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.slow
def test_prefetched_weights_of_clusters_that_divide_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """A programmatic dependent launch of clusters."""
    launch_programmatically(monkeypatch)
    m, k, n, of = CLUSTERS["3_blocks_of_5_fragments"]
    x, w, _ = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w) < TOLERANCE[of.dtype]


def test_each_block_has_a_stage() -> None:
    x, w, _ = operands(20, 256, 64, of := cluster_config(tile_m=24, cluster_k=3))
    with pytest.raises(ArgumentError, match="at most 2") as caught:
        run_marlin(x, w, config=of, schedules=1)
    assert caught.value.field == "cluster_k"
    run_marlin(x, w, config=replace(of, cluster_k=2), schedules=1)


# ---- Scale and offset in one multiply-add


#: What the largest scale becomes, and the fit then; all other scales are half of it and more.
SMALL, LARGE = (2.0**-9, ScaleFit("as_stored", 0)), (1.7, ScaleFit("as_stored", 9))
BF16_SMALL, BF16_LARGE = (2.0**-6, ScaleFit("as_stored", 0)), (1.7, ScaleFit("as_stored", 6))
#: Some scales are then 2^-10 of the largest, or 2^-7.
WIDE, WIDE_LARGE = (2.0**-7, ScaleFit("shifted", 0)), (1.7, ScaleFit("shifted", 7))
#: M, K, N, CTAs, config, scales.
FUSED = {
    "stream_k": (13, 384, 136, 2, config(), SMALL),
    "stack_wide_large": (20, 200, 136, 1, config(tile_m=24, tile_k=128, tile_n=128, stages=3), WIDE_LARGE),
    "group_32_large": (9, 232, 72, 2, config(group_size=32, mmas_per_commit=4, tile_k=128), LARGE),
    "multicast_setmaxnreg": (
        13,
        256,
        300,
        4,
        config(cluster_n=2, mmas_per_commit=1, commits_in_flight=3, tile_k=128, consumer_registers=232, group_size=64),
        SMALL,
    ),
    "depth_divided_large": (
        13,
        640,
        200,
        3,
        config(slice_k=2, tile_k=128, mmas_per_commit=1, commits_in_flight=3),
        LARGE,
    ),
    "store_32_depth_divided": (
        100,
        256,
        72,
        1,
        config(tile_m=64, slice_k=2, tile_k=128, group_size=64, mmas_per_commit=1),
        WIDE,
    ),
    "bf16_stream_k": (13, 384, 136, 2, config(dtype="bfloat16"), BF16_SMALL),
    "bf16_stack_large": (20, 200, 136, 1, config(dtype="bfloat16", tile_m=24, tile_k=128, tile_n=128), BF16_LARGE),
}


def scaled(w: PackedWeight, largest: float, fit: ScaleFit) -> PackedWeight:
    """The weight with scales of either sign, of at most ``largest``; some far below that where the fit is shifted.

    bf16 has room for any: some are 2^-50 of the largest, and with p = 0 subnormal.
    """
    rng = np.random.default_rng(9)
    sizes = rng.uniform(0.5, 0.99, w.scales.shape)
    if fit.form == "shifted":
        sizes[rng.uniform(size=sizes.shape) < 0.2] /= 64 if fit.exponent else 512
    if w.dtype == "bfloat16":
        sizes[rng.uniform(size=sizes.shape) < 0.2] *= 2.0**-50 if fit.exponent else 2.0**-122
    sizes.flat[0] = 0.99
    scales = (sizes * largest * rng.choice([-1, 1], w.scales.shape)).astype(w.scales.dtype)
    scales[w.scales == 0] = 0
    made = replace(w, scales=scales)
    assert made.scale_fit == fit
    return made


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FUSED)
def test_the_bits_are_those_of_the_other_way(name: str) -> None:
    m, k, n, processors, of, (largest, fit) = FUSED[name]
    x, w, bias = operands(m, k, n, of)
    w = scaled(w, largest, fit)
    one_step, report = run_marlin(
        x, w, config=of.in_form(fit.form), processors=processors, bias=bias, schedules=SCHEDULES
    )
    assert report.is_clean
    plain, _ = run_marlin(x, w, config=of, processors=processors, bias=bias, schedules=1)
    assert one_step.tobytes() == plain.tobytes()
    assert np.isfinite(plain).all()
    assert relative_error(plain, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.parametrize(
    ("dtype", "largest", "exponent", "huge"), [("float16", 600.0, 18, 6e4), ("bfloat16", 2.0**20, 25, 1e30)]
)
def test_infinite_activations_and_overflow_stay_what_they_are(
    dtype: str, largest: float, exponent: int, huge: float
) -> None:
    """Of fp16, whose results overflow where fp32 sums do not; sums that overflow themselves do so 2^p later."""
    of = config(dtype=dtype)
    x, w, bias = operands(13, 256, 72, of)
    w = scaled(w, largest, ScaleFit("as_stored", exponent))
    x[0, 0], x[1, 7], x[2] = np.inf, np.nan, huge
    one_step, plain = (
        run_marlin(x, w, config=one, processors=2, bias=bias, schedules=1)[0].astype(np.float32)
        for one in (of.in_form("as_stored"), of)
    )
    assert np.isnan(one_step[1]).all()
    assert np.isinf(one_step[0]).any()
    assert np.isinf(one_step[2]).any() == (dtype == "float16")
    np.testing.assert_array_equal(one_step, plain)


def test_a_weight_in_another_form_is_refused() -> None:
    x, w, _ = operands(8, 128, 64, config())
    w = scaled(w, *WIDE)
    with pytest.raises(ArgumentError, match='"shifted" or "none" for the range'):
        run_marlin(x, w, config=config(scale_form="as_stored"), processors=1, schedules=1)


def served(monkeypatch: pytest.MonkeyPatch, w: PackedWeight, m: int = 33, **options: Any) -> Any:
    """The config that marlin_gemm on the emulator runs."""
    seen: list[Any] = []
    arguments = marlin.gemm_arguments

    def spy(problem: Any, config: Any, *more: Any) -> Any:
        seen.append(config)
        return arguments(problem, config, *more)

    monkeypatch.setattr(marlin, "gemm_arguments", spy)
    x = np.random.default_rng(2).normal(size=(m, w.shape[0])).astype(w.scales.dtype)
    out = marlin_gemm(x, w, backend="emulator", **options)
    assert relative_error(out, x, w) < TOLERANCE[w.dtype]
    return seen[0]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_call_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    _, w, _ = operands(1, 128, 64, config())
    assert w.scale_fit.form == "as_stored"
    chosen = served(monkeypatch, w, batch_invariant=batch_invariant)
    assert chosen.version == "wgmma"
    assert chosen.scale_form == "as_stored"
    assert served(monkeypatch, scaled(w, *WIDE_LARGE)).scale_form == "shifted"
    _, brain, _ = operands(1, 128, 64, config(dtype="bfloat16"))
    for largest, fit in (BF16_SMALL, BF16_LARGE):
        assert (
            served(monkeypatch, scaled(brain, largest, fit), batch_invariant=batch_invariant).scale_form == "as_stored"
        )
    if not batch_invariant:
        rule = choose_untuned(Problem.of(w, 33), H200)
        assert chosen.in_form("none") == rule
