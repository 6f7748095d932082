"""Tuning entries: which one serves a problem, the table that ships, and what files keep, refuse and ignore."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marlin_builders import mma_sync, skinny, wgmma
from threads import in_threads

from cudatma.errors import ArgumentError, ArgumentTypeError, TuneFileWarning
from cudatma.kernels import choice, tuning
from cudatma.kernels.gpu import H200, Gpu
from cudatma.kernels.marlin.choose import MARLIN, SHIPPED, choose_untuned, decide
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.schedule import ceil_div
from cudatma.kernels.tuning import (
    Entry,
    GpuClass,
    parse_entry,
    pinned,
    read_sections,
    store_entry,
    usable_entries,
    user_file,
)
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


def entry(m: int, config: Any = WGMMA, us: float = 8.0, **layer: Any) -> Entry:
    return Entry(Problem(replace(LAYER, **layer), m), replace(config, **layer), us, 10.0)


def decided(m: int, gpu: Gpu = H200, **layer: Any) -> tuple[str, Any]:
    decision = decide(Problem(replace(LAYER, **layer), m), gpu)
    return decision.source, decision.config


def test_an_entry_comes_before_the_cost_model(file: Path) -> None:
    assert decided(64) == ("rule", choose_untuned(Problem(LAYER, 64), H200))
    store_entry(file, GPU, MARLIN, entry(64))
    assert decided(64)[0] == "rule", "the file is read once a process"
    choice.forget()
    assert decided(64) == ("tuned", WGMMA)
    why = decide(Problem(LAYER, 64), H200).why
    assert f"{file} contains this problem, measured at M = 64: 8.00 us; the untuned choice took 10.0 us" in why
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
    assert (
        f"{file} contains one of this K and N ({Problem(LAYER, m).description}), measured at M = {m}: 8.00 us" in said
    )
    assert "contains this problem, measured" in decide(Problem(LAYER, m), H200).why


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
    assert found == [("rule", choose_untuned(Problem(LAYER, 500), H200))] == [decided(500)]


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


# ---- Files of entries


SM90A = get_target("sm_90a")
MMA_SYNC = mma_sync(tile_m=8, tile_n=128, tile_k=256, warps_n=4, stages=3, scale_on="accumulator")


def source(m: int) -> str:
    return decide(Problem(LAYER, m), H200).source


def test_an_entry_comes_back_as_it_was() -> None:
    for config in (WGMMA, SKINNY, replace(WGMMA, cluster_n=2), MMA_SYNC):
        one = Entry(Problem(LAYER, 64), config, 8.5, 10.25)
        raw = json.loads(json.dumps(one.as_json(MARLIN)))
        assert parse_entry(raw, MARLIN, SM90A) == one


def test_storing_keeps_all_else_and_replaces_its_own(file: Path) -> None:
    other = replace(GPU, sm_count=20)
    for gpu, one in ((other, entry(64)), (GPU, entry(64)), (GPU, entry(128)), (GPU, entry(64, us=7.0))):
        store_entry(file, gpu, MARLIN, one)
    sections = json.loads(file.read_text())["sections"]
    assert [section["gpu"] for section in sections] == [asdict(other), asdict(GPU)]
    assert [(raw["m"], raw["us"]) for raw in sections[1]["entries"]] == [(128, 8.0), (64, 7.0)]
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"], "no lock and nothing half written stays"


def test_many_writers_lose_nothing(file: Path) -> None:
    def write(first: int) -> None:
        for m in range(first, 40, 4):
            store_entry(file, GPU, MARLIN, entry(m + 1))

    in_threads(4, write)
    found, problems = usable_entries(file, MARLIN, H200)
    assert (sorted(one.problem.m for one in found), problems) == (list(range(1, 41)), [])


def test_a_failed_write_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_entry(file, GPU, MARLIN, entry(64))
    before = file.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        store_entry(file, GPU, MARLIN, entry(128))
    assert file.read_text() == before
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_a_link_and_the_files_mode_stay(file: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared.json"
    store_entry(shared, GPU, MARLIN, entry(64))
    shared.chmod(0o664)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(shared)
    store_entry(file, GPU, MARLIN, entry(128))
    assert file.is_symlink()
    assert (shared.stat().st_mode & 0o777, shared.read_text().count('"m": ')) == (0o664, 2)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "~/mine.json")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_file() == tmp_path / "mine.json"
    monkeypatch.delenv("CUDATMA_TUNE_FILE")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert user_file() == tmp_path / ".local/share/cudatma/tuned.json"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_file() == tmp_path / "data/cudatma/tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "none")
    assert user_file() is None
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "here.json")
    with pytest.raises(ArgumentError, match="absolute path"):
        user_file()
    with pytest.warns(TuneFileWarning, match="absolute path"):
        assert source(64) == "rule"


# ---- What is ignored, and said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "the file contains no tuning entries"),
        ('{"hello": 1}', "the file contains no tuning entries"),
        ('{"schema": 6, "sections": []}', "schema 6, but this version of cudatma reads schema 5"),
        ('{"schema": 5}', "the sections of the file are corrupt"),
        (f'{{"schema": 1{"0" * 99}}}', "the file has schema an int of 329 bits, but"),
        ('{"schema": 5, "sections": [{"gpu": {}, "entries": [3]}]}', "the sections of the file are corrupt"),
        ('{"schema": 4, "sections": 5}', "an earlier version of cudatma.* run `cudatma tune` to measure again$"),
        ("[" * 100_000, "nested too deeply"),
        ("\x00\x01", "Expecting value"),
    ],
)
def test_a_file_that_is_damaged_or_something_else_is_ignored_and_kept(file: Path, text: str, why: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(TuneFileWarning, match=f"tuned.json is ignored: .*{why}"):
        assert source(64) == "rule"
    assert file.read_text() == text, "a look changes nothing"
    assert usable_entries(file, MARLIN, H200)[1][0].startswith("the whole file: ")
    with pytest.warns(TuneFileWarning, match="renamed to tuned.json.unread-1"):
        store_entry(file, GPU, MARLIN, entry(64))
    assert (file.parent / "tuned.json.unread-1").read_text() == text
    choice.forget()
    assert source(64) == "tuned"


def test_a_pipe_or_a_device_in_its_place_is_not_read(file: Path) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    with pytest.warns(TuneFileWarning, match="not a regular file"):
        assert source(64) == "rule"
    file.unlink()
    file.symlink_to("/dev/zero")
    choice.forget()
    with pytest.warns(TuneFileWarning, match="not a regular file"):
        assert source(64) == "rule"


def test_an_entry_of_another_revision_is_ignored_and_the_command_named(file: Path) -> None:
    store_entry(file, GPU, MARLIN, entry(1, SKINNY))
    store_entry(file, GPU, MARLIN, entry(64))
    older = f'"kernel": "wgmma", "revision": {MarlinConfig.revision - 1}'
    file.write_text(file.read_text().replace(f'"kernel": "wgmma", "revision": {MarlinConfig.revision}', older))
    command = "run `cudatma tune marlin --shape 4096x4096 --m 64"
    with pytest.warns(TuneFileWarning, match=f"m 64 is ignored: revision must be .*{command}"):
        assert source(64) == "rule"
    assert source(1) == "tuned", "the other kernel's entries hold"


def broken(**change: Any) -> dict[str, Any]:
    raw = json.loads(json.dumps(entry(64).as_json(MARLIN)))
    config = change.pop("config", {})
    return raw | change | {"config": {**raw["config"], **config}}


BROKEN = [
    broken(kernel="magic"),
    broken(kernel=["wgmma"]),
    broken(revision="1"),
    broken(m="64"),
    broken(m=0),
    broken(revision=10**99),
    broken(us="fast"),
    broken(us=[]),
    broken(us=10**400),
    broken(rule_us=float("nan")),
    broken(dtype="bfloat17"),
    broken(config={"stages": 200}),
    broken(config={"stages": 16, "tile_m": 256}),
    broken(config={"cluster": True}),
    broken(config={"dtype": "float64"}),
    broken(config={"group_size": 64}),
    broken(config={"stacks": 1}),
    broken() | {"config": 7},
    {name: value for name, value in broken().items() if name != "rule_us"},
]


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
def test_an_entry_that_cannot_be_run_is_ignored_and_named(file: Path, raw: dict[str, Any]) -> None:
    store_entry(file, GPU, MARLIN, entry(1, SKINNY))
    content = json.loads(file.read_text())
    content["sections"][0]["entries"].append(raw)
    file.write_text(json.dumps(content))
    found, problems = usable_entries(file, MARLIN, H200)
    assert [one.problem.m for one in found] == [1]
    assert len(problems) == 1
    assert "0" * 99 not in problems[0]
    assert problems[0].startswith(f"the entry k 4096, n 4096, m {raw['m']!r}: ")
    with pytest.warns(TuneFileWarning, match=f"the entry k 4096, n 4096, m {raw['m']!r} is ignored"):
        assert source(1) == "tuned"


def test_what_a_launch_would_refuse_is_refused() -> None:
    """One box for a K that is a multiple of 64; a stage for each CTA of a cluster; a number that is none."""
    deep = entry(8, replace(SKINNY, deep_box=True)).as_json(MARLIN)
    with pytest.raises(ArgumentError, match="4128 is not a multiple of 64") as caught:
        parse_entry(deep | {"k": 4128}, MARLIN, SM90A)
    assert caught.value.field == "deep_box"
    assert parse_entry(entry(8, SKINNY).as_json(MARLIN) | {"k": 4128}, MARLIN, SM90A).problem.k == 4128
    clusters, two_stages = entry(64, replace(WGMMA, cluster_k=3)).as_json(MARLIN), 2 * WGMMA.tile_k
    with pytest.raises(ArgumentError, match="at most the number of stages along") as caught:
        parse_entry(clusters | {"k": two_stages}, MARLIN, SM90A)
    assert caught.value.field == "cluster_k"
    parse_entry(clusters | {"k": two_stages + 1}, MARLIN, SM90A)
    with pytest.raises(ArgumentTypeError, match="m"):
        parse_entry(broken(m=1.5), MARLIN, SM90A)
