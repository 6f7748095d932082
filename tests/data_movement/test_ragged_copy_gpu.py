"""1000 arrays of random shapes in one launch on a GPU, again and again."""

from __future__ import annotations

import pytest
from movement_cases import check_ragged, ragged_arrays
from this_gpu import cupy

from cudatma.kernels.data_movement.ragged_copy import RaggedCopy, ragged_copy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_a_thousand_arrays_two_hundred_times(dtype: str) -> None:
    sources, destinations, buffers = ragged_arrays(cupy, dtype, count=1000, max_rows=700, max_chunks=64, seed=1)
    copy = RaggedCopy(sources, destinations)
    for turn in range(200):
        for buffer in buffers[turn % 7 :: 7]:
            buffer.fill(77)
        copy.run()
        if turn % 50 == 49:
            check_ragged(sources, destinations, buffers)


def test_in_a_graph_and_as_a_function() -> None:
    sources, destinations, buffers = ragged_arrays(cupy, "float16", count=50, max_rows=700, max_chunks=64, seed=2)
    copy = RaggedCopy(sources, destinations)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that fills the arrays
    with stream:
        stream.begin_capture()
        copy.run()
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    check_ragged(sources, destinations, buffers)
    for buffer in buffers:
        buffer.fill(77)
    ragged_copy(sources, destinations)
    check_ragged(sources, destinations, buffers)
