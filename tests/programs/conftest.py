"""Fixture for the tests of programs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from cudatma.programs import patches


@pytest.fixture
def all_objects() -> None:
    """Search all objects for CuPy's kernels, as emulate_launches() does outside of tests."""


@pytest.fixture(autouse=True)
def short_search_for_objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the search for CuPy's kernels, which takes two seconds in a process with all tests.

    Tests of other libraries omit it. Tests of CuPy search only the objects that were created after the collection of
    the tests, except those that request ``all_objects``.
    """
    if "cupy" not in request.path.name and "cupy" not in request.node.name:
        monkeypatch.setattr(patches.Patches, "set_objects", lambda *_: None)
    elif "all_objects" not in request.fixturenames:
        monkeypatch.setattr(patches, "_unfrozen", nullcontext)
