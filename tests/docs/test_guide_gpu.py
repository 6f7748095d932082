"""The pages of the guide on a GPU, with CuPy arrays."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudatma.target import detect
from tools.dev import guide

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page", guide.PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "06_multicast" and not detect().has_multicast:
        pytest.skip("the GPU has no multicast")
    monkeypatch.setenv("CUDATMA_BACKEND", "cuda")
    printed, _ = guide.run(page)
    shown = [cell.output.text if cell.output else "" for cell in guide.cells_of(page.read_text()) if cell.is_code]
    assert [guide.without_numbers(x) for x in printed] == [guide.without_numbers(x) for x in shown]
