"""marlin_gemm's paths: which launches a call makes, and what warming up to a bound compiles. No GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stub_driver import Array, StubDriver, packed_weight
from stub_driver import stub as stub  # the fixture

from cudatma import ArgumentError, marlin_gemm
from cudatma.kernels import choice
from cudatma.kernels import warm_up as shared
from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin import warm_up as warming
from cudatma.target import get_target

K, N = 128, 64
X, OUT = 1 << 36, 1 << 37


def x_of(m: int, *, address: int = X, pitch: int = K) -> Array:
    return Array((m, K), np.float16, address, strides=(2 * pitch, 2))


def entries(stub: StubDriver) -> list[tuple[bool, bool]]:
    """Return (is the copy, is programmatic) of each launch since the last question."""
    found = [(launch.entry == "permute_columns", launch.programmatic) for launch in stub.launches]
    stub.launches.clear()
    return found


@pytest.mark.parametrize("programmatic", [False, True])
def test_activation_order_takes_two_launches(stub: StubDriver, programmatic: bool) -> None:
    """The copy is what the caller asked for; the GEMM always is a dependent of the copy."""
    marlin_gemm(x_of(9), packed_weight(K, N, act_order=True), programmatic=programmatic)
    assert entries(stub) == [(True, programmatic), (False, True)]
    marlin_gemm(x_of(9), packed_weight(K, N))
    assert entries(stub) == [(False, False)]


@pytest.mark.parametrize(("offset", "pitch"), [(0, K + 1), (1, K + 8), (8, K + 8), (3, K + 5)])
def test_rows_off_16_bytes_are_copied_first(stub: StubDriver, offset: int, pitch: int) -> None:
    marlin_gemm(x_of(7, address=X + 2 * offset, pitch=pitch), packed_weight(K, N))
    is_aligned = offset % 8 == 0 and pitch % 8 == 0
    assert entries(stub) == ([] if is_aligned else [(True, False)]) + [(False, not is_aligned)]


def test_threads_of_one_stream_do_not_mix_their_rows(stub: StubDriver) -> None:
    """Each copy is followed by its own GEMM, though both threads write to the same rows."""
    weight, others = packed_weight(K, N, act_order=True), []

    def between_copy_and_gemm() -> None:
        stub.during_launch = meanwhile

    def meanwhile() -> None:
        stub.during_launch = bool
        others.append(threading.Thread(target=lambda: marlin_gemm(x_of(3), weight)))
        others[0].start()
        others[0].join(0.1)  # it waits for the GEMM of this call

    marlin_gemm(x_of(3), weight)
    stub.launches.clear()
    stub.during_launch = between_copy_and_gemm
    marlin_gemm(x_of(2), weight)
    others[0].join()
    assert [is_copy for is_copy, _ in entries(stub)] == [True, False, True, False]


def test_warming_up_to_a_bound_compiles_what_is_missing_and_loads_the_rest(
    stub: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [packed_weight(K, N, address=(number + 1) << 40) for number in (0, 1)]
    compiled, loaded = [], []

    def compile_all(orders: Any, target: Any, jobs: int, tell: Any) -> None:
        for order in orders:
            compiled.append(order)
            tell(order[1], None)

    def load_kernel(template: str, config: Any, target: Any) -> Any:
        return SimpleNamespace(load=lambda device: loaded.append((template, config)))

    monkeypatch.setattr(shared, "is_cached", lambda template, config, target: "permute" in template)
    monkeypatch.setattr(shared, "compile_all", compile_all)
    monkeypatch.setattr(shared, "load_kernel", load_kernel)
    monkeypatch.setattr(shared, "detect", lambda device: get_target("sm_90a"))
    monkeypatch.setattr(shared, "gpu_of", lambda device: imagined_gpu("sm_90a", 4))
    monkeypatch.setattr(shared, "launch_of", lambda *_, **__: None)
    warming.warm_up(weights, 100)
    assert len(set(loaded)) == len(loaded)
    assert set(compiled) == {one for one in loaded if "permute" not in one[0]}
    assert len(compiled) > 3
    warming.warm_up(weights, 100)
    assert len(set(loaded)) == len(loaded), "the second time there is nothing to do"
    choice.forget()
    warming.warm_up(weights[:1], 100)
    assert len(loaded) == 2 * len(set(loaded)), "another tuning file may have come"
    both, loaded[:] = set(loaded), []
    shared.warm_up(marlin_gemm, (x_of(5), weights[0]), max_m=100)
    assert set(loaded) == both, "of the call, it is the same"
    for wrong in (0, 1 << 20):
        with pytest.raises(ArgumentError, match=r"max_m: got \d+; allowed: 1 to 131072"):
            warming.warm_up(weights, wrong)
