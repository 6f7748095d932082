"""The picture of Marlin's results and the tables of the README."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot
from benchmarks.operands import packed_bytes
from tools.dev.readme_tables import ROOT


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


def committed(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())  # type: ignore[no-any-return]


COMMITTED = ("marlin_rivals.json", "marlin_other_layers.json")


def test_the_committed_picture_shows_the_committed_results() -> None:
    """To draw it again, run python -m benchmarks.plot with these files of benchmarks/results and --out."""
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
    with pytest.raises(ValueError, match="same GPU"):
        plot.picture(result(), other)


def test_the_committed_result_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "marlin.svg"
    assert plot.main([str(ROOT / "benchmarks" / "results" / "marlin_rivals.json"), "--out", str(to)]) == 0
    assert str(to) in capsys.readouterr().out
    assert ElementTree.parse(to).getroot().tag.endswith("svg")


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": []}'])
def test_what_cannot_be_drawn_is_said(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        plot.main([str(tmp_path / "x.json")])
    assert ended.value.code == 2
    assert "x.json" in capsys.readouterr().err
