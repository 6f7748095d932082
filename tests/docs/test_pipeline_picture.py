"""The schematics of README and docs: what their scripts draw, legible, and in the words of the code."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations
from typing import Any

import pytest

from cudatma.emulator.trace.svg import text_width
from cudatma.kernels.operation import Operation
from tools.dev import call_picture, pipeline_picture
from tools.dev.call_picture import LEVELS, Message
from tools.dev.drawing import ROOT, Drawing

SVG = "{http://www.w3.org/2000/svg}"
SCRIPTS = pytest.mark.parametrize("script", [pipeline_picture, call_picture], ids=lambda script: script.__name__)


@SCRIPTS
def test_the_picture_is_what_the_script_draws(script: Any) -> None:
    assert script.main(["--check"]) == 0, f"run: python -m {script.__name__}"


def test_check_notices_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_picture, "PICTURE", ROOT / "pyproject.toml")
    assert pipeline_picture.main(["--check"]) == 1


@SCRIPTS
def test_texts_are_inside_of_the_picture_and_do_not_overlap(script: Any) -> None:
    root = ElementTree.fromstring(script.picture())
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
        Drawing().box(0, 0, 40, 40, "#ffffff", "#000000", "a long headline")


def test_the_templates_contain_the_instructions_that_the_picture_names() -> None:
    templates = "\n".join(path.read_text() for path in (ROOT / "ptx_templates" / "primitives").iterdir())
    for instruction in pipeline_picture.INSTRUCTIONS:
        assert instruction in templates, instruction


def test_the_operation_has_the_methods_that_the_diagram_names() -> None:
    steps = [step for level in LEVELS for step in level.steps if isinstance(step, Message)]
    called = {step.text.partition("()")[0] for step in steps if step.receiver == "operation"}
    assert called >= {"check", "configure", "arguments"}
    assert all(callable(getattr(Operation, name)) for name in called)
