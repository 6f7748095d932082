"""tools/tuned_tables.py: cells that ship, for the templates that they were measured with."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cudatma.kernels.marlin import tuning
from cudatma.kernels.marlin.card import H200
from cudatma.kernels.marlin.layer import AnyMarlinSpec, Choice, Layer
from cudatma.kernels.marlin.strip_spec import StripSpec
from cudatma.kernels.marlin.tune_file import Cell, TuneKey, read_sections, store_cell, tune_key
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.render import template_root
from cudatma.target import get_target
from tools import tuned_tables
from tools.sass import find_program

LAYER = Layer(4096, 4096, 128, False, "float16")
STRIP = StripSpec("float16", 128, False, 16, 3, 512, 4, 3)
CLUSTER = replace(STRIP, blocks_k=2)
WGMMA = WgmmaSpec("float16", 128, False, 64, 128, 2, 1, 4)
OLD = "0" * 12
SM90A = get_target("sm_90a")


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shipped"
    for module in (tuning, tuned_tables):
        monkeypatch.setattr(module, "SHIPPED", folder)
    return folder


def cell(m: int, spec: AnyMarlinSpec, layer: Layer = LAYER) -> Cell:
    return Cell(layer, m, Choice(spec, 1), 8.0, 9.0, {"measured_us": {spec.entry: 8.0}})


def of(path: Path) -> dict[tuple[str, int], str]:
    """(templates, tokens) -> kernel, of a file."""
    return {
        (section["key"]["templates"], raw["m"]): raw["kernel"]
        for section in read_sections(path)
        for raw in section["cells"]
    }


def run(*arguments: object) -> int:
    return tuned_tables.main([str(argument) for argument in arguments])


@pytest.fixture
def key() -> TuneKey:
    return tune_key(H200)


def test_cells_go_to_the_file_of_their_layer(tmp_path: Path, key: TuneKey, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(LAYER, n=8192)
    for one in (cell(64, WGMMA), cell(16, STRIP), cell(64, WGMMA, other)):
        store_cell(tmp_path / "tuned.json", key, one)
    assert run("add", "h200", tmp_path / "tuned.json") == 0
    assert "3 cells of 2 layers" in capsys.readouterr().out
    mine, theirs = tuning.shipped_file("h200", 4096, 4096), tuning.shipped_file("h200", 4096, 8192)
    assert of(mine) == {(key.templates, 16): "strip", (key.templates, 64): "wgmma"}
    assert of(theirs) == {(key.templates, 64): "wgmma"}
    assert mine.stat().st_mode & 0o777 == 0o644
    again = tmp_path / "again.json"
    store_cell(again, key, cell(16, WGMMA))
    assert run("add", "h200", again) == 0
    assert of(mine) == {(key.templates, 16): "wgmma", (key.templates, 64): "wgmma"}, "in place of the older one"
    assert json.loads(mine.read_text())["sections"][0]["cells"][0]["measured_us"], "all that was measured stays"


def test_what_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, shipped: Path, key: TuneKey, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuned.json"
    store_cell(file, key, cell(16, STRIP))
    store_cell(file, replace(key, templates=OLD), cell(64, WGMMA))
    assert run("add", "h200", file) == 2
    assert f"got {OLD}" in capsys.readouterr().err
    file.write_text("{")
    assert run("add", "h200", file) == 2
    assert not shipped.exists()


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The part that only clusters of strips include lacks an instruction; a comment that all have is another one."""
    if find_program("nvdisasm") is None:
        pytest.skip("no disassembler here: the instructions cannot be compared")
    folder = tmp_path / "before"
    shutil.copytree(template_root(), folder)
    finish = folder / "parts" / "marlin_strip_finish.cuh.j2"
    text = finish.read_text()
    assert text.count("barrier_cluster_wait();") == 1
    finish.write_text("// another comment\n" + text.replace("barrier_cluster_wait();", ""))
    return folder


def test_cells_of_unchanged_kernels_are_carried_over(
    before: Path, key: TuneKey, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tuning.shipped_file("h200", 4096, 4096)
    for one in (cell(1, STRIP), cell(16, CLUSTER), cell(64, WGMMA), cell(128, WGMMA)):
        store_cell(path, replace(key, templates=OLD), one)
    store_cell(path, key, cell(128, CLUSTER))  # measured since
    alone = tuning.shipped_file("h200", 2048, 4096)
    store_cell(alone, replace(key, templates=OLD), cell(8, CLUSTER, replace(LAYER, k=2048)))
    assert run("carry", "h200", before) == 0
    said = capsys.readouterr().out
    assert "3 cells kept, 2 dropped" in said
    assert "cudatma tune --tokens 8 --shape 2048x4096\n" in said
    assert "cudatma tune --tokens 16 --shape 4096x4096\n" in said
    assert of(path) == {(key.templates, m): kernel for m, kernel in ((1, "strip"), (64, "wgmma"), (128, "strip"))}
    assert not alone.exists(), "nothing of it is left"
    assert run("carry", "h200", before) == 0
    assert "3 cells kept, 0 dropped" in capsys.readouterr().out


def test_other_text_of_the_same_instructions_is_no_change(before: Path, key: TuneKey) -> None:
    """As a function that moves to another file, or a comment behind a statement."""
    finish = before / "parts" / "marlin_strip_finish.cuh.j2"
    now = (template_root() / "parts" / finish.name).read_text()
    finish.write_text(now.replace("barrier_cluster_wait();", "barrier_cluster_wait();   // said otherwise\n\n"))
    assert tuned_tables.is_same(CLUSTER, SM90A, before)
    path = tuning.shipped_file("h200", 4096, 4096)
    store_cell(path, replace(key, templates=OLD), cell(16, CLUSTER))
    assert run("carry", "h200", before) == 0
    assert of(path) == {(key.templates, 16): "strip"}


def test_nothing_is_written_where_one_kernel_cannot_be_compared(
    before: Path, key: TuneKey, capsys: pytest.CaptureFixture[str]
) -> None:
    (before / "parts" / "marlin_strip_finish.cuh.j2").write_text("this is no CUDA")
    kept, other = tuning.shipped_file("h200", 1024, 4096), tuning.shipped_file("h200", 4096, 4096)
    store_cell(kept, replace(key, templates=OLD), cell(64, WGMMA, replace(LAYER, k=1024)))
    store_cell(other, replace(key, templates=OLD), cell(16, STRIP))
    assert run("carry", "h200", before) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert of(kept) == {(OLD, 64): "wgmma"}
    assert of(other) == {(OLD, 16): "strip"}


def test_a_folder_that_is_none_changes_nothing(
    tmp_path: Path, key: TuneKey, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tuning.shipped_file("h200", 4096, 4096)
    store_cell(path, replace(key, templates=OLD), cell(16, STRIP))
    assert run("carry", "h200", tmp_path / "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err
    assert of(path) == {(OLD, 16): "strip"}
