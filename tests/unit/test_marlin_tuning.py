"""Tuned configurations: the file, what is ignored of it and said, and which cell serves a number of tokens."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.errors import ArgumentError, ArgumentTypeError, TuneFileWarning
from cudatma.kernels.marlin import tune_file, tuning
from cudatma.kernels.marlin.card import H200, Card
from cudatma.kernels.marlin.config import Layer, choose, choose_untuned, decide
from cudatma.kernels.marlin.layer import Choice
from cudatma.kernels.marlin.problem import ceil_div
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.tune_file import Cell, TuneKey, parse_cell, read_cells, store_cell, tune_key, user_file
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.target import get_target

SM90A = get_target("sm_90a")
LAYER = Layer(4096, 4096, 128, False, "float16")
WGMMA = WgmmaSpec("float16", 128, False, 64, 128, 1, 1, 6, steps=1, in_flight=3)
STRIP = StripSpec("float16", 128, False, 8, 1, 512, 4, 6)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's file that is not there yet, no shipped one, NVRTC 13.0, and nothing read before."""
    path = tmp_path / "data" / "tuned.json"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", str(path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tune_file, "installed_nvrtc", lambda: (13, 0))
    tuning.forget()
    yield path
    tuning.forget()


def cell(m: int, spec: Any = WGMMA, us: float = 8.0, blocks: int = 1, **layer: Any) -> Cell:
    return Cell(replace(LAYER, **layer), m, Choice(replace(spec, **layer), blocks), us, 10.0)


def decided(m: int, card: Card = H200) -> tuple[str, Any]:
    decision = decide(LAYER, m, SM90A, 132, card)
    return decision.source, decision.choice.spec


def test_a_tuned_cell_comes_before_the_rules(fresh: Path) -> None:
    assert decided(64) == ("rule", choose_untuned(LAYER, 64, SM90A, 132).spec)
    store_cell(fresh, tune_key(H200), cell(64))
    assert decided(64)[0] == "rule", "the file is read once a process"
    tuning.forget()
    assert decided(64) == ("tuned", WGMMA)
    found = decide(LAYER, 64, SM90A, 132, H200)
    assert str(fresh) in found.why
    assert "8 us" in found.why


def test_it_is_for_these_sizes_and_feeds_alone(fresh: Path) -> None:
    store_cell(fresh, tune_key(H200), cell(64))
    for other in (replace(LAYER, k=8192), replace(LAYER, n=4160)):
        assert decide(other, 64, SM90A, 132, H200).source == "rule"
    assert decided(64)[0] == "tuned"


def test_the_users_file_comes_before_a_shipped_table(fresh: Path) -> None:
    shipped = tuning.shipped_file("h200", LAYER.k, LAYER.n)
    store_cell(shipped, tune_key(H200), cell(64, replace(WGMMA, stages=4)))
    store_cell(shipped, tune_key(H200), cell(1, STRIP))
    assert decided(64) == ("shipped", replace(WGMMA, stages=4))
    store_cell(fresh, tune_key(H200), cell(64))
    tuning.forget()
    assert decided(64) == ("tuned", WGMMA)
    assert decided(1) == ("shipped", STRIP)


# ---- Layers alike: the same K and N


