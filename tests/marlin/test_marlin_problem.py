"""Division of a Marlin problem: a model of the device's CTAs must compute every product exactly once."""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.build.render import render
from cudatma.errors import ArgumentError
from cudatma.kernels.launch_struct import offsets, pack, size_bytes, work_values
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import weight_values
from cudatma.kernels.registry import REGISTRY
from cudatma.kernels.schedule import Assignment, Schedule, assignments, ceil_div, divisor, schedule
from cudatma.target import get_target

CONFIGS = [
    mma_sync(tile_m=8, tile_n=128, tile_k=256, warps_n=4, stages=3),
    mma_sync(tile_m=16, tile_n=64, tile_k=256, warps_n=2, slice_k=2, stages=3),
    mma_sync(tile_m=64, tile_n=256, tile_k=128, warps_n=8, stages=3),
    mma_sync(tile_m=128, tile_n=256, tile_k=64, warps_n=8, stages=3),
]
WGMMA = [
    wgmma(tile_m=64, tile_n=256, tile_k=128, warpgroups=2, stages=6),
    wgmma(tile_m=256, tile_n=128, tile_k=64, warpgroups=2, stages=5, cluster_n=2, consumer_registers=232),
]
EVERY_CONFIG = [
    config
    for name in ("marlin_mma_sync", "marlin_wgmma", "marlin_skinny")
    for config in REGISTRY[name].configs(get_target("sm_90a"))
]
problems = st.tuples(
    st.sampled_from([*CONFIGS, *WGMMA]),
    st.integers(1, 3000),
    st.integers(1, 9000),
    st.integers(1, 6000),
    st.integers(1, 400),
)


@dataclass(frozen=True)
class Unit:
    """Stages k_begin .. k_end - 1 of a tile."""

    tile: int
    k_begin: int
    k_end: int


@dataclass(frozen=True)
class Cut:
    """A problem as the device sees it: the grid, and the results of work_values() and weight_values()."""

    problem: Any
    work_ranges: int
    plan: Schedule

    @property
    def tiles(self) -> int:
        return int(self.problem.tiles_m * self.problem.tiles_n)

    def range_begin(self, index: int) -> int:
        return int(index * self.problem.stream_stages + min(index, self.problem.stream_extra))

    def units(self, index: int) -> list[Unit]:
        """Return the work units of a work range in order: its part of the divided tiles, then whole tiles."""
        found, stage, end = [], self.range_begin(index), self.range_begin(index + 1)
        k_iterations = self.problem.k_iterations
        while stage < end:
            tile, k = divmod(stage, k_iterations)
            taken = min(k_iterations - k, end - stage)
            found.append(Unit(tile, k, k + taken))
            stage += taken
        whole = range(self.problem.stream_tiles + index, self.tiles, self.problem.work_ranges)
        return found + [Unit(tile, 0, k_iterations) for tile in whole]

    def partial_ranges(self, index: int, unit: Unit) -> list[int]:
        """Return the following work ranges, whose partial sums the owner of a tile adds, until its K is complete."""
        missing, last = self.problem.k_iterations - unit.k_end, index
        while missing > 0:
            last += 1
            missing -= min(missing, self.range_begin(last + 1) - self.range_begin(last))
        return list(range(index + 1, last + 1))


def cut(config: MarlinConfig, m: int, n: int, k: int, resident: int) -> Cut:
    plan = schedule(config, m, n, k, resident)
    problem = SimpleNamespace(
        **work_values(plan, m, n, k, config.tile_m), **weight_values(config, n, k, ceil_div(k, 128))
    )
    assert plan.ctas == plan.work_ranges * config.cluster
    return Cut(problem, plan.work_ranges, plan)


def every_unit(made: Cut) -> list[tuple[int, Unit]]:
    return [(index, unit) for index in range(made.work_ranges) for unit in made.units(index)]


