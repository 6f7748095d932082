"""The operators of benchmarks/host_cost.py on a CPU: both calls of a pair give the same result and are timed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks import host_cost


def test_both_calls_of_a_pair_give_the_same_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_BACKEND", "reference")
    known = host_cost.operators("cpu", 128, 64)
    for case in ("marlin_gemm", "MarlinLinear"):
        direct, operator = known[case].values()
        torch.testing.assert_close(operator(0), direct(0), rtol=0, atol=0)
    monkeypatch.setattr(host_cost, "_WARM_UP", 1)
    for case, both in known.items():
        cells = host_cost.measure(case, lambda both=both: both, lambda: None, 3, 2)  # type: ignore[misc]
        assert [cell["case"] for cell in cells] == [f"{case}, direct", f"{case}, operator"]
        assert all(cell["median_us"] > 0 for cell in cells)
    (failed,) = host_cost.measure("it", lambda: 1 / 0, lambda: None, 3)  # type: ignore[arg-type, return-value]
    assert failed == {"case": "it", "error": "ZeroDivisionError: division by zero"}
