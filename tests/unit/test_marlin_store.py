"""Where a result may leave by TMA, the map that it leaves through, and that a plan's map follows the result."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.errors import ArgumentError
from cudatma.kernels.marlin.operands import check_input, check_output
from cudatma.kernels.marlin.plan import Plan, resolve_store, tensor_maps
from cudatma.kernels.marlin.spec import MarlinSpec
from cudatma.kernels.marlin.wgmma_spec import WgmmaSpec
from cudatma.layout import Swizzle
from cudatma.quantization import quantize
from cudatma.target import get_target

STORE = WgmmaSpec("float16", 128, False, 64, 128, 2, 1, 4, store_tokens=16)
TARGET = get_target("sm_90a")


@given(st.integers(1, 5000), st.integers(0, 100))
def test_by_tma_only_rows_of_whole_pieces(n: int, gap: int) -> None:
    """TMA clips a store at 16 bytes of the innermost dimension, and takes pitches that are multiples of them."""
    pitch = 2 * (n + gap)
    resolved = resolve_store(STORE, n, pitch)
    assert isinstance(resolved, WgmmaSpec)
    if n % 8 == 0 and pitch % 16 == 0:
        assert resolved is STORE
    else:
        assert (resolved.store_tokens, resolved.block_m, resolved.stages) == (0, STORE.block_m, STORE.stages)


def test_other_kernels_are_left_as_they_are() -> None:
    portable = MarlinSpec("float16", 128, False, 16, 64, 128, 1, 2, 1, 3)
    assert resolve_store(portable, 77, 154) is portable


def operands(n: int, width: int) -> tuple[Any, Any, Any]:
    w = quantize(np.ones((128, n), np.float32), dtype="float16", group_size=128)
    x = np.zeros((50, 128), np.float16)
    out = np.zeros((50, width), np.float16)[:, :n]
    rows = check_input(x, w)
    return w, rows, check_output(out, rows, w)


def test_the_map_of_a_result() -> None:
    w, x, out = operands(72, 96)
    maps, activations, result = tensor_maps(w, x, out, STORE, TARGET)
    assert (len(maps), activations, result) == (4, 2, 3)
    spec = maps[3].spec
    assert (spec.dims, spec.box, spec.swizzle) == ((72, 50), (64, 16), Swizzle.B128)
    assert (spec.address, spec.strides_bytes) == (out.info.pointer, (192,))
    assert maps[3].footprint_bytes * STORE.stack == STORE.staging_bytes
    assert tensor_maps(w, x, out, resolve_store(STORE, 1, 2), TARGET)[2] is None


@pytest.mark.parametrize(("n", "width"), [(68, 72), (72, 76)])
def test_no_map_is_made_that_would_overrun(n: int, width: int) -> None:
    w, x, out = operands(n, width)
    with pytest.raises(ArgumentError, match="whole 16-byte pieces") as caught:
        tensor_maps(w, x, out, STORE, TARGET)
    assert caught.value.field == "out"


def test_both_maps_of_a_plan_follow_their_arrays() -> None:
    """Without a card: a plan whose arguments are plain memory, as LaunchPlan would hold them."""
    plan, sent = Plan.__new__(Plan), []
    activations, result = ((ctypes.c_uint64 * 16)(*range(16)) for _ in range(2))
    pointers = {name: ctypes.c_uint64() for name in ("_x", "_output", "_bias", "_partials", "_flags")}
    fields = {"_map": activations, "_out_map": result, "_map_address": 0, "_out_map_address": 0, **pointers}
    fields |= {"_space": 0, "_last_bias": 0, "_lock": threading.Lock()}
    for name, value in fields.items():
        setattr(plan, name, value)
    plan._plan = SimpleNamespace(launch=lambda stream: sent.append((stream, activations[0], result[0])))  # type: ignore
    space: Any = SimpleNamespace(partials_pointer=7, flags_pointer=8)
    plan.run(0x1000, 0x2000, 0, space, 3)
    plan.run(0x3000, 0x4000, 0, space, 4)
    assert sent == [(3, 0x1000, 0x2000), (4, 0x3000, 0x4000)]
    assert list(result[1:]) == list(range(1, 16))
    assert pointers["_output"].value == 0x4000
