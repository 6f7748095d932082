"""The operations over arrays on the CPU: results of emulator and reference against NumPy, hazards, and plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from movement_cases import CASES, Case, check, numbers, window

import cudatma as c
from cudatma.arrays import describe
from cudatma.kernels.data_movement.configs import PlainConfig, RunConfig, WindowConfig
from cudatma.kernels.data_movement.copy import plan_copy
from cudatma.kernels.data_movement.movement import Place
from cudatma.kernels.registry import REGISTRY
from cudatma.target import get_target

Array = np.ndarray[Any, Any]
BACKENDS = ("emulator", "reference")


@pytest.mark.parametrize("case", [case for case in CASES if not case.large], ids=str)
def test_a_call_gives_what_numpy_gives(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if not get_target("sm_90a").has(case.needs):
        monkeypatch.setenv("CUDATMA_TARGET", "sm_100a")
    for backend in BACKENDS:
        check(case, np, backend=backend)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "sm_90a") for name in ("window_copy", "run_copy", "gather_boxes", "im2col", "broadcast")),
        ("window_copy", "sm_120a"),
    ],
)
def test_no_hazard_in_many_schedules(name: str, target: str) -> None:
    make = REGISTRY[name].sample
    assert make is not None
    sample = make(get_target(target))
    assert sample.run(schedules=8, seed=7).is_clean
    assert sample.error() == 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_window_of_any_strides_is_right(data: st.DataObject) -> None:
    """TMA where it can, plain code where it cannot: rows off 16 bytes, steps, reversed and transposed arrays."""
    dtype = data.draw(st.sampled_from([np.uint8, np.float16, np.float32, np.float64]))
    shape = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    base = numbers([2 * n for n in shape], dtype)
    steps = [data.draw(st.sampled_from([1, 1, 1, 2, -1])) for _ in shape]
    source = base[tuple(slice(None, None, step) for step in steps)]
    if data.draw(st.booleans()):
        source = source.T
    offset = [data.draw(st.integers(-5, n)) for n in source.shape]
    extent = [data.draw(st.integers(0, 12)) for _ in source.shape]
    result = c.copy(source, offset=offset, shape=extent, pad="zeros", backend="emulator")
    assert np.array_equal(result, window(source, offset, extent))


class Producer:
    """Host memory that only DLPack shows."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries() -> None:
    source, into = numbers((20, 48), np.float32), np.zeros((48, 20), np.float32)
    for backend in BACKENDS:
        result = c.copy(Producer(source), offset=(1, 4), shape=(8, 40), backend=backend)
        assert (result == source[1:9, 4:44]).all()
        target = Producer(into)
        assert c.transpose(Producer(source), out=target, backend=backend) is target
        assert (into == source.T).all()
        starts = Producer(np.array([[2, 8]], np.int32))
        assert (c.gather(Producer(source), starts, (3, 8), backend=backend)[0] == source[2:5, 8:16]).all()
    source.setflags(write=False)
    assert (c.copy(source, backend="emulator") == source).all()


def test_nothing_to_copy() -> None:
    empty = np.zeros((0, 16), np.float32)
    assert c.copy(empty, backend="emulator").shape == (0, 16)
    assert c.copy(np.full((), 3.0), backend="emulator").item() == 3
    assert (c.copy(empty, shape=(2, 16), pad="zeros", backend="emulator") == 0).all()
    for start in (2**63 - 1, -(2**63)):
        far = c.copy(np.ones((2, 16), np.float32), offset=(start, 0), shape=(2, 16), pad="zeros", backend="emulator")
        assert (far == 0).all()
    assert c.transpose(np.zeros((5, 0), np.int8), backend="emulator").shape == (0, 5)
    assert c.gather(np.zeros((5, 16), np.int8), [], (2, 16), backend="emulator").shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("make", "offset", "kind"),
    [
        (lambda: (numbers((64, 64), np.float32), np.zeros((64, 64), np.float32)), (0, 0), RunConfig),
        (lambda: (numbers((64, 80), np.float32)[:, :64], np.zeros((64, 64), np.float32)), (0, 0), WindowConfig),
        (lambda: (numbers((64, 81), np.float32)[:, :64], np.zeros((64, 64), np.float32)), (0, 0), PlainConfig),
        (lambda: (numbers((64, 80), np.float32), np.zeros((64, 63), np.float32)), (0, 0), PlainConfig),
        (lambda: (numbers((64, 80), np.float32), np.zeros((64, 64), np.float32)), (0, 1), PlainConfig),
        (lambda: (numbers((64, 64), np.float32).T, np.zeros((64, 64), np.float32)), (0, 0), PlainConfig),
        (lambda: (numbers((64, 64), np.float32).T, np.zeros((64, 64), np.float32).T), (0, 0), RunConfig),
        (lambda: (numbers((6, 64), np.float32)[:1], np.zeros((9, 64), np.float32)[:1]), (0, 0), RunConfig),
    ],
)
def test_what_carries_a_copy(make: Callable[[], tuple[Array, Array]], offset: Sequence[int], kind: type) -> None:
    source, result = make()
    planned = plan_copy(describe(source), describe(result), tuple(offset), Place(get_target("sm_90a"), 4))
    assert isinstance(planned.config, kind)


def test_prefetch_takes_any_part() -> None:
    source = numbers((64, 80), np.float32)
    for backend in BACKENDS:
        c.prefetch(source, backend=backend)
        c.prefetch(source, offset=(3, 4), shape=(20, 40), backend=backend)
        c.prefetch(source[:0], backend=backend)
        c.prefetch(source.ravel()[1:3], backend=backend)  # less than a chunk


def test_targets_without_the_instruction_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbers((8, 16), np.float32)
    with pytest.raises(c.TargetError, match="gather4"):
        c.gather_rows(source, [1], backend="emulator")
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert (c.gather_rows(source, [1], backend="emulator") == source[1:2]).all()
    with pytest.raises(c.TargetError, match="scatter4"):
        c.scatter_rows(source.copy(), [1], source[:1].copy(), backend="emulator")
    with pytest.raises(c.TargetError, match="broadcast needs it"):
        c.broadcast(source, 2, backend="emulator")
