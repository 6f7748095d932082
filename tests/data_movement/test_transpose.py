"""The transpose: results against NumPy, no hazard, and every access to shared memory free of bank conflicts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatma as c
from cudatma.arrays import describe
from cudatma.emulator.hazards.shared_races import SharedRaces
from cudatma.kernels.data_movement.movement import Place
from cudatma.kernels.data_movement.transpose import TransposeSpec, choose_transpose, plan_transpose, tile_plan
from cudatma.layout import WARP_LANES, bank_conflicts
from cudatma.target import get_target

Array = np.ndarray[Any, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)


def numbers(shape: tuple[int, ...], dtype: Any) -> Array:
    return np.random.default_rng(0).integers(0, 250, shape).astype(dtype)


def place(target: str = "sm_90a", blocks: int = 2) -> Place:
    return Place(get_target(target), blocks)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 128), np.uint8),
        ((272, 144), np.int8),
        ((200, 88), np.float16),
        ((3, 136, 64), BF16),
        ((100, 140), np.float32),
        ((64, 64), np.int32),
        ((70, 34), np.float64),
        ((2, 2, 20, 36), np.complex64),
        ((2, 16, 16), np.uint8),
    ],
    ids=str,
)
def test_transpose(shape: tuple[int, ...], dtype: Any, backend: str) -> None:
    source = numbers(shape, dtype)
    result = c.transpose(source, via="tma", backend=backend)
    assert result.flags.c_contiguous
    assert (result == np.swapaxes(source, -1, -2)).all()


@pytest.mark.parametrize(
    "source",
    [
        numbers((33, 35), np.float32),
        numbers((32, 36), np.float32).T,
        numbers((16, 16), np.complex128),
        numbers((64, 80), np.float32)[:, 1:65],
        numbers((4, 6, 16, 16), np.float32)[:, :5],
        numbers((16, 16), np.float32)[::-1],
    ],
)
def test_what_tma_cannot_is_right_too(source: Array) -> None:
    wanted = np.swapaxes(source, -1, -2)
    for via in ("auto", "plain"):
        assert (c.transpose(source, via=via, backend="emulator") == wanted).all()
    into = np.zeros((wanted.shape[-2] + 3, 2 * wanted.shape[-1]), source.dtype)[3:, ::2]
    if wanted.ndim == 2:
        assert c.transpose(source, out=into, backend="emulator") is into
        assert (into == wanted).all()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("element_bytes", "target"), [(1, "sm_90a"), (2, "sm_90a"), (4, "sm_90a"), (8, "sm_90a"), (4, "sm_120a")]
)
def test_no_hazard_in_many_schedules(element_bytes: int, target: str) -> None:
    """Small tiles, so that the ring and the transposed tiles wrap around several times."""
    spec = TransposeSpec(element_bytes, 1, 1, 2, 1, warps=2, raster_group=2)
    source = numbers((3 * spec.side, 2 * spec.side - 16), f"uint{8 * element_bytes}")
    result = np.zeros(source.shape[::-1], source.dtype)
    arrays = {"src": describe(source), "out": describe(result)}
    planned = tile_plan(arrays["src"], arrays["out"], place(target), spec)
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
        monkeypatch.setattr(SharedRaces, f"shared_{name}", recorder(name, getattr(SharedRaces, f"shared_{name}")))
    spec = choose_transpose(element_bytes, get_target("sm_90a"))
    rows, columns = spec.tile
    source = numbers((rows, columns), f"uint{8 * element_bytes}")
    result = np.zeros((columns, rows), source.dtype)
    arrays = {"src": describe(source), "out": describe(result)}
    plan_transpose(arrays["src"], arrays["out"], place()).emulate(get_target("sm_90a"), arrays, schedules=1)
    assert (result == source.T).all()
    for accesses in seen.values():
        assert len(accesses) == source.nbytes // (16 * WARP_LANES)  # each byte is read once and written once
        assert all(len(lanes) == WARP_LANES for lanes in accesses)
        assert sum(bank_conflicts(lanes, 16) for lanes in accesses) == 0


def test_rows_that_were_not_swizzled_would_conflict() -> None:
    """What the count above would show: eight lanes of one column of a plain tile are served one by one."""
    assert bank_conflicts([128 * lane for lane in range(32)], 16) == 28


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"element_bytes": 3}, "element_bytes"),
        ({"squares_y": 0}, "squares_y"),
        ({"squares_x": 9}, "squares_x"),
        ({"stages": 0}, "stages"),
        ({"transposed_tiles": 17}, "transposed_tiles"),
        ({"warps": 32}, "warps"),
        ({"raster_group": 0}, "raster_group"),
    ],
)
def test_a_spec_that_the_kernel_cannot_run(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(c.ArgumentError) as caught:
        TransposeSpec(
            **({"element_bytes": 4, "squares_y": 2, "squares_x": 2, "stages": 3, "transposed_tiles": 2} | wrong)
        )
    assert caught.value.field == field


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_two_blocks_fit_on_one_sm(element_bytes: int, target: str) -> None:
    chosen = get_target(target)
    spec = choose_transpose(element_bytes, chosen)
    spec.check_target(chosen)
    assert 2 * (spec.smem_bytes + 1024) <= chosen.smem_per_sm_bytes
    assert spec.ring.stage_bytes == 16384
