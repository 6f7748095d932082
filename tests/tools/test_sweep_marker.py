"""Cases of a sweep that `make test` leaves to `make test-all`."""

from __future__ import annotations

import pytest


@pytest.mark.sweep(3)
@pytest.mark.parametrize("number", range(10))
def test_all_cases_of_a_sweep_but_some_are_slow(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number in (0, 3, 6))
