"""Calls of the operations over arrays on the path of a call: on the fake driver what a repeated call launches, on the
emulator results, plans and checks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_records import build_driver, wrong_cases

import cudatma as c
from cudatma.kernels.data_movement import movement

Array = np.ndarray[Any, Any]
EMULATED = {"backend": "emulator"}


def test_on_the_fake_driver(tmp_path: Path) -> None:
    build_driver(tmp_path)
    script = Path(__file__).with_name("data_movement_on_fake_driver.py")
    assert not (wrong := wrong_cases(script, tmp_path)), wrong


def numbers(seed: int, shape: tuple[int, ...] = (20, 48)) -> Array:
    return np.random.default_rng(seed).integers(1, 100, shape).astype(np.float32)


#: Operations on an array of 20 x 48, which return their result.
OPERATIONS: dict[str, Callable[[Array, dict[str, Any]], Any]] = {
    "run": lambda x, o: c.copy(x, **o),
    "run at an odd address": lambda x, o: c.copy(x.reshape(-1)[3:900], out=np.zeros(901, np.float32)[3:900][:897], **o),
    "window": lambda x, o: c.copy(x, offset=(-1, 4), shape=(12, 60), pad="zeros", **o),
    "plain": lambda x, o: c.copy(x, offset=[1, 3], shape=[7, 9], **o),
    "transpose": lambda x, o: c.transpose(x, **o),
    "sum": lambda x, o: c.reduce_into(np.ones((20, 64), np.float32), x, "add", offset=(3, 8), **o),
    "gather": lambda x, o: c.gather(x, [(int(x[0, 0]) % 7, 4), (-1, 44)], (4, 8), **o),
    "halo_tiles": lambda x, o: c.halo_tiles(x, (8, 16), (1, 4), **o),
    "im2col": lambda x, o: c.im2col(x.reshape(1, 20, 12, 4), 3, padding=1, **o),
    "broadcast": lambda x, o: c.broadcast(x, 3, **o),
    "tile_copy": lambda x, o: c.tile_copy(x, np.zeros_like(x), **o),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_same_results(name: str) -> None:
    call, results = OPERATIONS[name], []
    for seed in range(2):
        x = numbers(seed)
        result = call(x, EMULATED)
        assert np.array_equal(result, call(x, {"backend": "reference"}))
        assert not any(np.array_equal(result, other) for other in results)
        results.append(result)


def test_rows_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATMA_TARGET", "sm_100a")
    for seed in range(2):
        x, rows = numbers(seed), [seed + 3, 0, seed + 5, 11, 2]
        into = np.zeros((30, 48), np.float32)
        assert (c.gather_rows(x, rows, **EMULATED) == x[rows]).all()
        c.scatter_rows(into, rows, x[:5].copy(), **EMULATED)
        assert (into[rows] == x[:5]).all()
        assert np.count_nonzero(into) == 5 * 48


def test_addresses_are_still_looked_at() -> None:
    x, room = numbers(0), np.zeros(21 * 48, np.float32)
    out = room[: 20 * 48].reshape(20, 48)
    c.copy(x, out=out, via="tma", **EMULATED)
    off = room[1 : 1 + 20 * 48].reshape(20, 48)
    with pytest.raises(c.DescriptorError, match="16"):
        c.copy(x, out=off, via="tma", **EMULATED)
    assert (c.copy(x, out=off, **EMULATED) == x).all()
    with pytest.raises(c.ArgumentError, match="memory of its own"):
        c.copy(out, out=room[48:].reshape(20, 48), via="tma", **EMULATED)
    out.setflags(write=False)
    with pytest.raises(c.ArgumentError, match="writable"):
        c.copy(x, out=out, via="tma", **EMULATED)
    with pytest.raises(c.ArgumentError, match="CUDA device"):
        c.copy(x, out=np.zeros_like(x), via="tma", backend="cuda")
    sums = np.zeros((40, 48), np.float32)
    c.reduce_into(sums[:20], x, "add", **EMULATED)
    with pytest.raises(c.ArgumentError, match="overlaps"):
        c.reduce_into(sums[:20], sums[10:30], "add", **EMULATED)


def test_from_one_part_of_an_array_to_another() -> None:
    x = numbers(0)
    wanted = x[:8].copy()
    assert (c.copy(x, out=x[9:17], shape=(8, 48), **EMULATED) == wanted).all()
    with pytest.raises(c.ArgumentError, match="memory of its own"):
        c.copy(x, out=x[7:15], shape=(8, 48), **EMULATED)


def test_values_of_a_table_are_still_looked_at() -> None:
    x = numbers(0)
    c.gather(x, [(0, 4)], (4, 8), **EMULATED)
    with pytest.raises(c.ArgumentError, match="multiples of 4"):
        c.gather(x, [(0, 5)], (4, 8), **EMULATED)


def test_plans_are_found_by_layouts_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    x, planned = numbers(0), movement._planned
    planned.cache_clear()
    others: list[Callable[[], object]] = [
        lambda: c.copy(x, **EMULATED),
        lambda: c.copy(x.view(np.int32), **EMULATED),
        lambda: c.copy(x.reshape(48, 20), **EMULATED),
        lambda: c.copy(x[:, :44], **EMULATED),
        lambda: c.copy(x, cache="evict_first", **EMULATED),
        lambda: c.copy(x, via="plain", **EMULATED),
        lambda: c.copy(x, out=np.zeros((20, 52), np.float32)[:, :48], **EMULATED),
        lambda: c.copy(x, offset=(1, 4), shape=(12, 12), **EMULATED),
        lambda: c.copy(x, offset=(1, 8), shape=(12, 12), **EMULATED),
        lambda: c.copy(x.reshape(-1)[1:921].reshape(20, 46), **EMULATED),
        lambda: c.prefetch(x, **EMULATED),
    ]
    for _ in range(2):
        for other in others:
            other()
        x = numbers(1)
    assert (planned.cache_info().misses, planned.cache_info().hits) == (len(others), len(others))
    monkeypatch.setenv("CUDATMA_TARGET", "sm_120a")
    assert (c.copy(x, **EMULATED) == x).all()
    assert planned.cache_info().misses == len(others) + 1


def test_options_that_only_look_alike() -> None:
    x = numbers(0)
    first = c.copy(x, offset=(1, 4), shape=(12, 12), **EMULATED)
    for alike in ([1, 4], (True, 4), np.array([1, 4]), (np.int8(1), 4)):
        assert (c.copy(x, offset=alike, shape=(12, 12), **EMULATED) == first).all()  # type: ignore[arg-type]
    with pytest.raises(c.ArgumentTypeError):
        c.copy(x, offset=(1.0, 4), shape=(12, 12), **EMULATED)  # type: ignore[arg-type]
    c.broadcast(x, 1, **EMULATED)
    for wrong in (True, 1.0):
        with pytest.raises(c.ArgumentError, match="copies"):
            c.broadcast(x, wrong, **EMULATED)  # type: ignore[arg-type]
    with pytest.raises(c.ArgumentError, match="via"):
        c.copy(x, via=["tma"], **EMULATED)  # type: ignore[arg-type]


def test_no_array_is_kept() -> None:
    x = numbers(0)
    results = [c.transpose(x, **EMULATED), c.copy(x, **EMULATED), c.gather(x, [(0, 0)], (4, 8), **EMULATED)]
    gone = [weakref.ref(array) for array in (x, *results)]
    del x, results
    gc.collect()
    assert [each() for each in gone] == [None] * 4
