"""Rows of bytes by bulk copies: what the kernel gives on the emulator against NumPy, and when copy() takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cudatma as c
from cudatma.arrays import describe
from cudatma.kernels.moves import settings as chosen
from cudatma.kernels.moves.copy import plan_copy, window_of
from cudatma.kernels.moves.known import CALLS
from cudatma.kernels.moves.place import Move, Place
from cudatma.kernels.moves.plans import pitched_plan
from cudatma.kernels.moves.settings import Setting
from cudatma.kernels.moves.specs import PITCHED, PLAIN, WINDOW
from cudatma.kernels.moves.window import simplify
from cudatma.target import get_target

Array = np.ndarray[Any, Any]
TARGET = get_target("sm_90a")
PLACE = Place("emulator", None, TARGET, 4)
#: A ring of three slots that hold 256 bytes.
SHORT = Setting(slot_bytes=256, most_stages=3, in_flight=1)


def chunks(rows: int, columns: int, seed: int = 0) -> Array:
    """Rows of whole 16-byte chunks at an address that is one."""
    return np.random.default_rng(seed).integers(0, 255, (rows, columns, 16)).astype(np.uint8).view("V16")[..., 0]


def move_of(source: Array, result: Array, setting: Setting = SHORT) -> Move:
    infos = describe(source), describe(result)
    return pitched_plan(simplify(window_of(*infos, (0,) * source.ndim)), infos, PLACE, setting=setting)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_rows_of_any_length_and_pitch(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(2, 70))
    wide = [columns + data.draw(st.integers(1, 5)) for _ in range(2)]
    source, result = chunks(rows, wide[0]), chunks(rows, wide[1], 1)
    before, first = result.copy(), data.draw(st.integers(0, wide[0] - columns))
    step = data.draw(st.sampled_from([1, -1]))
    setting = Setting(128 * data.draw(st.integers(1, 4)), most_stages=data.draw(st.integers(2, 5)))
    part = source[::step, first : first + columns]
    report = move_of(part, result[:, :columns], setting).emulate(TARGET, schedules=2, seed=1)
    assert report.is_clean
    assert (result[:, :columns] == part).all()
    assert (result[:, columns:] == before[:, columns:]).all()


@pytest.mark.parametrize(("load", "store"), [("evict_first", ""), ("", "evict_first"), ("evict_last", "evict_normal")])
def test_policies_of_loads_and_stores(load: str, store: str) -> None:
    source = chunks(5, 40)
    result = np.zeros_like(source)[:, :36]
    move = move_of(source[:, :36], result, Setting(256, 2, 3, 1, load, store))
    assert (move.spec.load_cache, move.spec.store_cache) == (load, store)
    assert move.emulate(TARGET).is_clean
    assert (result == source[:, :36]).all()


def test_a_row_is_cut_evenly_where_l2_lines_begin() -> None:
    for columns, piece, parts in ((3000, 16000, 3), (1024, 16384, 1), (1025, 8320, 2), (2, 128, 1)):
        source = chunks(3, columns + 1)
        sizes = move_of(source[:, :columns], np.zeros_like(source)[:, :columns], Setting()).args[4:]
        assert sizes == (16 * columns, piece, parts, 3 * parts)
        assert piece * (parts - 1) < 16 * columns <= piece * parts


def test_what_bulk_copies_cannot_do() -> None:
    floats, result = np.zeros((8, 70), np.float32), np.zeros((8, 64), np.float32)
    for part, reason in (
        (floats[:, 1:65], "rows of 256 bytes"),
        (floats[:, :64], "pitches"),
        (floats.T[:64, :8], "gaps"),
    ):
        with pytest.raises(c.DescriptorError, match=reason):
            move_of(part, result if part.shape == (8, 64) else np.zeros((64, 8), np.float32))
    infos = describe(floats), describe(np.zeros((9, 70), np.float32))
    with pytest.raises(c.DescriptorError, match="all inside"):
        pitched_plan(simplify(window_of(*infos, (-1, 0))), infos, PLACE)


def test_copy_takes_it_for_long_rows_that_it_can_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.arange(8 * 512, dtype=np.float32).reshape(8, 512)

    def template(columns: int, first: int = 0) -> str:
        part = describe(source[:, first : first + columns])
        return plan_copy(part, describe(np.zeros((8, columns), np.float32)), (0, 0), PLACE).template

    monkeypatch.setattr(chosen, "PITCHED_FROM_BYTES", 0)
    assert template(256) == WINDOW
    monkeypatch.setattr(chosen, "PITCHED_FROM_BYTES", 1024)
    CALLS.clear()
    assert [template(256), template(252), template(256, 1)] == [PITCHED, WINDOW, PLAIN]
    result = c.copy(source, offset=(1, 4), shape=(7, 260), backend="emulator", via="tma")
    CALLS.clear()
    assert (result == source[1:, 4:264]).all()


def test_settings_fit_every_target() -> None:
    """Slots that an H200 has room for are cut down where two of them do not fit."""
    large = Setting(64 * 1024, 1, 8)
    assert [large.slot(get_target(name)) for name in ("sm_90a", "sm_120a")] == [65536, 50560]
    for name in ("sm_90a", "sm_120a"):
        target = get_target(name)
        place = Place("emulator", None, target, 4)
        source = chunks(40, 5000)
        infos = describe(source[:, :4999]), describe(np.zeros_like(source)[:, :4999])
        for blocks, slot in ((1, 65536), (2, 49152), (4, 32768)):
            setting = Setting(slot, blocks, 12, 5)
            move = pitched_plan(simplify(window_of(*infos, (0, 0))), infos, place, setting=setting)
            move.spec.check_target(target)
            assert blocks * (move.spec.smem_bytes + 1024) <= target.smem_per_sm_bytes
            assert move.grid == 2 * blocks
