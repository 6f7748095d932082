"""Fixture for the tests of programs."""

from __future__ import annotations

import pytest

from cudatma.programs.patches import Patches


@pytest.fixture(autouse=True)
def no_search_for_objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not search for CuPy's kernels in tests of other libraries.

    In a process with all tests, the search takes a second.
    """
    if "cupy" not in request.path.name and "cupy" not in request.node.name:
        monkeypatch.setattr(Patches, "set_objects", lambda *_: None)
