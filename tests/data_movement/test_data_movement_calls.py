"""Calls of the operations over arrays on the path of a call: on the fake driver what a repeated call launches, on the
emulator results, plans and checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import build_driver, wrong_cases

import cudatma as c
from cudatma.kernels.data_movement import movement

Array = np.ndarray[Any, Any]
EMULATED = {"backend": "emulator"}


def test_on_the_fake_driver(tmp_path: Path) -> None:
    build_driver(tmp_path)
    script = Path(__file__).with_name("movement_on_fake_driver.py")
    assert not (wrong := wrong_cases(script, tmp_path)), wrong


def numbers(seed: int, shape: tuple[int, ...] = (20, 48)) -> Array:
    return np.random.default_rng(seed).integers(1, 100, shape).astype(np.float32)


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
