"""The schematic of the pipelines: what its script draws, legible, and in the words of the templates."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest

from cudatma.emulator.trace.svg import text_width
from tools.dev import pipeline_picture
from tools.dev.pipeline_picture import ROOT, _Drawing

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_what_the_script_draws() -> None:
    assert pipeline_picture.main(["--check"]) == 0, "run: python -m tools.dev.pipeline_picture"


def test_check_notices_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_picture, "PICTURE", ROOT / "pyproject.toml")
    assert pipeline_picture.main(["--check"]) == 1


def test_texts_are_inside_of_the_picture_and_do_not_overlap() -> None:
    root = ElementTree.fromstring(pipeline_picture.picture())
    boxes = []
    for text in root.iter(f"{SVG}text"):
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        wide = text_width(text.text or "", size)
        left = x - wide / 2 * (text.attrib["text-anchor"] == "middle")
        boxes.append((left, y - 0.75 * size, left + wide, y + 0.2 * size, text.text))
    for left, above, right, below, text_of in boxes:
        assert 0 <= left < right <= float(root.attrib["width"]), text_of
        assert 0 <= above < below <= float(root.attrib["height"]), text_of
    for one, other in combinations(boxes, 2):
        apart = one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
        assert apart, (one[4], other[4])


def test_a_text_wider_than_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match="wider than its box"):
        _Drawing().box(0, 0, 40, 40, "#ffffff", "#000000", "a long headline")


def test_the_templates_contain_the_instructions_that_the_picture_names() -> None:
    templates = "\n".join(path.read_text() for path in (ROOT / "ptx_templates" / "primitives").iterdir())
    for instruction in pipeline_picture.INSTRUCTIONS:
        assert instruction in templates, instruction
