"""Cells of the Marlin benchmark made of timings, and the picture of a result."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cells, plot
from benchmarks.cells import CellFacts, Rivalry
from benchmarks.harness import Measured, Timing
from benchmarks.operands import packed_bytes
from benchmarks.plan import CellKey
from tools.dev.readme_tables import ROOT, table_text

KEY = CellKey(8192, 28672, 16)


def measured(errors: dict[str, str] | None = None, **us: float) -> Measured:
    timings = {name.replace("_", " "): Timing(value, value - 1, value + 1, 11) for name, value in us.items()}
    return Measured(timings, errors or {})


def cold_facts() -> CellFacts:
    together = measured(ours=40.0, floor=32.0, cublas_kn=120.0, cublaslt_nk_3=100.0, humming=44.0)
    facts = CellFacts(KEY, "float16", "cold", together, measured(ours_chained=30.0, floor_chained=25.0))
    facts.rivalries = {
        "cublas": Rivalry(together, ["cublas kn", "cublas nk", "cublaslt nk 3"]),
        "humming": Rivalry(together, ["humming"]),
    }
    return facts


def test_a_cell_takes_the_faster_cublas_and_the_best_rival() -> None:
    made = cells.make_cell(cold_facts())
    assert (made["us"], made["cublas_us"], made["x_cublas"]) == (40.0, 100.0, 2.5)
    assert made["cublas_layout"] == "cuBLASLt, weight (N, K), transposed, algorithm 3"
    assert made["rivals"]["cublas"]["ways"] == {"cublas kn": 120.0, "cublaslt nk 3": 100.0}
    assert (made["best_rival"], made["x_best"]) == ("humming", 1.1)
    assert (made["floor_us"], made["x_floor"], made["x_floor_programmatic"]) == (32.0, 1.25, 1.2)
    assert made["tb_s"] == pytest.approx((8192 * 28672 / 2 + 64 * 28672 * 2) / 40e-6 / 1e12)
    assert made["tflop_s"] == pytest.approx(2 * 8192 * 28672 * 16 / 40e-6 / 1e12)
    assert made["spread_us"]["ours"] == (39.0, 41.0, 11)
    assert "error" not in made
    assert "errors" not in made
    assert json.loads(json.dumps(made))["k"] == 8192
    assert cells.key_of(made) == KEY


def test_each_rival_is_compared_with_ours_in_its_own_blocks() -> None:
    pairs = {
        "cublas": Rivalry(measured(ours=700.0, cublaslt_kn_0=770.0), ["cublaslt kn 0"]),
        "humming": Rivalry(measured(ours=600.0, humming=630.0), ["humming"]),
    }
    facts = CellFacts(CellKey(8192, 8192, 1024), "float16", "sustained", pairs["cublas"].measured, rivalries=pairs)
    facts.power = {"cublas": {"sm_mhz": 1500.0}, "humming": None}
    made = cells.make_cell(facts)
    assert made["us"] == 700.0
    assert made["x_cublas"] == pytest.approx(1.1)
    assert cells.rival_x(made, "humming") == pytest.approx(1.05)
    assert made["x_best"] == pytest.approx(1.05)
    assert made["power"] == {"cublas": {"sm_mhz": 1500.0}, "humming": None}


def test_a_rival_that_failed_is_named_and_the_cell_stands() -> None:
    facts = cold_facts()
    facts.errors = {"tinygemm": "ValueError: bf16 only"}
    facts.rivalries = {"cublas": Rivalry(measured({"cublas kn": "RuntimeError: x"}), ["cublas kn"])}
    made = cells.make_cell(facts)
    assert made["errors"] == {"tinygemm": "ValueError: bf16 only", "cublas kn": "RuntimeError: x"}
    assert "error" not in made
    assert (made["x_cublas"], made["x_best"]) == (None, None)
    assert "tinygemm: ValueError: bf16 only" in cells.line_of(made)


def test_a_cell_without_ours_is_an_error() -> None:
    facts = CellFacts(KEY, "float16", "cold", measured({"ours": "DriverError: gone"}, cublas_nk=100.0))
    made = cells.make_cell(facts)
    assert made["error"] == "ours: DriverError: gone"
    assert made["us"] is None
    assert "-" in cells.line_of(made)
    assert cells.line_of(cells.failed_cell(KEY, "float16", "no memory"))


def test_the_tables_are_what_the_readme_takes() -> None:
    made = [cells.make_cell(cold_facts()), cells.failed_cell(CellKey(4096, 4096, 1), "float16", "x")]
    text = table_text("x", {"table": cells.summary_table(made).as_json()})
    assert "| 8192 x 28672 | 32.0 | - | 40 (2.50, humming 1.10) |" in text
    detail = cells.detail_table([made[0] | {"m": 32}, *made])
    assert [row[1] for row in detail.rows] == [16, 32, 1], "layer by layer, and by tokens"
    assert len({len(row) for row in detail.rows} | {len(detail.columns)}) == 1
    assert cells.described_way("humming") == "humming"


# ---- The picture ----------------------------------------------------------------------------------------------------


def result() -> dict[str, Any]:
    made = []
    for k, n in ((4096, 4096), (8192, 57344), (3584, 4608)):
        for m in (1, 16, 256):
            x = {"cublas": {"us": 1.0, "x": 2.0}, "humming": {"us": 1.0, "x": 1.1}}
            cell = {"k": k, "n": n, "m": m, "us": packed_bytes(k, n) / 3e6, "x_cublas": 2.0, "x_best": 1.1, "rivals": x}
            made.append(cell | {"x_floor": 1.25 if m < 256 else None, "tflop_s": 1.5 * m})
    return {"cells": made, "settings": {"dtype": "float16", "group_size": 128}, "machine": {"card": "<H200>"}}


def texts_of(drawn: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]


def test_the_picture_shows_every_panel() -> None:
    drawn = plot.picture(result())
    root = ElementTree.fromstring(drawn)
    texts = texts_of(drawn)
    panels = plot.panels_of([result()])
    assert len(panels) == 2
    assert {panel.title for panel in panels} <= set(texts)
    assert any("8192 x 57344" in panel.title for panel in panels), "the largest layer's times"
    assert {"cudatma, geometric mean of 3 layers", "Humming", "cuBLAS"} <= set(texts)
    numbers = [float(value) for element in root.iter() for key, value in element.attrib.items() if key in ("cx", "cy")]
    assert numbers
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert all(0 <= value <= max(width, height) for value in numbers)
    assert drawn == plot.picture(result()), "the same every time"


def committed(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())  # type: ignore[no-any-return]


COMMITTED = ("marlin_rivals.json", "marlin_other_layers.json")


def test_the_committed_picture_shows_the_committed_results() -> None:
    """To draw it again: python -m benchmarks.plot, with these files of benchmarks/results and --out."""
    drawn = plot.picture(*map(committed, COMMITTED))
    assert (ROOT / "docs" / "pictures" / "marlin_benchmark.svg").read_text() == drawn
    texts = "\n".join(texts_of(drawn))
    for name in COMMITTED:
        stored = committed(name)
        assert stored["commit"] in texts
        assert all(stored["machine"][fact] in texts for fact in ("card", "driver"))
    assert all(text in texts for text in ("Humming 0.1.19", "cudatma, 8 other layers", "reading the weights once"))


def test_labels_touch_no_line_and_stay_inside() -> None:
    root = ElementTree.fromstring(plot.picture(*map(committed, COMMITTED)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    sides = ("x1", "y1", "x2", "y2")
    curves = [
        [float(e.attrib[side]) for side in sides] for e in root.iter() if float(e.attrib.get("stroke-width", "0")) > 1.2
    ]
    assert curves
    for text in (element for element in root.iter() if element.tag.endswith("text")):
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        wide = plot.text_width(text.text or "", size)
        left = x - wide * {"middle": 0.5, "end": 1}.get(text.attrib.get("text-anchor", ""), 0)
        assert 0 <= left < left + wide <= width, text.text
        assert 0 <= y - size < y <= height, text.text
        box = (left, y - 0.7 * size, left + wide, y)
        assert not [curve for curve in curves if plot.crosses(box, *curve)], text.text


def test_results_of_different_machines_are_not_drawn_together() -> None:
    other = result() | {"machine": {"card": "B200"}}
    with pytest.raises(ValueError, match="different GPUs"):
        plot.picture(result(), other)


def test_points_are_means_by_m() -> None:
    made = [{"m": 2, "x": 1.0}, {"m": 1, "x": 3.0}, {"m": 2, "x": 4.0}, {"m": 4, "x": None}]
    assert plot.points_of(made, lambda cell: cell["x"]) == ((1, pytest.approx(3.0)), (2, pytest.approx(2.0)))


@given(st.floats(1e-3, 1e6), st.floats(2, 1e6))
def test_grid_lines_are_few_and_round(least: float, times: float) -> None:
    ticks = plot.log_ticks(least, least * times)
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(ticks)
    assert all(float(f"{tick:.1e}") == pytest.approx(tick) for tick in ticks)


def test_the_committed_result_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "marlin.svg"
    assert plot.main([str(ROOT / "benchmarks" / "results" / "marlin.json"), "--out", str(to)]) == 0
    assert str(to) in capsys.readouterr().out
    assert ElementTree.parse(to).getroot().tag.endswith("svg")


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": []}'])
def test_what_cannot_be_drawn_is_said(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        plot.main([str(tmp_path / "x.json")])
    assert ended.value.code == 2
    assert "x.json" in capsys.readouterr().err
