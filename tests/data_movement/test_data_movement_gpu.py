"""The data movement operations on a GPU: the table of calls, other libraries, streams, graphs, threads and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from movement_cases import CASES, Case, check, check_ragged, numbers, on_host, ragged_arrays
from this_gpu import cupy
from threads import in_threads

import cudatma as c
from cudatma.arrays import ArrayInfo, describe
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.copy import window_of
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.plans import run_plan, window_plan
from cudatma.kernels.data_movement.ragged_copy import RaggedCopy, ragged_copy
from cudatma.kernels.data_movement.ring import BOXES, CTAS_PER_SM, Setting
from cudatma.kernels.data_movement.window import carried, cropped, simplify
from cudatma.kernels.gpu import gpu_of
from cudatma.kernels.replay import Replay
from cudatma.library_streams import current_stream
from cudatma.target import detect

pytestmark = pytest.mark.gpu


def upload(array: np.ndarray[Any, Any]) -> Any:
    import cupy

    return cupy.asarray(array)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_gives_what_numpy_gives(case: Case) -> None:
    import cupy

    if not detect().has(case.needs):
        pytest.skip(f"this card has no {case.needs}")
    check(case, cupy)


def test_reductions_of_two_streams_add_up() -> None:
    import cupy

    into, one = cupy.zeros((2048, 2048), cupy.int32), cupy.ones((2048, 2048), cupy.int32)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(10):
        for stream in streams:
            c.reduce_into(into, one, "add", stream=stream)
    for stream in streams:
        stream.synchronize()
    assert (on_host(into) == 20).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(300 * 528, device="cuda", dtype=torch.float32).reshape(300, 528)
    assert torch.equal(c.copy(source), source)
    part = c.copy(source, offset=(1, 8), shape=(200, 500))
    assert torch.equal(part, source[1:201, 8:508])
    assert torch.equal(c.transpose(source.bfloat16()), source.bfloat16().T)
    assert torch.equal(
        c.gather(source, [(0, 8), (3, 16)], (2, 8)), torch.stack([source[0:2, 8:16], source[3:5, 16:24]])
    )
    into = torch.ones_like(source)
    assert torch.equal(c.reduce_into(into, source, "add"), source + 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        result = c.transpose(source)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(result, source.T)


def test_calls_in_a_graph() -> None:
    """After a first call, which loads the kernels, a graph records only launches, each with its own addresses."""
    import cupy

    sources = [upload(numbers((256, 1040), np.float32, seed)) for seed in range(5)]
    moved = [cupy.zeros((256, 1024), cupy.float32) for _ in sources]
    turned = [cupy.zeros((1024, 256), cupy.float32) for _ in sources]
    sums = cupy.zeros((256, 1024), cupy.float32)

    def chain(source: Any, between: Any, out: Any) -> None:
        c.copy(source, out=between, offset=(0, 8), shape=(256, 1024))
        c.transpose(between, out=out)
        c.reduce_into(sums, between, "add")

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        chain(sources[0], moved[0], turned[0])
        sums.fill(0)
        stream.synchronize()
        stream.begin_capture()
        for arrays in zip(sources, moved, turned, strict=True):
            chain(*arrays)
        graph = stream.end_capture()
        for source in sources:
            source += 1
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    expected = [numbers((256, 1040), np.float32, seed)[:, 8:1032] + 1 for seed in range(5)]
    assert all((on_host(out) == one.T).all() for out, one in zip(turned, expected, strict=True))
    assert (on_host(sums) == 3 * sum(expected)).all()


def test_repeated_calls_of_many_threads() -> None:
    import cupy

    device = cupy.cuda.runtime.getDevice()
    c.copy(upload(numbers((128, 528), np.float32)), offset=(3, 4), shape=(100, 512))

    def work(thread: int) -> None:
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            hosts = [numbers((128, 528), np.float32, 100 * thread + turn) for turn in range(30)]
            arrays = [upload(host) for host in hosts]
            results = [c.copy(array, offset=(3, 4), shape=(100, 512)) for array in arrays]
            stream.synchronize()
            for host, result in zip(hosts, results, strict=True):
                assert (on_host(result) == host[3:103, 4:516]).all()

    in_threads(6, work)


def test_repeated_calls_on_two_cards() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two cards")
    for seed in range(2):
        for ordinal in range(2):
            with cupy.cuda.Device(ordinal):
                host = numbers((128, 528), np.float32, 2 * seed + ordinal)
                x, out = upload(host), cupy.zeros((100, 512), cupy.float32)
                cupy.cuda.get_current_stream().synchronize()
            # Whichever card is current.
            c.copy(x, out=out, offset=(3, 4), shape=(100, 512))
            with cupy.cuda.Device(ordinal):
                cupy.cuda.Device(ordinal).synchronize()
                assert (on_host(out) == host[3:103, 4:516]).all()


def test_prefetch_changes_nothing() -> None:
    source = numbers((3000, 1040), np.float32)
    device = upload(source)
    c.prefetch(device)
    c.prefetch(device, offset=(3, 4), shape=(2000, 800))
    c.prefetch(device[:, :1000])
    assert (on_host(device) == source).all()


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


SETTINGS = [
    BOXES,
    Setting(),
    Setting(24064, 1, 8, 3, "evict_first", ""),
    Setting(48128, 2, 2, 1, "", "evict_first"),
    Setting(256, 4, 6, 5, "evict_first", "evict_first"),
]


def limits() -> LaunchLimits:
    return LaunchLimits(detect(), CTAS_PER_SM * gpu_of(0).sm_count)


def launch(planned: Arguments, arrays: tuple[ArrayInfo, ArrayInfo]) -> None:
    names, addresses = ("src", "out"), tuple(info.pointer for info in arrays)
    replay = Replay(planned, planned.kernel(detect()), 0, names, dict(zip(names, addresses, strict=True)))
    replay.run(planned.sizes, addresses, current_stream("cupy", 0))


@pytest.mark.parametrize("widest", [1, 4, 8])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_window_arrives_and_nothing_around_it(setting: Setting, widest: int) -> None:
    """The window has zeros around it, the source ends inside a chunk, and the columns next to the result do not
    change."""
    import cupy

    rows, columns = 1501, 4110
    source = np.random.default_rng(0).integers(1, 255, (rows, 5008)).astype(np.uint8)
    body = columns // widest * widest
    result = cupy.full((rows + 9, 4224), 7, cupy.uint8)
    part = cupy.asarray(source)[:, 16 : 16 + body]
    arrays = describe(part), describe(result[:, 16 : 16 + 4128])
    window = carried(cropped(simplify(window_of(*arrays, (-4, -16)))), widest)
    assert window.itemsize == widest
    launch(window_plan(window, arrays, limits(), setting=setting), arrays)
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
    launch(run_plan(simplify(window_of(*arrays, (0,))), arrays, limits(), setting=setting), arrays)
    found = cupy.asnumpy(result)
    assert np.array_equal(found[37 : 32 + source.size], source[5:])
    assert (found[:37] == 7).all()
    assert (found[32 + source.size :] == 7).all()