def alike(m: int = 64, **layer: Any) -> tuple[str, Any]:
    decision = decide(replace(LAYER, **layer), m, SM90A, 132, H200)
    return decision.source, decision.choice.spec


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"has_zeros": True},
        {"group_size": 32},
        {"group_size": -1},
        {"group_size": 64, "has_zeros": True, "dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize(("m", "spec"), [(64, WGMMA), (8, STRIP)])
def test_a_cell_serves_layers_alike_with_their_own_operands(
    fresh: Path, m: int, spec: Any, change: dict[str, Any]
) -> None:
    store_cell(fresh, tune_key(H200), cell(m, spec))
    assert alike(m, **change) == ("tuned", replace(spec, **change))
    found = tuning.lookup(replace(LAYER, **change), m, SM90A, 132, H200)
    assert found is not None
    assert not found.exact
    assert found.cell.layer == LAYER, "it says which layer was measured"
    said = decide(replace(LAYER, **change), m, SM90A, 132, H200).why
    assert f"{fresh} has a layer of this K and N ({LAYER}), measured at {m} tokens: 8 us" in said
    assert "has this layer, measured" in decide(LAYER, m, SM90A, 132, H200).why


def test_it_serves_the_same_numbers_of_tokens_alike(fresh: Path) -> None:
    store_cell(fresh, tune_key(H200), cell(64))
    assert alike(60, dtype="bfloat16")[0] == "tuned"
    assert alike(40, dtype="bfloat16")[0] == "rule"
    assert alike(65, dtype="bfloat16")[0] == "rule"


def test_a_layers_own_cell_comes_before_one_alike_and_the_users_before_a_shipped_one(fresh: Path) -> None:
    key, shipped = tune_key(H200), tuning.shipped_file("h200", LAYER.k, LAYER.n)
    store_cell(shipped, key, cell(64, replace(WGMMA, stages=3)))
    assert alike(has_zeros=True) == ("shipped", replace(WGMMA, stages=3, has_zeros=True))
    store_cell(fresh, key, cell(64, replace(WGMMA, stages=4)))
    tuning.forget()
    assert alike(has_zeros=True) == ("tuned", replace(WGMMA, stages=4, has_zeros=True))
    store_cell(shipped, key, cell(64, replace(WGMMA, stages=5), has_zeros=True))
    tuning.forget()
    assert alike(has_zeros=True) == ("shipped", replace(WGMMA, stages=5, has_zeros=True)), "measured for itself"
    assert alike() == ("tuned", replace(WGMMA, stages=4))
    # Its own cell is for other numbers of tokens: those of layers alike serve the rest.
    store_cell(fresh, key, cell(256, replace(WGMMA, stages=2), dtype="bfloat16"))
    tuning.forget()
    assert alike(dtype="bfloat16") == ("tuned", replace(WGMMA, stages=4, dtype="bfloat16"))


FULL = WgmmaSpec("float16", 128, False, 80, 128, 1, 1, 9, steps=1, in_flight=1)
FOR_TWO = StripSpec("float16", 128, False, 8, 7, 256, 1, 3, blocks_per_sm=2)


@pytest.mark.parametrize(
    ("measured", "change"),
    [
        # Shared memory of a block; that of two blocks on a multiprocessor.
        (cell(64, FULL), {"group_size": 32, "has_zeros": True}),
        (cell(8, FOR_TWO, blocks=2), {"group_size": 32, "has_zeros": True}),
        # The portable kernel's ways to scale go with its groups.
        (
            cell(8, MarlinSpec("float16", 128, False, 8, 128, 256, 4, 1, 3, scale_on="accumulator")),
            {"dtype": "bfloat16"},
        ),
    ],
)
def test_what_does_not_fit_a_layer_alike_is_passed_over(fresh: Path, measured: Cell, change: dict[str, Any]) -> None:
    m = measured.m
    store_cell(fresh, tune_key(H200), measured)
    assert alike(m)[0] == "tuned", "it is right for its own layer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert alike(m, **change)[0] == "rule"
    other = WGMMA if m == 64 else STRIP
    store_cell(fresh, tune_key(H200), cell(m, other, group_size=64))
    tuning.forget()
    assert alike(m, **change) == ("tuned", replace(other, **change)), "the next that fits"


@pytest.mark.parametrize(
    "change",
    [
        {"multiprocessors": 114},
        {"sm_clock_mhz": 1700},
        {"memory_clock_mhz": 2619},
        {"target": "sm_90"},
    ],
)
def test_cells_of_another_card_are_passed_over_in_silence(fresh: Path, change: dict[str, Any]) -> None:
    store_cell(fresh, replace(tune_key(H200), **change), cell(64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(64)[0] == "rule"


def test_a_card_of_the_same_class_is_the_same_card(fresh: Path) -> None:
    store_cell(fresh, tune_key(replace(H200, sm_clock_mhz=1965)), cell(64))
    assert decided(64)[0] == "tuned"


@pytest.mark.parametrize("change", [{"nvrtc": "12.9"}, {"templates": "0" * 12}, {"layout": 2}])
def test_stale_cells_are_ignored_with_a_warning_once(fresh: Path, change: dict[str, Any]) -> None:
    key = tune_key(H200)
    store_cell(fresh, replace(key, **change), cell(64))
    name, theirs = next(iter(change.items()))
    with pytest.warns(TuneFileWarning, match=rf"1 cells measured with {name} {theirs} \(here .*run cudatma tune again"):
        assert decided(64)[0] == "rule"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(128)[0] == "rule"
    store_cell(fresh, key, cell(64))
    tuning.forget()
    with pytest.warns(TuneFileWarning):
        assert decided(64)[0] == "tuned", "beside stale cells there are good ones"


def test_a_shipped_table_serves_other_minor_versions_and_never_warns() -> None:
    key = tune_key(H200)
    shipped = tuning.shipped_file("h200", LAYER.k, LAYER.n)
    store_cell(shipped, replace(key, nvrtc="13.4"), cell(64))
    store_cell(shipped, replace(key, nvrtc="12.9"), cell(1, STRIP))
    store_cell(shipped, replace(key, templates="0" * 12), cell(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(64) == ("shipped", WGMMA)
        assert decided(1)[0] == "rule"
        assert decided(256)[0] == "rule"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "no file of tuned configurations"),
        ('{"hello": 1}', "no file of tuned configurations"),
        ('{"schema": 2, "sections": []}', "schema is 2"),
        ('{"schema": 1}', "sections are damaged"),
        ('{"schema": 1, "sections": [{"key": {}, "cells": [3]}]}', "sections are damaged"),
        ("\x00\x01", "Expecting value"),
    ],
)
def test_a_damaged_or_foreign_file_is_said_to_be_ignored_and_is_kept(fresh: Path, text: str, why: str) -> None:
    fresh.parent.mkdir()
    fresh.write_text(text)
    with pytest.warns(TuneFileWarning, match=f"tuned.json: not used: the whole file: .*{why}"):
        assert decided(64)[0] == "rule"
    assert fresh.read_text() == text, "a look changes nothing"
    with pytest.warns(TuneFileWarning, match="kept as tuned.json.unread-1"):
        store_cell(fresh, tune_key(H200), cell(64))
    assert (fresh.parent / "tuned.json.unread-1").read_text() == text
    tuning.forget()
    assert decided(64)[0] == "tuned"


def test_a_file_that_is_no_text_and_a_folder_in_its_place(fresh: Path) -> None:
    fresh.mkdir(parents=True)
    with pytest.warns(TuneFileWarning, match="Is a directory"):
        assert decided(64)[0] == "rule"
    fresh.rmdir()
    fresh.write_bytes(b"\xff\xfe{}")
    tuning.forget()
    with pytest.warns(TuneFileWarning, match="codec"):
        assert decided(64)[0] == "rule"


def broken(**change: Any) -> dict[str, Any]:
    raw = json.loads(json.dumps(cell(64).as_json()))
    spec = change.pop("spec", {})
    return raw | change | {"spec": {**raw["spec"], **spec}}


@pytest.mark.parametrize(
    "raw",
    [
        broken(kernel="magic"),
        broken(m="64"),
        broken(m=0),
        broken(k=True),
        broken(n=-4),
        broken(blocks_per_sm=0),
        broken(blocks_per_sm=1000),
        broken(us="fast"),
        broken(dtype="bfloat16"),
        broken(spec={"stages": 200}),
        broken(spec={"stages": 16, "block_m": 256}),
        broken(spec={"cluster": True}),
        broken(spec={"dtype": "float64"}),
        broken(spec={"group_size": 64}),
        broken(spec={"stacks": 1}),
        broken(spec={"blocks_per_sm": "2"}),
        {"k": 1},
    ],
)
def test_a_cell_that_cannot_be_run_is_ignored_and_named(fresh: Path, raw: dict[str, Any]) -> None:
    key = tune_key(H200)
    store_cell(fresh, key, cell(1, STRIP))
    content = json.loads(fresh.read_text())
    content["sections"][0]["cells"].append(raw)
    fresh.write_text(json.dumps(content))
    cells, problems = read_cells(fresh, H200, SM90A)
    assert [one.m for one in cells] == [1]
    assert len(problems) == 1
    assert problems[0].startswith("cells[1]: ")
    with pytest.warns(TuneFileWarning, match=r"cells\[1\]"):
        assert decided(1)[0] == "tuned"


def test_a_cell_comes_back_as_it_was() -> None:
    for spec in (WGMMA, STRIP, replace(WGMMA, cluster=2, weight_policy="evict_normal")):
        one = Cell(LAYER, 64, Choice(spec, 1), 8.5, 10.25, {"date": "now"})
        assert parse_cell(json.loads(json.dumps(one.as_json())), SM90A) == one
    with pytest.raises(ArgumentTypeError, match="m"):
        parse_cell(broken(m=1.5), SM90A)


def test_a_deep_box_is_for_whole_blocks_of_depths() -> None:
    deep = cell(8, replace(STRIP, deep_box=True))
    assert parse_cell(deep.as_json(), SM90A) == deep
    with pytest.raises(ArgumentError, match="4128 is no multiple of 64") as caught:
        parse_cell(deep.as_json() | {"k": 4128}, SM90A)
    assert caught.value.field == "spec.deep_box"
    assert parse_cell(cell(8, STRIP).as_json() | {"k": 4128}, SM90A).layer.k == 4128


def test_storing_keeps_all_else_and_replaces_its_own(fresh: Path) -> None:
    key, other = tune_key(H200), replace(tune_key(H200), multiprocessors=20)
    store_cell(fresh, other, cell(64))
    store_cell(fresh, key, cell(64))
    store_cell(fresh, key, cell(128))
    store_cell(fresh, key, cell(64, us=7.0))
    sections = json.loads(fresh.read_text())["sections"]
    assert [section["key"] for section in sections] == [asdict(other), asdict(key)]
    assert [(raw["m"], raw["us"]) for raw in sections[1]["cells"]] == [(128, 8.0), (64, 7.0)]
    assert [path.name for path in fresh.parent.iterdir()] == ["tuned.json"], "no lock and nothing half written stays"


def test_many_writers_lose_nothing(fresh: Path) -> None:
    key = tune_key(H200)

    def write(first: int) -> None:
        for m in range(first, 40, 4):
            store_cell(fresh, key, cell(m + 1))

    threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cells, problems = read_cells(fresh, H200, SM90A)
    assert (sorted(one.m for one in cells), problems) == (list(range(1, 41)), [])


def test_a_failed_write_leaves_the_file_as_it_was(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_cell(fresh, tune_key(H200), cell(64))
    before = fresh.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        store_cell(fresh, tune_key(H200), cell(128))
    assert fresh.read_text() == before
    assert [path.name for path in fresh.parent.iterdir()] == ["tuned.json"]


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
        assert decided(64)[0] == "rule"


def test_none_turns_the_shipped_tables_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    store_cell(tuning.shipped_file("h200", LAYER.k, LAYER.n), tune_key(H200), cell(64))
    assert decided(64)[0] == "shipped"
    monkeypatch.setenv("CUDATMA_TUNE_FILE", "none")
    assert decided(64)[0] == "rule"


def test_without_a_card_nothing_is_tuned(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """choose() asks for the card of this machine; the emulator's imagined one has no tuned cells."""
    store_cell(fresh, tune_key(H200), cell(64))
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_card_here", lambda target, multiprocessors: None)
        assert choose(LAYER, 64, SM90A, 132) == choose_untuned(LAYER, 64, SM90A, 132)
        patch.setattr(tuning, "_card_here", lambda target, multiprocessors: H200)
        assert choose(LAYER, 64, SM90A, 132).spec == WGMMA


@pytest.mark.parametrize(
    ("cards", "found"),
    [
        ([H200], H200),
        ([H200, replace(H200, sm_clock_mhz=1965)], "either"),
        ([H200, replace(H200, memory_clock_mhz=2619)], None),  # an H100 beside it: nobody knows which is meant
        ([replace(H200, multiprocessors=114), H200], H200),
        ([replace(H200, target="sm_120a")], None),
        ([], None),
    ],
)
def test_the_card_of_this_machine(monkeypatch: pytest.MonkeyPatch, cards: list[Card], found: Any) -> None:
    driver = SimpleNamespace(cuDeviceGetCount=lambda: (0, len(cards)))
    monkeypatch.setattr(tuning.context, "initialise", lambda: driver)
    monkeypatch.setattr(tuning, "card_of", lambda device: cards[device])
    tuning.forget()
    here = tuning._card_here("sm_90a", 132)
    assert here in cards if found == "either" else here == found


def test_nvrtc_is_not_asked_where_the_card_has_no_cells(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_cell(fresh, replace(tune_key(H200), multiprocessors=20), cell(64))

    def fail() -> Any:
        raise AssertionError("NVRTC was loaded for nothing")

    monkeypatch.setattr(tune_file, "installed_nvrtc", fail)
    assert decided(64)[0] == "rule"


def test_a_pinned_choice_is_for_its_thread_alone() -> None:
    mine = Choice(STRIP, 2)
    others: list[Any] = []
    with tuning.pinned(mine):
        assert choose(LAYER, 500, SM90A, 132) is mine
        thread = threading.Thread(target=lambda: others.append(choose(LAYER, 500, SM90A, 132)))
        thread.start()
        thread.join()
        with tuning.pinned(Choice(WGMMA, 1)):
            assert choose(LAYER, 500, SM90A, 132).spec == WGMMA
        assert choose(LAYER, 500, SM90A, 132) is mine
    assert others == [choose_untuned(LAYER, 500, SM90A, 132)]
    assert choose(LAYER, 500, SM90A, 132) == others[0]


def at(*tokens: int, block_m: int = 64) -> list[Cell]:
    return [cell(m, replace(WGMMA, block_m=block_m)) for m in tokens]


@pytest.mark.parametrize(
    ("tuned", "m", "served_by"),
    [
        ((64,), 64, 64),
        ((64,), 52, 64),  # one tile of 64 tokens both
        ((64,), 51, None),  # a tile cut to these is better
        ((64,), 65, None),  # two tiles
        ((40, 64), 50, 40),  # the nearest below
        ((40, 64), 39, 40),  # none below: the fewest above
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
def test_which_cell_serves(tuned: tuple[int, ...], m: int, served_by: int | None) -> None:
    found = tuning.nearest(at(*tuned), m)
    assert (None if found is None else found.m) == served_by


@given(st.lists(st.integers(1, 5000), max_size=6), st.integers(1, 5000), st.sampled_from((8, 16, 64, 256)))
def test_a_serving_cell_has_the_same_work_a_token_tile(tuned: list[int], m: int, block_m: int) -> None:
    found = tuning.nearest(at(*tuned, block_m=block_m), m)
    if m in tuned:
        assert found is not None
        assert found.m == m
    if found is not None:
        tiles, theirs = ceil_div(m, block_m), ceil_div(found.m, block_m)
        assert tiles == theirs or (min(tiles, theirs) >= 8 and found.m <= m < 2 * found.m)
        assert m > found.m / 2


def test_the_digest_follows_code_and_not_comments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = tmp_path / "k.cu.j2"
    digests = []
    monkeypatch.setattr(tune_file, "template_texts", lambda *names: {"k.cu.j2": template.read_bytes()})
    for text in ("int x;\n", "// why\n  int x;\n\n//# note\n", "int y;\n", "int x;\n//% if spec.a\n"):
        template.write_text(text)
        tune_file.templates_digest.cache_clear()
        digests.append(tune_file.templates_digest())
    tune_file.templates_digest.cache_clear()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_digest_is_remembered_for_files_that_did_not_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDATMA_CACHE_DIR", str(tmp_path))
    tune_file.templates_digest.cache_clear()
    first = tune_file.templates_digest()
    tune_file.templates_digest.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(tune_file, "_templates_digest", lambda texts: pytest.fail("nothing changed"))
        assert tune_file.templates_digest() == first
    tune_file.templates_digest.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(tune_file, "template_texts", lambda *names: {"k.cu.j2": b"of changed files"})
        patched.setattr(tune_file, "_templates_digest", lambda texts: "another")
        assert tune_file.templates_digest() == "another"
    tune_file.templates_digest.cache_clear()


def test_the_shipped_tables_can_be_read_and_hold_for_the_templates() -> None:
    folder = Path(tune_file.__file__).with_name("tuned")
    files = sorted(folder.glob("*/*.json"))
    assert len(files) >= 90
    for path in files:
        for section in tune_file.read_sections(path):
            key = TuneKey(**section["key"])
            assert key.templates == tune_file.templates_digest(), "tools/tuned_tables.py carries cells over"
            for raw in section["cells"]:
                found = parse_cell(raw, get_target(key.target))
                assert path.name == f"{found.layer.k}x{found.layer.n}.json"


def test_a_first_call_reads_the_file_of_its_layer_alone() -> None:
    key, other = tune_key(H200), tuning.shipped_file("h200", LAYER.k, LAYER.n + 64)
    store_cell(tuning.shipped_file("h200", LAYER.k, LAYER.n), key, cell(64))
    other.write_text("this would be reported")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(64) == ("shipped", WGMMA)
    with pytest.warns(TuneFileWarning, match=other.name):
        decide(replace(LAYER, n=LAYER.n + 64), 64, SM90A, 132, H200)


def test_a_cell_whose_clusters_have_too_few_stages_is_refused() -> None:
    """K of two stages, and three blocks that divide it: the launch would refuse it."""
    raw = cell(64, replace(WGMMA, blocks_k=3)).as_json()
    depth = 2 * WGMMA.block_k
    with pytest.raises(ArgumentError, match="at most the stages") as caught:
        parse_cell(raw | {"k": depth}, SM90A)
    assert caught.value.field == "spec.blocks_k"
    parse_cell(raw | {"k": depth + 1}, SM90A)
