"""1000 arrays of random shapes in one launch on a GPU, again and again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudatma.errors import DriverError, TargetError
from cudatma.kernels.data_movement.ragged_copy import RaggedCopy, ragged_copy
from cudatma.target import detect

pytestmark = pytest.mark.gpu

try:
    detect()
except (DriverError, TargetError, ImportError) as reason:
    pytest.skip(f"no usable GPU: {reason}", allow_module_level=True)

cupy = pytest.importorskip("cupy")


def arrays(count: int, dtype: str, seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    rng = np.random.default_rng(seed)
    unit = 16 // np.dtype(dtype).itemsize
    sources, destinations, buffers = [], [], []
    for _ in range(count):
        rows, columns = int(rng.integers(0, 700)), unit * int(rng.integers(1, 64))
        gap = unit * int(rng.integers(0, 3))
        sources.append(cupy.asarray(rng.integers(0, 100, (rows, columns)).astype(dtype)))
        buffers.append(cupy.full((rows, columns + gap), 77, dtype))
        destinations.append(buffers[-1][:, :columns])
    return sources, destinations, buffers


def check(sources: list[Any], destinations: list[Any], buffers: list[Any]) -> None:
    for source, destination, buffer in zip(sources, destinations, buffers, strict=True):
        assert bool((destination == source).all())
        assert bool((buffer[:, source.shape[1] :] == 77).all())


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_a_thousand_arrays_two_hundred_times(dtype: str) -> None:
    sources, destinations, buffers = arrays(1000, dtype, 1)
    copy = RaggedCopy(sources, destinations)
    for turn in range(200):
        for buffer in buffers[turn % 7 :: 7]:
            buffer.fill(77)
        copy.run()
        if turn % 50 == 49:
            check(sources, destinations, buffers)


def test_in_a_graph_and_as_a_function() -> None:
    sources, destinations, buffers = arrays(50, "float16", 2)
    copy = RaggedCopy(sources, destinations)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that fills the arrays
    with stream:
        stream.begin_capture()
        copy.run()
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    check(sources, destinations, buffers)
    for buffer in buffers:
        buffer.fill(77)
    ragged_copy(sources, destinations)
    check(sources, destinations, buffers)
