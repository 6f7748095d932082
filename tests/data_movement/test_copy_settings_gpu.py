"""Copies on a GPU with other rings than the usual ones, by their plans; windows as elements of every width."""

from __future__ import annotations

import numpy as np
import pytest

from cudatma.arrays import ArrayInfo, describe
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.copy import window_of
from cudatma.kernels.data_movement.movement import Place
from cudatma.kernels.data_movement.plans import run_plan, window_plan
from cudatma.kernels.data_movement.ring import BLOCKS_PER_SM, BOXES, Setting
from cudatma.kernels.data_movement.window import carried, cropped, simplify
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.replay import Replay
from cudatma.library_streams import current_stream
from cudatma.target import detect

pytestmark = pytest.mark.gpu

SETTINGS = [
    BOXES,
    Setting(),
    Setting(24064, 1, 8, 3, "evict_first", ""),
    Setting(48128, 2, 2, 1, "", "evict_first"),
    Setting(256, 4, 6, 5, "evict_first", "evict_first"),
]


def place() -> Place:
    return Place(detect(), BLOCKS_PER_SM * gpu_of(0).sm_count)


def launch(planned: Arguments, arrays: tuple[ArrayInfo, ArrayInfo]) -> None:
    names, addresses = ("src", "out"), tuple(info.pointer for info in arrays)
    replay = Replay(planned, planned.kernel(detect()), 0, names, dict(zip(names, addresses, strict=True)))
    replay.run(planned.sizes, addresses, current_stream("cupy", 0))


@pytest.mark.parametrize("widest", [1, 4, 8])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_window_arrives_and_nothing_around_it(setting: Setting, widest: int) -> None:
    """Zeros around it, a source that ends within a chunk; rings wrap; the columns next to the result stay."""
    import cupy

    rows, columns = 1501, 4110
    source = np.random.default_rng(0).integers(1, 255, (rows, 5008)).astype(np.uint8)
    body = columns // widest * widest
    result = cupy.full((rows + 9, 4224), 7, cupy.uint8)
    part = cupy.asarray(source)[:, 16 : 16 + body]
    arrays = describe(part), describe(result[:, 16 : 16 + 4128])
    window = carried(cropped(simplify(window_of(*arrays, (-4, -16)))), widest)
    assert window.itemsize == widest
    launch(window_plan(window, arrays, place(), setting=setting), arrays)
    wanted = np.full(result.shape, 7, np.uint8)
    wanted[:, 16 : 16 + 4128] = 0
    wanted[4:-5, 32 : 32 + body] = source[:, 16 : 16 + body]
    assert np.array_equal(cupy.asnumpy(result), wanted)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_runs_with_other_rings(setting: Setting) -> None:
    import cupy

    source = np.random.default_rng(1).integers(0, 255, 9_000_037).astype(np.uint8)
    result = cupy.full(source.size + 64, 7, cupy.uint8)
    given = cupy.asarray(source)
    arrays = describe(given[5:]), describe(result[37 : 32 + source.size])
    launch(run_plan(simplify(window_of(*arrays, (0,))), arrays, place(), setting=setting), arrays)
    found = cupy.asnumpy(result)
    assert np.array_equal(found[37 : 32 + source.size], source[5:])
    assert (found[:37] == 7).all()
    assert (found[32 + source.size :] == 7).all()
