"""Which tuning entry serves a problem: the user's, the table's, one alike; and the table that ships can be used."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marlin_builders import mma_sync, skinny, wgmma

from cudatma.kernels import choice, tuning
from cudatma.kernels.gpu import H200, Gpu
from cudatma.kernels.marlin.choose import MARLIN, SHIPPED, choose_by_cost, decide
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tuning import Entry, GpuClass, parse_entry, pinned, read_sections, store_entry
from cudatma.target import get_target

GPU = GpuClass.of(H200)
LAYER = LinearShape(4096, 4096, 128, False, "float16")
WGMMA = wgmma(tile_m=64, tile_n=64, tile_k=128, warpgroups=1, stages=6, mmas_per_commit=1, commits_in_flight=3)
SKINNY = skinny(tile_m=8, tile_n=32, tile_k=512, slice_k=4, stages=6)
TABLE = SHIPPED


def shipped() -> Path:
    """The table that a test sees."""
    path = tuning.shipped(MARLIN)
    assert path is not None
    return path


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's file that is not there yet, no table that ships, and nothing read before."""
    path = tmp_path / "data" / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    monkeypatch.setattr(tuning, "shipped", lambda family: tmp_path / "shipped.json")
    choice.forget()
    yield path
    choice.forget()


def entry(m: int, config: Any = WGMMA, **layer: Any) -> Entry:
    return Entry(Problem(replace(LAYER, **layer), m), replace(config, **layer), 8.0, 10.0)


def decided(m: int, gpu: Gpu = H200, **layer: Any) -> tuple[str, Any]:
    decision = decide(Problem(replace(LAYER, **layer), m), gpu)
    return decision.source, decision.config


def test_an_entry_comes_before_the_cost_model(file: Path) -> None:
    assert decided(64) == ("rule", choose_by_cost(Problem(LAYER, 64), H200))
    store_entry(file, GPU, MARLIN, entry(64))
    assert decided(64)[0] == "rule", "the file is read once a process"
    choice.forget()
    assert decided(64) == ("tuned", WGMMA)
    why = decide(Problem(LAYER, 64), H200).why
    assert f"{file} has this problem, measured at M = 64: 8.00 us, where the cost model's choice took 10.0 us" in why
    for other in ({"k": 8192}, {"n": 4160}):
        assert decided(64, **other)[0] == "rule"


def test_the_users_file_comes_before_the_table_that_ships(file: Path) -> None:
    store_entry(shipped(), GPU, MARLIN, entry(64, replace(WGMMA, stages=4)))
    store_entry(shipped(), GPU, MARLIN, entry(1, SKINNY))
    assert decided(64) == ("shipped", replace(WGMMA, stages=4))
    store_entry(file, GPU, MARLIN, entry(64))
    choice.forget()
    assert decided(64) == ("tuned", WGMMA)
    assert decided(1) == ("shipped", SKINNY)


