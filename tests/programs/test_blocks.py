"""Blocks of emulate_launches: options, threads, a second block, and launches after the end."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_driver import VALUES, as_tuples, driver, ok, scale_function

import cudatma
from cudatma.errors import ArgumentError, ArgumentTypeError, LaunchError, TargetError


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"hazards": "print"}, ArgumentError, 'hazards must be "raise", "collect" or "off".*got print'),
        ({"only": ["a"]}, ArgumentTypeError, "only must be a str.*got list"),
        ({"on_launch": 3}, ArgumentTypeError, "on_launch must be a function.*got int"),
        ({"schedules": 0}, ArgumentError, "schedules must be a positive integer.*got 0"),
        ({"seed": "a"}, ArgumentError, "seed must be a nonnegative integer.*got a"),
        ({"replay": -1}, ArgumentError, "replay must be a nonnegative integer.*got -1"),
        ({"step_limit": 0}, ArgumentError, "step_limit must be a positive integer.*got 0"),
        ({"trace": "yes"}, ArgumentTypeError, "trace must be True or False.*got str"),
        ({"target": "sm_1"}, TargetError, "target must be .*got sm_1"),
    ],
)
def test_an_option_is_checked_before_the_block(option: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text), cudatma.emulate_launches(**option):
        pytest.fail("the block must not begin")


def launch() -> np.ndarray[Any, Any]:
    x = VALUES.copy()
    ok(driver.cuLaunchKernel(scale_function(), 1, 1, 1, 64, 1, 1, 0, 0, as_tuples(x.ctypes.data), 0))
    return x


def in_threads(function: Callable[[], Any], count: int = 3) -> list[Any]:
    """Return the results or exceptions of calls in threads."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def open_second() -> None:
    with cudatma.emulate_launches():
        pytest.fail("the block must not begin")


def test_a_second_block_is_an_error_in_every_thread() -> None:
    original = driver.cuInit
    with cudatma.emulate_launches() as log:
        with pytest.raises(
            LaunchError, match=r"open at most once per process; exit the block opened at .*test_blocks.py"
        ):
            open_second()
        assert [type(result) for result in in_threads(open_second)] == [LaunchError] * 3
        launch()
    assert len(log) == 1
    assert driver.cuInit is original


def test_launches_of_all_threads_are_in_the_log() -> None:
    with cudatma.emulate_launches() as log:
        results = in_threads(launch)
    assert [(x == 2 * VALUES).all() for x in results] == [True] * 3
    assert len(log) == 3


def test_torch_s_device_is_the_cpu_in_threads_of_the_block() -> None:
    torch = pytest.importorskip("torch")
    end, late = threading.Event(), []

    def outlive() -> None:
        end.wait()
        late.append(torch.zeros(2).is_cuda)

    with cudatma.emulate_launches():
        results = in_threads(lambda: torch.ones(4, device="cuda").is_cuda)
        thread = threading.Thread(target=outlive)
        thread.start()
    end.set()
    thread.join()
    assert (results, late) == ([True] * 3, [False])


def test_patches_end_with_a_generator_and_with_an_exception() -> None:
    def suspended() -> Iterator[None]:
        with cudatma.emulate_launches():
            yield

    originals = driver.cuInit, threading.Thread.start
    generator: Any = suspended()
    next(generator)
    assert driver.cuInit is not originals[0]
    generator.close()
    assert (driver.cuInit, threading.Thread.start) == originals
    with pytest.raises(KeyError), cudatma.emulate_launches():
        raise KeyError
    assert (driver.cuInit, threading.Thread.start) == originals


def test_a_kernel_of_an_ended_block_is_not_launched() -> None:
    cupy: Any = pytest.importorskip("cupy")
    with cudatma.emulate_launches() as log:
        kernel = cupy.RawKernel('extern "C" __global__ void f() {}', "f")
    with pytest.raises(
        LaunchError, match=r"cupy launch of f at .*test_blocks.py:.*got a launch after the end of the block"
    ):
        kernel((1,), (32,), ())
    assert len(log) == 0


def test_static_and_inherited_attributes_are_restored() -> None:
    patches = importlib.import_module("cudatma.programs.patches").Patches

    class Base:
        count = 1

        @staticmethod
        def make() -> int:
            return 1

    class Derived(Base):
        pass

    with patches() as changes:
        changes.set(Base, "make", staticmethod(lambda: 2))
        changes.set(Derived, "count", 5)
        assert (Base().make(), Derived.count) == (2, 5)
    assert (Base().make(), Derived.count, "count" in vars(Derived)) == (1, 1, False)
