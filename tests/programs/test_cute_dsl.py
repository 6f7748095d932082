"""Launches of the CuTe DSL on the emulator."""

from __future__ import annotations

import numpy as np
import pytest

import cudatma
from cudatma.errors import CudaTmaError, HazardError

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
from cutlass.cute.runtime import from_dlpack

N = 192


@cute.kernel
def twice(source: cute.Tensor, result: cute.Tensor) -> None:
    """Double the elements of a tensor."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    result[64 * block + thread] = source[64 * block + thread] * 2.0


@cute.kernel
def reversed_in_a_warp(result: cute.Tensor, is_ordered: cutlass.Constexpr) -> None:
    """Exchange elements through shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    tile = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64))
    tile[thread] = result[thread]
    if cutlass.const_expr(is_ordered):
        cute.arch.sync_threads()
    result[thread] = tile[63 - thread]


@cute.jit
def four_times(source: cute.Tensor, result: cute.Tensor) -> None:
    """Launch a kernel twice."""
    twice(source, result).launch(grid=(N // 64, 1, 1), block=(64, 1, 1))
    twice(result, source).launch(grid=(N // 64, 1, 1), block=(64, 1, 1))


@cute.jit
def reverse(result: cute.Tensor, is_ordered: cutlass.Constexpr) -> None:
    """Launch the exchange."""
    reversed_in_a_warp(result, is_ordered).launch(grid=(1, 1, 1), block=(64, 1, 1))


def test_a_host_function_launches_its_kernels_in_order() -> None:
    source, result = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    with cudatma.emulate_launches() as log:
        four_times(from_dlpack(source), from_dlpack(result))
    assert [(entry.launch.library, entry.launch.grid) for entry in log] == [("cute", (N // 64, 1, 1))] * 2
    assert all("twice" in entry.launch.entry and "test_cute_dsl.py" in entry.launch.place for entry in log)
    np.testing.assert_array_equal(result, 2 * np.arange(N))
    np.testing.assert_array_equal(source, 4 * np.arange(N))


def test_a_race_is_raised_from_the_host_function() -> None:
    result = np.arange(64, dtype=np.float32)
    with cudatma.emulate_launches():
        reverse(from_dlpack(result), True)
        np.testing.assert_array_equal(result, np.arange(64)[::-1])
        with pytest.raises(HazardError, match="data_race"):
            reverse(from_dlpack(result), False)


def test_an_error_of_the_launch_is_raised_from_the_host_function() -> None:
    result = np.arange(63, dtype=np.float32)
    with cudatma.emulate_launches(hazards="off"), pytest.raises(CudaTmaError, match="reversed_in_a_warp"):
        reverse(from_dlpack(result), True)
