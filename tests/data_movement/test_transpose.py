"""The transpose: results that are strided, no hazard, and every access to shared memory free of bank conflicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from movement_cases import numbers

import cudatma as c
from cudatma.arrays import describe
from cudatma.emulator.hazards.shared_accesses import SharedAccesses
from cudatma.kernels.data_movement.movement import Place
from cudatma.kernels.data_movement.transpose import TransposeConfig, choose_transpose, plan_transpose, tile_plan
from cudatma.layout import WARP_LANES, bank_conflicts
from cudatma.target import get_target

Array = np.ndarray[Any, Any]


def test_a_strided_result() -> None:
    source, room = numbers((33, 35), np.float32), np.zeros((38, 66), np.float32)
    into = room[3:, ::2]
    assert c.transpose(source, out=into, backend="emulator") is into
    assert (into == source.T).all()
    assert (room[:3] == 0).all()
    assert (room[:, 1::2] == 0).all()


def place(target: str = "sm_90a", blocks: int = 2) -> Place:
    return Place(get_target(target), blocks)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("element_bytes", "target"), [(1, "sm_90a"), (2, "sm_90a"), (4, "sm_90a"), (8, "sm_90a"), (4, "sm_120a")]
)
def test_no_hazard_in_many_schedules(element_bytes: int, target: str) -> None:
    """Small tiles, so that the ring and the transposed tiles wrap around several times."""
    config = TransposeConfig(element_bytes, 1, 1, 2, 1, warps=2, raster_group=2)
    source = numbers((3 * config.side, 2 * config.side - 16), f"uint{8 * element_bytes}")
    result = np.zeros(source.shape[::-1], source.dtype)
    arrays = {"src": describe(source), "out": describe(result)}
    planned = tile_plan(arrays["src"], arrays["out"], place(target), config)
    assert planned.emulate(get_target(target), arrays, schedules=8, seed=3).is_clean
    assert (result == source.T).all()


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_shared_memory_without_bank_conflicts(element_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses that the emulated warps really access, 16 bytes a lane, against the arithmetic of the 32 banks."""
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
    plan_transpose(arrays["src"], arrays["out"], place()).emulate(get_target("sm_90a"), arrays, schedules=1)
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
