"""The engine of a call: what a repeated call, a new M and a changed call do, with a driver that launches nothing."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from stub_driver import RESULT, ROWS, Array, Launch, StubDriver, packed_weight
from stub_driver import stub as stub  # the fixture

from cudatma import LaunchError, context, gemm, marlin_gemm
from cudatma.arrays import dense_strides
from cudatma.context import Runtime, using_runtime
from cudatma.descriptor import codec
from cudatma.dtypes import BFLOAT16
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.gemm.gemm import GEMM_CALL, Gemm
from cudatma.kernels.marlin.gemm import MARLIN_GEMM, MarlinGemm
from cudatma.kernels.operation import PlanCache, Plans
from cudatma.quantization.scale_range import ScaleFit

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
A, B, OUT, BIAS, A_SCALE, B_SCALE = (0x10_0000_0000 * (index + 1) for index in range(6))


def rows(m: int, k: int, dtype: Any = np.float16, *, pitch: int = 0, address: int = A) -> Array:
    """A matrix (m, k); ``pitch`` elements from one row to the next."""
    size = np.dtype(dtype).itemsize
    return Array((m, k), dtype, address, strides=((pitch or k) * size, size))


def columns(k: int, n: int, dtype: Any = np.float16, *, pitch: int = 0, address: int = B) -> Array:
    """A matrix (k, n) whose columns are contiguous."""
    size = np.dtype(dtype).itemsize
    return Array((k, n), dtype, address, strides=(size, (pitch or k) * size))


def vector(n: int, dtype: Any, address: int) -> Array:
    return Array((n,), dtype, address)


Call = Callable[[int], object]


def marlin_calls(**options: Any) -> dict[str, Call]:
    """Calls of marlin_gemm as functions of M."""
    k, n = 1024, 1536
    plain, ordered = packed_weight(k, n), packed_weight(k, n, act_order=True)
    small, odd = packed_weight(1000, 200, group_size=-1), packed_weight(1000, 201, zeros=True, dtype="bfloat16")
    exponents = [packed_weight(k, n, fit=ScaleFit("shifted", p), address=(p + 1) << 40) for p in (0, 1, 2)]
    return {
        "plain": lambda m: marlin_gemm(rows(m, k), plain),
        "out": lambda m: marlin_gemm(rows(m, k), plain, rows(m, n, pitch=n + 8, address=OUT)),
        "bias": lambda m: marlin_gemm(rows(m, k), plain, None, vector(n, np.float16, BIAS)),
        "act-order": lambda m: marlin_gemm(rows(m, k), ordered),
        "odd pitch": lambda m: marlin_gemm(rows(m, k, pitch=k + 1), plain),
        "programmatic": lambda m: marlin_gemm(rows(m, k), plain, programmatic=True),
        "batch-invariant": lambda m: marlin_gemm(rows(m, k), plain, batch_invariant=True),
        "whole columns": lambda m: marlin_gemm(rows(m, 1000), small),
        "zeros, odd N": lambda m: marlin_gemm(rows(m, 1000, BFLOAT16), odd),
        "other exponents": lambda m: marlin_gemm(rows(m, k), exponents[m % 3]),
        "(B, T, K)": lambda m: marlin_gemm(Array((2, m, k), np.float16, A), plain),
    }


def gemm_calls() -> dict[str, Call]:
    """Calls of gemm as functions of M."""
    k, n = 1024, 1000
    right, bias = columns(k, n), vector(n, np.float16, BIAS)
    fp8 = columns(k, n, E4M3)
    blocks = rows(8, 8, np.float32, address=B_SCALE)
    scales = {"b_scale": vector(n, np.float32, B_SCALE)}
    return {
        "RC": lambda m: gemm(rows(m, k), right),
        "RR": lambda m: gemm(rows(m, k), rows(k, n, address=B)),
        "CR": lambda m: gemm(columns(m, k, pitch=4096, address=A), rows(k, n, address=B)),
        "CC": lambda m: gemm(columns(m, k, pitch=4096, address=A), right),
        "pitches": lambda m: gemm(rows(m, k, pitch=k + 8), right, out=rows(m, n, pitch=n + 3, address=OUT)),
        "epilogue": lambda m: gemm(rows(m, k), right, bias=bias, alpha=0.5, activation="gelu"),
        "beta": lambda m: gemm(rows(m, k), right, beta=2.0, out=rows(m, n, np.float32, address=OUT)),
        "bf16": lambda m: gemm(rows(m, k, BFLOAT16), columns(k, n, BFLOAT16), batch_invariant=True),
        "fp8, one scale": lambda m: gemm(rows(m, k, E4M3), fp8, a_scale=vector(1, np.float32, A_SCALE), b_scale=2.0),
        "fp8, 0-d scale": lambda m: gemm(rows(m, k, E4M3), fp8, a_scale=Array((), np.float32, A_SCALE)),
        "fp8, rows": lambda m: gemm(rows(m, k, E4M3), fp8, a_scale=vector(m, np.float32, A_SCALE), **scales),
        "fp8, blocks": lambda m: gemm(
            rows(m, k, E4M3), fp8, a_scale=columns(m, 8, np.float32, pitch=4096, address=A_SCALE), b_scale=blocks
        ),
        "version": lambda m: gemm(rows(m, k), right, version=3),
        "(B, T, K)": lambda m: gemm(Array((3, m, k), np.float16, A), right),
        "(B, T, K), strides": lambda m: gemm(Array((2, m, k), np.float16, A, strides=(1 << 24, 2 * k, 2)), right),
        "batch": lambda m: gemm(Array((2, m, k), np.float16, A), Array((2, k, n), np.float16, B)),
    }


CALLS: dict[str, Callable[[], dict[str, Call]]] = {"marlin": marlin_calls, "gemm": gemm_calls}


def launched(stub: StubDriver, call: Call, m: int) -> list[Launch]:
    """Return the launches of a call."""
    stub.launches.clear()
    call(m)
    return list(stub.launches)


def sizes(count: int, seed: int) -> list[int]:
    """Return values of M, small ones as often as large ones; neighbors, and each of 1 to 8, are among them."""
    rng = random.Random(seed)
    found = [int(2 ** rng.uniform(0, 11.5)) for _ in range(count)]
    found = [*range(1, 9), *found, *(m + 1 for m in found[: count // 3])]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, calls in CALLS.items() for name in calls()])
def test_a_new_m_gets_the_arguments_of_a_first_call(stub: StubDriver, family: str, name: str) -> None:
    """Each M, after all the others, launches what it would launch in a process that saw no other M."""
    call, runtime = CALLS[family]()[name], Runtime()
    for m in sizes(24, seed=len(name)):
        with using_runtime(Runtime()):
            wanted = launched(stub, call, m)
        with using_runtime(runtime):
            assert launched(stub, call, m) == wanted, f"M = {m}"
            assert launched(stub, call, m) == wanted, f"M = {m}, repeated"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations whose checks have run."""
    names: list[str] = []

    def watch(kind: Any) -> None:
        check = kind.check

        def spy(self: Any, *arguments: Any) -> Any:
            names.append(self.name)
            return check(self, *arguments)

        monkeypatch.setattr(kind, "check", spy)

    watch(MarlinGemm)
    watch(Gemm)
    return names


#: Calls whose checks look at each new M.
NOT_RESIZED = ("batch", "fp8, blocks", "(B, T, K), strides")


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, calls in CALLS.items() for name in calls()])
def test_a_new_m_of_a_loaded_kernel_is_not_checked(
    stub: StubDriver, checked: list[str], family: str, name: str
) -> None:
    call = CALLS[family]()[name]
    known = [m for m in sizes(12, seed=1) if m > 1]
    for m in known:
        call(m)
    plans, operation = stub.plans, {"marlin": MARLIN_GEMM, "gemm": GEMM_CALL}[family]
    checked.clear()
    context.runtime().part(Plans).of(operation).calls.clear()
    for m in known:
        call(m)
    assert stub.plans == plans
    assert bool(checked) == (name in NOT_RESIZED)
