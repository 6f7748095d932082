"""The wgmma Marlin kernel on the CPU: right, and free of hazards in several schedules, however the work is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from marlin_builders import wgmma
from marlin_runner import TOLERANCE, launch_programmatically, operands, relative_error, run_marlin

from cudatma.errors import HazardError
from cudatma.kernels.marlin.candidates import WGMMA_TILES, WgmmaTile, fitted
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.schedule import schedule
from cudatma.target import get_target

SCHEDULES = 3  # tests/mutants runs these kernels in 8


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
        90,
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
    f"{tile_m}_tokens_stack_{stack}": (2 * tile_m - 3, 128, 200, 2, config(tile_m=tile_m, tile_n=64 * stack))
    for tile_m in (8, 24, 40, 88)
    for stack in (1, 2)
}


@pytest.mark.parametrize("name", [name for name in CASES if "stream_k" in name])
def test_tiles_are_divided(name: str) -> None:
    m, k, n, processors, of, *_ = CASES[name]
    assert schedule(of, m, n, k, processors, eager=True).stream_tiles


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_products_are_right_and_clean(name: str) -> None:
    m, k, n, processors, of = CASES[name]
    x, w, bias = operands(m, k, n, of)
    out, report = run_marlin(x, w, config=of, processors=processors, bias=bias, schedules=SCHEDULES)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.sweep(1)
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
    out, report = run_marlin(x, w, config=of, work=work, bias=bias, schedules=2)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[of.dtype]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stages", [1, 2, 16])
@pytest.mark.parametrize("name", ["stream_k", "stack_2_odd_chunks", "multicast_stream_k", "depth_divided"])
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
    stages = 6 * 256 // tile.k if divide else 3  # a tile is not divided before that pays
    layer = LinearShape(stages * tile.k + 64, 2 * width - 24, 128, divide, dtype)
    of = fitted(tile.config(layer, size), get_target("sm_90a"))
    x, w, bias = operands(size - 3, layer.k, layer.n, of)
    processors = (3 if divide else 1) * tile.cluster_n
    work = schedule(of, len(x), layer.n, layer.k, processors, divide=divide, eager=True)
    assert bool(work.stream_tiles) == divide
    out, report = run_marlin(x, w, config=of, processors=processors, bias=bias, divide=divide, schedules=2)
    assert report.is_clean
    assert relative_error(out, x, w, bias) < TOLERANCE[dtype]


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
