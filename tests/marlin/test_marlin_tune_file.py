"""Files of tuning entries: writing loses nothing, reading validates; ignored entries are reported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from marlin_builders import mma_sync, skinny, wgmma
from threads import in_threads

from cudatma.errors import ArgumentError, ArgumentTypeError, TuneFileWarning
from cudatma.kernels import choice, tuning
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.choose import MARLIN, decide
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.tuning import (
    Entry,
    GpuClass,
    parse_entry,
    store_entry,
    usable_entries,
    user_file,
)
from cudatma.target import get_target

SM90A = get_target("sm_90a")
GPU = GpuClass.of(H200)
LAYER = LinearShape(4096, 4096, 128, False, "float16")
WGMMA = wgmma(tile_m=64, tile_n=64, tile_k=128, warpgroups=1, stages=6, mmas_per_commit=1, commits_in_flight=3)
SKINNY = skinny(tile_m=8, tile_n=32, tile_k=512, slice_k=4, stages=6)
MMA_SYNC = mma_sync(tile_m=8, tile_n=128, tile_k=256, warps_n=4, stages=3, scale_on="accumulator")


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's file that is not there yet, no table that ships, and nothing read before."""
    path = tmp_path / "data" / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    monkeypatch.setattr(tuning, "shipped", lambda family: tmp_path / "shipped.json")
    choice.forget()
    yield path
    choice.forget()


def entry(m: int, config: Any = WGMMA, us: float = 8.0) -> Entry:
    return Entry(Problem(LAYER, m), config, us, 10.0)


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
        ("[]", "no file of tuning entries"),
        ('{"hello": 1}', "no file of tuning entries"),
        ('{"schema": 6, "sections": []}', "schema is 6, and this version of cudatma reads 5"),
        ('{"schema": 5}', "sections are damaged"),
        (f'{{"schema": 1{"0" * 99}}}', "its schema is an int of 329 bits, and"),
        ('{"schema": 5, "sections": [{"gpu": {}, "entries": [3]}]}', "sections are damaged"),
        ('{"schema": 4, "sections": 5}', "an earlier version of cudatma .* again with: cudatma tune$"),
        ("[" * 100_000, "nested too deeply"),
        ("\x00\x01", "Expecting value"),
    ],
)
def test_a_file_that_is_damaged_or_something_else_is_ignored_and_kept(file: Path, text: str, why: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(TuneFileWarning, match=f"tuned.json: not used: .*{why}"):
        assert source(64) == "rule"
    assert file.read_text() == text, "a look changes nothing"
    assert usable_entries(file, MARLIN, H200)[1][0].startswith("the whole file: ")
    with pytest.warns(TuneFileWarning, match="kept as tuned.json.unread-1"):
        store_entry(file, GPU, MARLIN, entry(64))
    assert (file.parent / "tuned.json.unread-1").read_text() == text
    choice.forget()
    assert source(64) == "tuned"


def test_a_pipe_or_a_device_in_its_place_is_not_read(file: Path) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    with pytest.warns(TuneFileWarning, match="no regular file"):
        assert source(64) == "rule"
    file.unlink()
    file.symlink_to("/dev/zero")
    choice.forget()
    with pytest.warns(TuneFileWarning, match="no regular file"):
        assert source(64) == "rule"


def test_an_entry_of_another_revision_is_ignored_and_the_command_named(file: Path) -> None:
    store_entry(file, GPU, MARLIN, entry(1, SKINNY))
    store_entry(file, GPU, MARLIN, entry(64))
    older = f'"kernel": "wgmma", "revision": {MarlinConfig.revision - 1}'
    file.write_text(file.read_text().replace(f'"kernel": "wgmma", "revision": {MarlinConfig.revision}', older))
    command = "measure again with: cudatma tune marlin --shape 4096x4096 --m 64"
    with pytest.warns(TuneFileWarning, match=f"m 64: revision: .*{command}"):
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
    with pytest.warns(TuneFileWarning, match=f"an entry is not used: k 4096, n 4096, m {raw['m']!r}: "):
        assert source(1) == "tuned"


def test_what_a_launch_would_refuse_is_refused() -> None:
    """One box for a K that is a multiple of 64; a stage for each CTA of a cluster; a number that is none."""
    deep = entry(8, replace(SKINNY, deep_box=True)).as_json(MARLIN)
    with pytest.raises(ArgumentError, match="4128 is not a multiple of 64") as caught:
        parse_entry(deep | {"k": 4128}, MARLIN, SM90A)
    assert caught.value.field == "deep_box"
    assert parse_entry(entry(8, SKINNY).as_json(MARLIN) | {"k": 4128}, MARLIN, SM90A).problem.k == 4128
    clusters, two_stages = entry(64, replace(WGMMA, cluster_k=3)).as_json(MARLIN), 2 * WGMMA.tile_k
    with pytest.raises(ArgumentError, match="at most the stages") as caught:
        parse_entry(clusters | {"k": two_stages}, MARLIN, SM90A)
    assert caught.value.field == "cluster_k"
    parse_entry(clusters | {"k": two_stages + 1}, MARLIN, SM90A)
    with pytest.raises(ArgumentTypeError, match="m"):
        parse_entry(broken(m=1.5), MARLIN, SM90A)