@given(problems)
def test_every_stage_of_every_tile_is_worked_on_once(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    made = cut(*case)
    counts = np.zeros((made.tiles, made.problem.k_iterations), int)
    for _, unit in every_unit(made):
        assert unit.k_begin < unit.k_end
        counts[unit.tile, unit.k_begin : unit.k_end] += 1
    assert (counts == 1).all()


@given(problems)
def test_the_grid_fits_the_gpu_and_no_cta_is_idle(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    made = cut(*case)
    assert case[0].cluster <= made.plan.ctas <= max(case[-1], case[0].cluster)
    assert all(made.units(index) for index in range(made.work_ranges))


@given(problems)
def test_the_longest_range(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    """It is the one that assignments() says, of those the one that is predicted to be shortest; the divided parts of
    work ranges differ by one stage at most."""
    config, m, _, _, resident = case
    made = cut(*case)
    parts = [made.units(index) for index in range(made.work_ranges)]
    divided = [sum(u.k_end - u.k_begin for u in units if u.tile < made.plan.stream_tiles) for units in parts]
    whole = [sum(u.k_end - u.k_begin for u in units if u.tile >= made.plan.stream_tiles) for units in parts]
    clusters, tiles_m = max(1, resident // config.cluster), ceil_div(m, config.tile_m)
    found = {each.stream_tiles: each for each in assignments(made.tiles, tiles_m, clusters, made.problem.k_iterations)}
    taken = found[made.plan.stream_tiles]
    longest = max(map(sum, zip(whole, divided, strict=True)))
    assert longest == taken.whole_stages + taken.divided_stages
    assert max(divided) - min(divided) <= 1

    def predicted(each: Assignment) -> float:
        once, factor = config.division(each.others, tiles_m) if each.stream_tiles else (0, 0)
        return each.whole_stages + each.divided_stages * factor + once

    assert predicted(taken) == min(map(predicted, found.values()))


@given(problems)
def test_divided_tiles_would_take_longer_whole(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    config, *_, resident = case
    made = cut(*case)
    longest = ceil_div(made.tiles, max(1, resident // config.cluster)) * made.problem.k_iterations
    if made.plan.stream_tiles:
        assert longest > max(sum(u.k_end - u.k_begin for u in made.units(index)) for index in range(made.work_ranges))


@given(problems)
def test_as_many_ranges_share_a_tile_as_the_assignment_says(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    """Two ranges share a tile if a full wave is also divided."""
    config, m, _, _, resident = case
    made = cut(*case)
    clusters, tiles_m = max(1, resident // config.cluster), ceil_div(m, config.tile_m)
    found = assignments(made.tiles, tiles_m, clusters, made.problem.k_iterations)
    (others,) = {each.others for each in found if each.stream_tiles == made.plan.stream_tiles}
    shared = Counter(unit.tile for _, unit in every_unit(made) if unit.tile < made.plan.stream_tiles)
    if made.plan.stream_tiles:
        assert max(shared.values()) <= 1 + others
    if made.plan.stream_tiles > clusters:
        assert others == 1


@given(problems)
def test_a_partial_sum_is_of_the_first_unit_of_its_work_range(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    """A work range needs one slot in the workspace, and writes the slot before its CTA waits for another range."""
    made = cut(*case)
    for index in range(made.work_ranges):
        units = made.units(index)
        assert all(unit.k_begin == 0 for unit in units[1:])
    divided = [index for index, unit in every_unit(made) if unit.k_begin > 0]
    assert all((index + 1) * case[0].cluster <= made.plan.partial_ctas for index in divided)


@given(problems)
def test_an_owner_has_a_tiles_first_stage_as_its_last_divided_unit(
    case: tuple[MarlinConfig, int, int, int, int],
) -> None:
    made = cut(*case)
    for index, unit in every_unit(made):
        if unit.k_begin == 0 and unit.k_end < made.problem.k_iterations:
            divided = [u for u in made.units(index) if u.tile < made.problem.stream_tiles]
            assert divided[-1] == unit


@given(problems)
def test_owners_fix_up_from_exactly_the_work_ranges_that_store_partial_sums(
    case: tuple[MarlinConfig, int, int, int, int],
) -> None:
    """These CTAs have lower numbers, so the GPU dispatches them before the CTA that waits for them."""
    made = cut(*case)
    wanted: dict[int, list[int]] = {}
    for index, unit in every_unit(made):
        if unit.k_begin > 0:
            wanted.setdefault(unit.tile, []).append(index)
    for index, unit in every_unit(made):
        if unit.k_begin == 0:
            sources = made.partial_ranges(index, unit)
            assert sources == wanted.pop(unit.tile, [])
            assert all(made.work_ranges - 1 - other < made.work_ranges - 1 - index for other in sources)
    assert not wanted, "partial sums without a fix-up"


@settings(max_examples=40)
@given(problems, st.integers(0, 2**32))
def test_the_fixed_up_sums_are_the_tiles_sums(case: tuple[MarlinConfig, int, int, int, int], seed: int) -> None:
    """CTAs run in the order of their numbers. The comparison is exact, because sums of integers are not rounded."""
    made = cut(*case)
    values = np.random.default_rng(seed).integers(-99, 100, (made.tiles, made.problem.k_iterations))
    results: dict[int, int] = {}
    slots: dict[int, int] = {}
    for cta in range(made.work_ranges):
        index = made.work_ranges - 1 - cta
        for unit in made.units(index):
            total = int(values[unit.tile, unit.k_begin : unit.k_end].sum())
            if unit.k_begin > 0:
                assert index not in slots, "a slot is overwritten before its fix-up"
                slots[index] = total
                continue
            # A KeyError here is a wait for a CTA that has not started.
            results[unit.tile] = total + sum(slots.pop(other) for other in made.partial_ranges(index, unit))
    assert results == {tile: int(values[tile].sum()) for tile in range(made.tiles)}
    assert not slots


@given(problems)
def test_positions_of_tiles_are_a_permutation(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    """Raster groups of raster_m tiles of M, column by column of tiles, as parts/schedule.cuh.j2 numbers them."""
    problem = cut(*case).problem
    seen = set()
    for tile in range(problem.tiles_m * problem.tiles_n):
        raster_group, inside = divmod(tile, problem.raster_m * problem.tiles_n)
        rows = min(problem.raster_m, problem.tiles_m - raster_group * problem.raster_m)
        column, row = divmod(inside, rows)
        seen.add((raster_group * problem.raster_m + row, column))
    assert seen == {(m, n) for m in range(problem.tiles_m) for n in range(problem.tiles_n)}


@given(problems)
def test_the_problem_that_the_device_reads(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    config, m, n, k, _ = case
    problem = cut(*case).problem
    assert (problem.m, problem.n, problem.k) == (m, n, k)
    assert problem.weight_rows == ceil_div(n, 64) * problem.weight_row_blocks
    assert problem.scale_pitch % 64 == 0
    assert 0 <= problem.scale_pitch - n < 64
    assert (problem.tiles_m - 1) * config.tile_m < m <= problem.tiles_m * config.tile_m
    assert (problem.k_iterations - 1) * config.tile_k < k <= problem.k_iterations * config.tile_k


@pytest.mark.sweep(12)
@pytest.mark.parametrize("config", EVERY_CONFIG, ids=lambda config: config.entry)
def test_the_struct_has_the_members_that_the_kernel_reads_where_it_reads_them(config: Any) -> None:
    source = re.sub(r"//.*", "", render(config.template, config, "sm_90a"))
    body = source.split("struct Problem {", 1)[1].split("};", 1)[0]
    declared = re.findall(r"(\w+) (\w+);", body)
    assert [(member.type, member.name) for member in config.problem_members] == declared
    assert {name for _, name in declared} == set(re.findall(r"\bproblem\.(\w+)", source))
    sizes = {"u32": (4, 4), "float": (4, 4), "u64": (8, 8), "Divisor": (8, 4)}  # size, alignment
    end = 0
    for kind, name in declared:
        size, alignment = sizes[kind]
        end = -(-end // alignment) * alignment
        assert offsets(config.problem_members)[name] == end
        end += size
    assert size_bytes(config.problem_members) == -(-end // 8) * 8  # the pitches are there in each kernel


def test_the_bytes_are_those_that_the_device_reads() -> None:
    config = wgmma(tile_m=16, tile_n=128, tile_k=128, warpgroups=2, stages=4, scale_form="as_stored")
    plan = schedule(config, 100, 512, 1024, 4)
    values = work_values(plan, 100, 512, 1024, config.tile_m, output_pitch=1 << 40)
    values |= weight_values(config, 512, 1024, 8, scale_exponent=3)
    packed, at = pack(config.problem_members, values), offsets(config.problem_members)
    assert struct.unpack_from("<I", packed, at["m"]) == (100,)
    assert struct.unpack_from("<f", packed, at["scale_back"]) == (8.0,)
    assert struct.unpack_from("<II", packed, at["by_k_iterations"]) == divisor(values["by_k_iterations"])
    assert struct.unpack_from("<Q", packed, at["output_pitch"]) == (1 << 40,)
    with pytest.raises(KeyError, match="output_pitch"):
        pack(config.problem_members, {name: value for name, value in values.items() if name != "output_pitch"})


@given(st.integers(1, 2**31 - 1) | st.integers(1, 300), st.integers(0, 2**31 - 1))
@example(1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**30 + 1, 2**31 - 1)
def test_a_multiplication_divides(d: int, n: int) -> None:
    multiplier, shift = divisor(d)
    for each in (n, n // d * d, max(0, n // d * d - 1)):  # at multiples, and right before them
        assert (2 * each * multiplier >> 32) >> shift == each // d


@given(problems)
def test_tiles_lie_where_the_device_computes_them(case: tuple[MarlinConfig, int, int, int, int]) -> None:
    """tile_position() of parts/schedule.cuh.j2 in Python: each tile once, raster group after raster group."""
    problem = cut(*case).problem

    def divide(n: int, by: int) -> int:
        multiplier, shift = divisor(by)
        return (2 * n * multiplier >> 32) >> shift

    tiles = problem.tiles_m * problem.tiles_n
    for tile in {0, 1, tiles // 3, tiles // 2, tiles - 2, tiles - 1} & set(range(tiles)):
        first_row = divide(tile, problem.by_raster_group) * problem.raster_m
        inside, rows_left = tile - first_row * problem.tiles_n, problem.tiles_m - first_row
        rows, by = min(rows_left, problem.raster_m), problem.by_raster_group_rows
        by = problem.by_last_rows if rows_left <= problem.raster_m else by
        column = divide(inside, by)
        assert (column, first_row + inside - column * rows) == (inside // rows, first_row + inside % rows)
        assert column < problem.tiles_n
    assert divide(problem.k_iterations * 5 + 3, problem.by_k_iterations) == 5 + 3 // problem.k_iterations


def test_full_waves_are_assigned_whole() -> None:
    config = CONFIGS[0]
    assert schedule(config, 8, 128 * 132, 4096, 132) == Schedule(132, 1, 132, 16, 0)
    one_more = schedule(config, 8, 128 * 133, 4096, 132)
    assert (one_more.ctas, one_more.stream_tiles, one_more.partial_ctas) == (132, 133, 132)
    single = schedule(config, 1, 128, 256, 132)
    assert (single.ctas, single.partial_ctas) == (1, 0)


def test_all_ctas_share_a_few_tiles_of_large_k() -> None:
    config = CONFIGS[0]
    few = schedule(config, 1, 4 * 128, 256 * 66, 132)
    assert (few.ctas, few.stream_tiles, few.partial_ctas) == (132, 4, 132)
    # As few CTAs as keep the longest work range: 200 stages are two for each of 132 CTAs, and still two for 100.
    assert schedule(config, 1, 2 * 128, 256 * 100, 132).ctas == 100


@pytest.mark.parametrize(
    ("tile_m", "k", "n", "prefetched"),
    [
        (8, 4096, 12288, 1),  # 24 MiB of weights
        (8, 8192, 6911, 1),
        (8, 8192, 6912, 2),  # 27 MiB
        (8, 8192, 28672, 2),
        (1, 4096, 4096, 2),  # the few activations of a small M do not wait long
        (4, 1024, 1024, 2),
        (16, 8192, 28672, 1),  # larger M: weights would delay its activations
        (8, 64, 2**20, 2),  # one stage altogether: the kernels load no more than exist
    ],
)
def test_a_dependent_launch_prefetches_two_stages_of_long_layers(tile_m: int, k: int, n: int, prefetched: int) -> None:
    config = skinny(tile_m=tile_m, tile_n=64, tile_k=512, slice_k=4, stages=4, deep_box=True)
    for programmatic, wanted in ((True, prefetched), (False, 0)):
        values = weight_values(config, n, k, ceil_div(k, 128), programmatic=programmatic)
        assert values["prefetch_stages"] == wanted


@pytest.mark.parametrize(
    ("tile_m", "cluster_k", "k", "n", "prefetched"),
    [
        (16, 1, 8192, 28672, 2),
        (16, 1, 4096, 12288, 1),  # 24 MiB of weights
        (16, 2, 8192, 28672, 1),  # never measured
        (24, 1, 8192, 28672, 1),
        (8, 2, 8192, 28672, 2),  # as the skinny GEMM does
    ],
)
def test_tiles_of_wgmma_prefetch_too(tile_m: int, cluster_k: int, k: int, n: int, prefetched: int) -> None:
    config = wgmma(tile_m=tile_m, tile_n=192, tile_k=256, warpgroups=3, stages=4, cluster_k=cluster_k)
    values = weight_values(config, n, k, ceil_div(k, 128), programmatic=True)
    assert values["prefetch_stages"] == prefetched


def test_clusters_that_divide_k() -> None:
    """A cluster for each tile, however many are resident; all CTAs have stages, and nothing uses the workspace."""
    thin = skinny(tile_m=8, tile_n=32, tile_k=512, slice_k=4, stages=3, cluster_k=3)
    assert thin.launch_cluster == 3
    # 32 N tiles of an N of 1024, three CTAs each: 96; eight stages with a tile_k of 512.
    assert schedule(thin, 1, 1024, 4096, 132) == Schedule(96, 1, 32, 8, 0)
    assert schedule(thin, 9, 1024, 4096, 132) == Schedule(192, 2, 32, 8, 0)
    tile = replace(WGMMA[0], cluster_k=2)
    assert (tile.launch_cluster, tile.partial_bytes) == (2, 0)
    # Two tiles of 64 rows, sixteen of 256 columns, 32 stages with a tile_k of 128.
    assert schedule(tile, 65, 4096, 4096, 132) == Schedule(2 * 2 * 16, 2, 16, 32, 0)
    for config in (thin, replace(tile, cluster_k=3)):
        assert schedule(config, 1, 128, 2 * config.tile_k + 1, 132).k_iterations == 3
        with pytest.raises(ArgumentError, match="at most 2") as caught:
            schedule(config, 1, 128, 2 * config.tile_k, 132)
        assert caught.value.field == "cluster_k"


def test_too_many_stages_are_refused() -> None:
    with pytest.raises(ArgumentError, match="split the batch"):
        schedule(CONFIGS[0], 2**31, 2**20, 4096, 132)
