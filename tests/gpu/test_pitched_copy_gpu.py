"""Rows of bytes by bulk copies on a card, by their plan, whatever copy() prefers."""

from __future__ import annotations

import numpy as np
import pytest

from cudatma.arrays import current_stream, describe
from cudatma.kernels.moves.copy import window_of
from cudatma.kernels.moves.launches import Launch
from cudatma.kernels.moves.place import place_of
from cudatma.kernels.moves.plans import pitched_plan, run_plan
from cudatma.kernels.moves.settings import Setting
from cudatma.kernels.moves.window import simplify

pytestmark = pytest.mark.gpu

SETTINGS = [
    Setting(),
    Setting(24064, 1, 8, 3, "evict_first", ""),
    Setting(48128, 2, 2, 1, "", "evict_first"),
    Setting(256, 4, 6, 5, "evict_first", "evict_first"),
]


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rows_arrive_and_nothing_beside_them(setting: Setting, step: int) -> None:
    """A row is one piece, or many; the last piece is short; rings wrap; the columns beside the rows stay."""
    import cupy

    rows, columns = 1501, 4100
    source = np.random.default_rng(0).random((rows, 5000), np.float32)
    result = cupy.full((rows, columns + 8), -1, cupy.float32)
    part = cupy.asarray(source)[::step, 12 : 12 + columns]
    arrays = describe(part), describe(result[:, 4:-4])
    place = place_of("copy", "cuda", arrays[0])
    move = pitched_plan(simplify(window_of(*arrays, (0, 0))), arrays, place, setting=setting)
    Launch(move, arrays, place).run(arrays, current_stream("cupy", place.device or 0))
    found = cupy.asnumpy(result)
    assert np.array_equal(found[:, 4:-4], source[::step, 12 : 12 + columns])
    assert (found[:, :4] == -1).all()
    assert (found[:, -4:] == -1).all()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_runs_with_other_rings(setting: Setting) -> None:
    import cupy

    source = np.random.default_rng(1).integers(0, 255, 9_000_037).astype(np.uint8)
    result = cupy.full(source.size + 64, 7, cupy.uint8)
    given = cupy.asarray(source)
    arrays = describe(given[5:]), describe(result[37 : 32 + source.size])
    place = place_of("copy", "cuda", arrays[0])
    move = run_plan(simplify(window_of(*arrays, (0,))), arrays, place, setting=setting)
    Launch(move, arrays, place).run(arrays, current_stream("cupy", place.device or 0))
    found = cupy.asnumpy(result)
    assert np.array_equal(found[37 : 32 + source.size], source[5:])
    assert (found[:37] == 7).all()
    assert (found[32 + source.size :] == 7).all()
