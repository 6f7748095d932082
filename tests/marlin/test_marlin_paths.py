"""marlin_gemm's paths: which launches a call makes, and what warming up to a bound compiles. No GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from stub_driver import Array, StubDriver, packed_weight
from stub_driver import stub as stub  # the fixture

from cudatma import marlin_gemm

K, N = 128, 64
X, OUT = 1 << 36, 1 << 37


def x_of(m: int, *, address: int = X, pitch: int = K) -> Array:
    return Array((m, K), np.float16, address, strides=(2 * pitch, 2))


def entries(stub: StubDriver) -> list[tuple[bool, bool]]:
    """Return, for each launch since the last call of this function, whether it is the copy and whether it is
    programmatic."""
    found = [(launch.entry == "permute_columns", launch.programmatic) for launch in stub.launches]
    stub.launches.clear()
    return found


@pytest.mark.parametrize("programmatic", [False, True])
def test_activation_order_takes_two_launches(stub: StubDriver, programmatic: bool) -> None:
    """The copy is launched as the caller requests; the GEMM is always a dependent launch of the copy."""
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
    """Each copy is followed by its own GEMM, although both threads write to the same rows."""
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
