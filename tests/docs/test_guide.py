"""The guide: its pages run and show their real output, and its notebooks are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.dev import guide

pytestmark = pytest.mark.usefixtures("without_ptxas")

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "guide"


every_page = pytest.mark.parametrize("page", guide.PAGES, ids=lambda page: page.stem)


@pytest.mark.sweep(3)
@every_page
def test_a_page_shows_what_its_code_prints(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "emulator")
    text = page.read_text(encoding="utf-8")
    printed, pictures = guide.run(page)
    shown = [cell.output.text if cell.output else "" for cell in guide.cells_of(text) if cell.is_code]
    again = "run python -m tools.dev.guide"
    assert [guide.without_numbers(x) for x in printed] == [guide.without_numbers(x) for x in shown], again
    assert set(re.findall(r"\]\(\.\./pictures/(guide_\w+\.svg)\)", text)) == set(pictures), again


@every_page
def test_a_notebook_has_all_of_its_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    cells = guide.notebook(page)["cells"]
    assert json.loads(json.dumps(cells)) == cells
    code = [cell["source"] + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = [cell for cell in cells if cell["cell_type"] == "markdown"]
    assert sum(len(cell.get("attachments", ())) for cell in prose) == text.count("![")
    for cell in prose:
        assert not re.search(r"</?details>|</?summary>|\]\((?!attachment:|https:|\d\d_\w+\.ipynb)", cell["source"])
    hidden = [cell for cell in cells if cell["metadata"]]
    assert [cell["source"] + "\n" in text.partition("<details>")[2] for cell in hidden] == [True]


def test_the_contents_name_every_page() -> None:
    contents = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\d\d_\w+\.md)\)", contents) == [page.name for page in guide.PAGES]
