"""tools/dev/tuned_tables.py: the entries that ship, of those that a tuner measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from marlin_builders import skinny, wgmma

from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.choose import MARLIN
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.tuning import Entry, GpuClass, read_sections, store_entry
from tools.dev import tuned_tables

GPU = GpuClass.of(H200)
LAYER = LinearShape(4096, 4096, 128, False, "float16")
SKINNY = skinny(tile_m=16, tile_n=96, tile_k=512, slice_k=4, stages=3)
WGMMA = wgmma(tile_m=64, tile_n=128, tile_k=128, warpgroups=2, stages=4)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shipped.json"
    monkeypatch.setattr(tuned_tables, "shipped", lambda family: path)
    return path


def measured(file: Path, m: int, config: Any, us: float, rule_us: float = 10.0) -> Path:
    store_entry(file, GPU, MARLIN, Entry(Problem(LAYER, m), config, us, rule_us))
    return file


def test_what_gains_two_percent_ships_in_place_of_what_shipped(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "one.json", tmp_path / "two.json"
    measured(first, 64, WGMMA, 9.0)
    measured(first, 16, SKINNY, 9.7)
    measured(first, 1, SKINNY, 9.9)  # 1 %
    assert tuned_tables.main([str(first)]) == 0
    assert "3 entries read, 2 in shipped.json" in capsys.readouterr().out
    assert table.stat().st_mode & 0o777 == 0o644
    measured(second, 64, SKINNY, 8.0)
    measured(second, 16, SKINNY, 10.0)  # measured again, and no better than the untuned choice
    assert tuned_tables.main([str(second)]) == 0
    (section,) = read_sections(table)
    assert [(raw["m"], raw["kernel"], raw["us"]) for raw in section["entries"]] == [(64, "skinny", 8.0)]


@pytest.mark.parametrize("spoil", [("revision", '"revision": 1', '"revision": 99'), ("damaged", '"schema"', '"x"')])
def test_what_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, table: Path, spoil: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = measured(tmp_path / "one.json", 64, WGMMA, 9.0), measured(tmp_path / "two.json", 16, SKINNY, 9.0)
    bad.write_text(bad.read_text().replace(spoil[1], spoil[2]))
    assert tuned_tables.main([str(good), str(bad)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not table.exists()