@pytest.mark.parametrize(
    "change",
    [{"sm_count": 114}, {"sm_clock_mhz": 1700}, {"memory_clock_mhz": 2619}, {"target": "sm_90"}],
    ids=lambda change: next(iter(change)),
)
def test_entries_of_another_gpu_are_passed_over_in_silence(file: Path, change: dict[str, Any]) -> None:
    store_entry(file, replace(GPU, **change), MARLIN, entry(64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(64)[0] == "rule"


def test_a_gpu_of_the_same_class_is_the_same_gpu(file: Path) -> None:
    store_entry(file, GpuClass.of(replace(H200, sm_clock_mhz=1965)), MARLIN, entry(64))
    assert decided(64)[0] == "tuned"


# ---- Layers alike: the same K and N


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"has_zeros": True},
        {"group_size": 32},
        {"group_size": -1},
        {"group_size": 64, "has_zeros": True, "dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("m", "config"), [(64, WGMMA), (8, SKINNY)], ids=["wgmma", "skinny"])
def test_an_entry_serves_layers_alike_with_their_own_operands(
    file: Path, m: int, config: Any, change: dict[str, Any]
) -> None:
    store_entry(file, GPU, MARLIN, entry(m, config))
    assert decided(m, **change) == ("tuned", replace(config, **change))
    said = decide(Problem(replace(LAYER, **change), m), H200).why
    assert f"{file} has one of this K and N ({Problem(LAYER, m).description}), measured at M = {m}: 8.00 us" in said
    assert "has this problem, measured" in decide(Problem(LAYER, m), H200).why


def test_it_serves_the_same_m_alike(file: Path) -> None:
    store_entry(file, GPU, MARLIN, entry(64))
    assert [decided(m, dtype="bfloat16")[0] for m in (60, 40, 65)] == ["tuned", "rule", "rule"]


def test_a_layers_own_entry_comes_before_one_alike_and_the_users_before_a_shipped_one(file: Path) -> None:
    store_entry(shipped(), GPU, MARLIN, entry(64, replace(WGMMA, stages=3)))
    assert decided(64, has_zeros=True) == ("shipped", replace(WGMMA, stages=3, has_zeros=True))
    store_entry(file, GPU, MARLIN, entry(64, replace(WGMMA, stages=4)))
    choice.forget()
    assert decided(64, has_zeros=True) == ("tuned", replace(WGMMA, stages=4, has_zeros=True))
    store_entry(shipped(), GPU, MARLIN, entry(64, replace(WGMMA, stages=5), has_zeros=True))
    choice.forget()
    assert decided(64, has_zeros=True) == ("shipped", replace(WGMMA, stages=5, has_zeros=True)), "its own"
    assert decided(64) == ("tuned", replace(WGMMA, stages=4))
    # Its own entry is for another M: those of layers alike serve the rest.
    store_entry(file, GPU, MARLIN, entry(256, replace(WGMMA, stages=2), dtype="bfloat16"))
    choice.forget()
    assert decided(64, dtype="bfloat16") == ("tuned", replace(WGMMA, stages=4, dtype="bfloat16"))


FULL = wgmma(tile_m=80, tile_n=64, tile_k=128, warpgroups=1, stages=9, mmas_per_commit=1)
FOR_TWO = skinny(tile_m=8, tile_n=224, tile_k=256, slice_k=1, stages=3, ctas_per_sm=2)
SCALED_SUMS = mma_sync(tile_m=8, tile_n=128, tile_k=256, warps_n=4, stages=3, scale_on="accumulator")


@pytest.mark.parametrize(
    ("measured", "change"),
    [
        # Shared memory of a CTA; that of two CTAs on an SM.
        (entry(64, FULL), {"group_size": 32, "has_zeros": True}),
        (entry(8, FOR_TWO), {"group_size": 32, "has_zeros": True}),
        # Where the mma.sync kernel scales goes with its groups.
        (entry(8, SCALED_SUMS), {"dtype": "bfloat16"}),
    ],
    ids=["shared memory", "two CTAs", "mma.sync"],
)
def test_what_does_not_fit_a_layer_alike_is_passed_over(file: Path, measured: Entry, change: dict[str, Any]) -> None:
    m = measured.problem.m
    store_entry(file, GPU, MARLIN, measured)
    assert decided(m)[0] == "tuned", "it is right for its own layer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(m, **change)[0] == "rule"
    other = WGMMA if m == 64 else SKINNY
    store_entry(file, GPU, MARLIN, entry(m, other, group_size=64))
    choice.forget()
    assert decided(m, **change) == ("tuned", replace(other, **change)), "the next that fits"


def test_the_table_of_intervals_follows_entries_of_other_problems(file: Path) -> None:
    """Entries of layers alike: half-way between two of them the other one begins to serve."""
    store_entry(file, GPU, MARLIN, entry(66, replace(WGMMA, stages=2), group_size=64))
    store_entry(file, GPU, MARLIN, entry(100, replace(WGMMA, stages=3), group_size=32))
    choice.forget()
    configs = {m: decided(m)[1] for m in range(50, 140)}
    assert {config.stages for config in configs.values()} >= {2, 3}
    assert {m: choice.choose(MARLIN, Problem(LAYER, m), H200, {}) for m in configs} == configs
    table = choice.choice_table(MARLIN, Problem(LAYER, 1), H200, 139)
    assert {m: table.at(m) for m in configs} == configs


def test_what_was_measured_with_zero_points_serves_no_layer_alike(file: Path) -> None:
    """What they cost depends on dtype and groups."""
    store_entry(file, GPU, MARLIN, entry(8, replace(SKINNY, has_zeros=True), has_zeros=True))
    assert decided(8, has_zeros=True) == ("tuned", replace(SKINNY, has_zeros=True))
    for other in ({}, {"has_zeros": True, "group_size": 32}, {"has_zeros": True, "dtype": "bfloat16"}):
        assert decided(8, **other)[0] == "rule"


# ---- Which entry of a layer serves an M


def at(*sizes: int, tile_m: int = 64) -> list[Entry]:
    return [entry(m, replace(WGMMA, tile_m=tile_m)) for m in sizes]


@pytest.mark.parametrize(
    ("tuned", "m", "served_by"),
    [
        ((64,), 64, 64),
        ((64,), 52, 64),  # one tile of 64 both
        ((64,), 51, None),  # a tile cut to these is better
        ((64,), 65, None),  # two tiles
        ((40, 64), 50, 40),  # the nearest below
        ((40, 64), 39, 40),  # none below: the least above
        ((128,), 103, 128),
        ((128,), 102, None),
        ((512,), 700, 512),  # eight tiles and eleven
        ((512,), 1024, None),
        ((512, 1024), 1000, 512),
        ((512,), 511, 512),  # eight tiles both
        ((1024,), 900, None),  # from eight tiles on only upwards
        ((), 64, None),
    ],
)
def test_which_entry_serves(tuned: tuple[int, ...], m: int, served_by: int | None) -> None:
    found = tuning.nearest(at(*tuned), m)
    assert (None if found is None else found.problem.m) == served_by


@given(st.lists(st.integers(1, 5000), max_size=6), st.integers(1, 5000), st.sampled_from((8, 16, 64, 256)))
def test_a_serving_entry_has_the_same_work_for_each_tile(tuned: list[int], m: int, tile_m: int) -> None:
    found = tuning.nearest(at(*tuned, tile_m=tile_m), m)
    if m in tuned:
        assert found is not None
        assert found.problem.m == m
    if found is not None:
        tiles, theirs = ceil_div(m, tile_m), ceil_div(found.problem.m, tile_m)
        assert tiles == theirs or (min(tiles, theirs) >= 8 and found.problem.m <= m < 2 * found.problem.m)
        assert m > found.problem.m / 2


def test_a_pinned_configuration_is_for_its_thread_alone() -> None:
    found: list[Any] = []
    with pinned(SKINNY):
        assert decided(500) == ("pinned", SKINNY)
        thread = threading.Thread(target=lambda: found.append(decided(500)))
        thread.start()
        thread.join()
        with pinned(WGMMA):
            assert decided(500) == ("pinned", WGMMA)
        assert decided(500) == ("pinned", SKINNY)
    assert found == [("rule", choose_by_cost(Problem(LAYER, 500), H200))] == [decided(500)]


# ---- The table that ships


def test_every_entry_that_ships_can_be_used_and_pays() -> None:
    """Whoever changes a kernel's timing raises its revision: its entries are then to be measured again."""
    assert TABLE.stat().st_size <= 60_000
    problems, entries = set(), []
    for section in read_sections(TABLE):
        for raw in section["entries"]:
            found = parse_entry(raw, MARLIN, get_target(section["gpu"]["target"]))  # raises for another revision
            entries.append((tuple(section["gpu"].values()), found.problem.layer, found.problem.m))
            if found.rule_us < 1.02 * found.us:
                problems.add(f"{found.problem}: gains less than 2 %")
            if getattr(found.config, "scale_form", "none") != "none":
                problems.add(f"{found.problem}: only a weight says whether its scales are fused")
    assert not problems
    assert len(entries) == len(set(entries)) > 0, "one for each problem"
