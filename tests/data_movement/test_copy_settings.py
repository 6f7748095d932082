"""Copies with unusual rings, windows copied with wider elements, and transposes, on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from movement_cases import numbers

import cudatma as c
from cudatma.arrays import describe
from cudatma.emulator.hazards.shared_accesses import SharedAccesses
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement import ring as chosen
from cudatma.kernels.data_movement.copy import plan_copy, window_of
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.plans import run_plan, window_plan
from cudatma.kernels.data_movement.ring import Setting
from cudatma.kernels.data_movement.transpose import TransposeConfig, choose_transpose, plan_transpose, tile_plan
from cudatma.kernels.data_movement.window import carried, cropped, simplify
from cudatma.layout import WARP_LANES, bank_conflicts
from cudatma.target import get_target

Array = np.ndarray[Any, Any]
TARGET = get_target("sm_90a")
PLACE = LaunchLimits(TARGET, 4)


def whole_rows(rows: int, nbytes: int, dtype: str) -> Array:
    """Return rows of elements without zero bytes."""
    return np.random.default_rng(0).integers(1, 255, (rows, nbytes)).astype(np.uint8).view(dtype)


def element_bytes(planned: Arguments) -> int:
    return int(planned.parameters[0].spec.dtype.element_bytes)


@given(st.data())
def test_windows_are_exact_at_any_edge(data: st.DataObject) -> None:
    """Elements outside the source are zeros, even if wider elements carry the window."""
    size = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    rows, chunks = data.draw(st.integers(1, 9)), data.draw(st.integers(3, 40))
    lead, after = data.draw(st.integers(-1, 2)), data.draw(st.integers(0, 2))
    body = 16 * chunks - size * data.draw(st.integers(0, 16 // size - 1))
    wide = whole_rows(rows, 16 * (chunks + 1), f"V{size}")
    source = wide[:, : body // size]
    extent = 16 * (chunks + lead + after) // size
    result = np.ones((rows + 2, extent * size), np.uint8).view(source.dtype)
    starts = (-1, -16 * lead // size)
    arrays = {"src": describe(source), "out": describe(result)}
    planned = plan_copy(arrays["src"], arrays["out"], starts, PLACE, via="tma")
    assert planned.emulate(TARGET, arrays, schedules=1, seed=1).is_clean
    wanted = np.zeros((rows + 2, 16 * (chunks + abs(lead) + after)), np.uint8)
    wanted[1:-1, 16 * max(0, lead) :][:, :body] = np.ascontiguousarray(source).view(np.uint8)
    wanted = wanted[:, 16 * max(0, -lead) :][:, : extent * size]
    assert (result.view(np.uint8) == wanted).all()
    if rows > 1:
        edges = 16 * max(0, lead) | min(body, 16 * (chunks + after)) | 16
        assert element_bytes(planned) == min(8, edges & -edges)


def test_boxes_take_8_byte_elements_where_edges_allow() -> None:
    source = np.ones((64, 128), np.float32)
    for offset, shape, pitch, width in (
        ((0, 0), (64, 64), 64, 8),
        ((1, 4), (60, 68), 68, 8),
        ((-1, -4), (66, 136), 136, 8),
    ):
        result = np.empty((shape[0], pitch), np.float32)[:, : shape[1]]
        assert element_bytes(plan_copy(describe(source), describe(result), offset, PLACE, via="tma")) == width
    odd = source[:, :127]
    assert element_bytes(plan_copy(describe(odd), describe(np.empty((64, 128), "f4")), (0, 0), PLACE, via="tma")) == 4
    halves = np.ones((64, 128), np.float16)[:, :121]
    assert element_bytes(plan_copy(describe(halves), describe(np.empty((9, 128), "f2")), (0, 0), PLACE)) == 2


SETTINGS = [
    Setting(512, 1, 10),
    Setting(512, 2, 3, 1, "evict_first", ""),
    Setting(1024, 4, 4, 3, "", "evict_first"),
    Setting(256, 2, 2, 1, "evict_last", "evict_normal"),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_any_ring_copies_windows_and_runs(setting: Setting) -> None:
    source = whole_rows(40, 640, "uint32")
    for part, result in ((source[3:, 8:108], np.zeros((37, 100), np.uint32)), (source, np.zeros_like(source))):
        infos = describe(part), describe(result)
        window = simplify(window_of(*infos, (0, 0)))
        if window.is_one_run:
            planned = run_plan(window, infos, PLACE, setting=setting)
        else:
            planned = window_plan(carried(cropped(window), 8), infos, PLACE, setting=setting)
        assert (planned.config.load_cache, planned.config.store_cache) == (setting.load_cache, setting.store_cache)
        assert planned.config.stages == setting.max_stages
        assert planned.sizes.grid == 2 * setting.ctas_per_sm
        assert planned.emulate(TARGET, {"src": infos[0], "out": infos[1]}, schedules=1).is_clean
        assert (result == part).all()


@pytest.mark.parametrize("name", ["sm_90a", "sm_120a"])
def test_settings_fit_every_target(name: str) -> None:
    """Slots become smaller on targets where two of them do not fit."""
    target = get_target(name)
    large = Setting(64 * 1024, 1, 8)
    assert large.slot(target) == {"sm_90a": 65536, "sm_120a": 50560}[name]
    limits = LaunchLimits(target, 4)
    source = np.zeros((400, 5000), np.float32)
    infos = describe(source[:, :4996]), describe(np.zeros((400, 4996), np.float32))
    window = carried(cropped(simplify(window_of(*infos, (0, 0)))), 8)
    for setting in (chosen.BOXES, large, Setting(49152, 2, 12, 5), Setting(32768, 4, 12, 5)):
        planned = window_plan(window, infos, limits, setting=setting)
        planned.config.check_target(target)
        assert setting.ctas_per_sm * (planned.config.smem_bytes + 1024) <= target.smem_per_sm_bytes
        assert planned.sizes.grid == 2 * setting.ctas_per_sm


def test_a_strided_result() -> None:
    source, room = numbers((33, 35), np.float32), np.zeros((38, 66), np.float32)
    into = room[3:, ::2]
    assert c.transpose(source, out=into, backend="emulator") is into
    assert (into == source.T).all()
    assert (room[:3] == 0).all()
    assert (room[:, 1::2] == 0).all()


def limits(target: str = "sm_90a", blocks: int = 2) -> LaunchLimits:
    return LaunchLimits(get_target(target), blocks)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("element_bytes", "target"), [(1, "sm_90a"), (2, "sm_90a"), (4, "sm_90a"), (8, "sm_90a"), (4, "sm_120a")]
)
def test_no_hazard_in_many_schedules(element_bytes: int, target: str) -> None:
    """Tiles are small, so that the ring and the transposed tiles wrap several times."""
    config = TransposeConfig(element_bytes, 1, 1, 2, 1, warps=2, raster_group=2)
    source = numbers((3 * config.side, 2 * config.side - 16), f"uint{8 * element_bytes}")
    result = np.zeros(source.shape[::-1], source.dtype)
    arrays = {"src": describe(source), "out": describe(result)}
    planned = tile_plan(arrays["src"], arrays["out"], limits(target), config)
    assert planned.emulate(get_target(target), arrays, schedules=4, seed=3).is_clean
    assert (result == source.T).all()


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_shared_memory_without_bank_conflicts(element_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test checks the addresses that the emulated warps access, 16 bytes per lane, against the 32 banks."""
    seen: dict[str, list[list[int]]] = {"read": [], "write": []}

    def recorder(name: str, method: Any) -> Any:
        def record(self: Any, w: Any, at: int, block: Any, offsets: Array, size: int, *rest: Any) -> None:
            assert size == 16
            seen[name].append([int(offset) for offset in offsets])
            method(self, w, at, block, offsets, size, *rest)

        return record

    for name in seen:
        monkeypatch.setattr(SharedAccesses, f"shared_{name}", recorder(name, getattr(SharedAccesses, f"shared_{name}")))
    config = choose_transpose(element_bytes, get_target("sm_90a"))
    rows, columns = config.tile
    source = numbers((rows, columns), f"uint{8 * element_bytes}")
    result = np.zeros((columns, rows), source.dtype)
    arrays = {"src": describe(source), "out": describe(result)}
    plan_transpose(arrays["src"], arrays["out"], limits()).emulate(get_target("sm_90a"), arrays, schedules=1)
    assert (result == source.T).all()
    for accesses in seen.values():
        assert len(accesses) == source.nbytes // (16 * WARP_LANES)  # each byte is read once and written once
        assert all(len(lanes) == WARP_LANES for lanes in accesses)
        assert sum(bank_conflicts(lanes, 16) for lanes in accesses) == 0


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_two_blocks_fit_on_one_sm(element_bytes: int, target: str) -> None:
    chosen = get_target(target)
    config = choose_transpose(element_bytes, chosen)
    config.check_target(chosen)
    assert 2 * (config.smem_bytes + 1024) <= chosen.smem_per_sm_bytes
