"""docs/emulator.md: its race is found where it says, and gone once repaired."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from cudatma import TensorMap
from cudatma.emulator import Report, load
from cudatma.ptx_source import ptx_source

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "emulator.md").read_text()


def add_tiles_source() -> str:
    return PAGE.partition("`add_tiles.cu.j2`:\n\n```cuda\n")[2].partition("```")[0]


def add_tiles(source: str, folder: Path, schedules: int) -> tuple[Report, float]:
    """The report, and the sum that the kernel computes of six tiles of ones."""
    path = folder / "add_tiles.cu.j2"
    path.write_text(source)
    x, out = np.ones((6, 32), np.float32), np.zeros(32, np.float32)
    args = (TensorMap.from_array(x, (1, 32), backend="codec"), out)
    module = load(ptx_source(path).ptx)
    report = module.launch("add_tiles", 1, 64, args, arrays=(x,), schedules=schedules, hazards="collect")
    return report, float(out[0])


def test_the_race_is_found_at_the_line_that_the_page_names(tmp_path: Path) -> None:
    source = add_tiles_source()
    report, _ = add_tiles(source, tmp_path, 3)
    first = report.hazards[0]
    assert first.kind == "overwritten_while_read"
    assert re.fullmatch(r"tma_load\.cuh\.j2:\d+, inlined at add_tiles\.cu:23", first.source)
    assert "cp_async_bulk_tensor_2d_load" in ptx_source(tmp_path / "add_tiles.cu.j2").line(first.source)
    assert first.source.split(", ")[1] in PAGE


def test_the_repair_that_the_page_names_is_one(tmp_path: Path) -> None:
    source = add_tiles_source()
    repaired = source.replace("&empty[slot]), lap & 1)", "&empty[slot]), (lap - 1) & 1)")
    assert repaired != source
    report, total = add_tiles(repaired, tmp_path, 20)
    assert report.is_clean
    assert total == 6


def test_links_lead_somewhere() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs"
    for name in ("emulator.md", "testing_your_kernel.md"):
        text = (folder / name).read_text()
        targets = [t for t in re.findall(r"\]\(([^)]+)\)", text) if not t.startswith("http")]
        headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^## (.+)$", text, re.M)}
        assert [t for t in targets if (t[1:] not in headings if t[0] == "#" else not (folder / t).exists())] == []
