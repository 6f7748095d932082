"""The reports in docs/howto match what the emulator finds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from cudatma import TensorMap
from cudatma.build.ptx_source import ptx_source
from cudatma.emulator import Report, load

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "howto"
PAGE = (FOLDER / "emulate_a_kernel.md").read_text()


def add_tiles_source() -> str:
    return PAGE.partition("`add_tiles.cu.j2`:\n\n```cuda\n")[2].partition("```")[0]


def add_tiles(source: str, folder: Path, schedules: int) -> tuple[Report, float]:
    """Return the report, and the sum that the kernel computes of six tiles of ones."""
    path = folder / "add_tiles.cu.j2"
    path.write_text(source)
    x, out = np.ones((6, 32), np.float32), np.zeros(32, np.float32)
    args = (TensorMap.from_array(x, (1, 32), encoder="codec"), out)
    compiled = ptx_source(path)
    module = load(compiled.ptx, lines=compiled.lines)
    report = module.launch("add_tiles", 1, 64, args, arrays=(x,), schedules=schedules, hazards="collect")
    return report, float(out[0])


def test_the_race_is_found_at_the_line_that_the_page_names(tmp_path: Path) -> None:
    source = add_tiles_source()
    report, _ = add_tiles(source, tmp_path, 3)
    first = report.hazards[0]
    assert first.kind == "overwritten_while_read"
    assert re.fullmatch(r"tma_load\.cuh\.j2:\d+, inlined at add_tiles\.cu:23", first.source)
    assert "cp_async_bulk_tensor_2d_load" in first.source_text
    assert first.source.split(", ")[1] in PAGE


def test_the_repair_that_the_page_names_is_one(tmp_path: Path) -> None:
    source = add_tiles_source()
    repaired = source.replace("&empty[slot]), lap & 1)", "&empty[slot]), (lap - 1) & 1)")
    assert repaired != source
    report, total = add_tiles(repaired, tmp_path, 20)
    assert report.is_clean
    assert total == 6
