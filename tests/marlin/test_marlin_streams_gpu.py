"""marlin_gemm and the operations over arrays among streams, threads and graphs: nobody writes to what somebody else
still reads. Needs CuPy; torch where a test says so."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from marlin_operands import (
    Options,
    Weight,
    activations,
    bits,
    compare,
    differences,
    make_weight,
    partials_bytes,
    to_float64,
)
from this_gpu import TARGET, cupy
from threads import in_threads

import cudatma as c
from cudatma import marlin_gemm, workspace_bytes
from cudatma.build import kernel as build

pytestmark = pytest.mark.gpu

#: Tiles that several CTAs share: they leave partial sums.
K, N, M = 8192, 10240, 256
ROUNDS = 40
GATE = """
extern "C" __global__ void gate(volatile int* open) { while (*open == 0) {} }
"""


@lru_cache(maxsize=1)
def divided() -> Weight:
    """Its GEMM of M rows goes through the workspace, which the tests below depend on."""
    weight = make_weight(K, N)
    marlin_gemm(activations((M, K), "float16"), weight.packed)
    if TARGET.name == "sm_90a" and cupy.cuda.Device().attributes["MultiProcessorCount"] == 132:
        assert partials_bytes(weight.packed, M) > 0
    return weight


@lru_cache(maxsize=1)
def ordered() -> Weight:
    """Its activations are copied to the workspace first."""
    return make_weight(4096, 1024, Options(act_order=True))


def synchronized() -> None:
    cupy.cuda.Device().synchronize()


def new_streams(count: int) -> list[Any]:
    synchronized()
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


def as_torch(array: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_dlpack(array.view(np.int16)).view(torch.float16)


def as_cupy(tensor: Any) -> Any:
    import torch

    return cupy.from_dlpack(tensor.view(torch.int16)).view(np.float16)


class Inputs:
    """Several activations of one weight, and the bits of their results."""

    def __init__(self, weight: Weight, m: int, count: int) -> None:
        k = weight.packed.shape[0]
        self.weight = weight
        self.xs = [activations((m, k), "float16", seed) for seed in range(count)]
        self.wanted = [marlin_gemm(x, weight.packed) for x in self.xs]
        for x, out in zip(self.xs[:1], self.wanted, strict=False):
            assert not compare(out, to_float64(x) @ weight.dense).problem("float16")
        assert int(differences(*self.wanted[:2])) > 0
        self.outs = [cupy.empty_like(out) for out in self.wanted]
        self.wrong = [cupy.zeros((), np.int64) for _ in self.xs]
        synchronized()

    def gemm(self, i: int, **options: Any) -> None:
        marlin_gemm(self.xs[i], self.weight.packed, out=self.outs[i], **options)

    def count(self, i: int) -> None:
        """Add up what is wrong with a result, and poison it, on CuPy's current stream."""
        self.wrong[i] += differences(self.outs[i], self.wanted[i])
        bits(self.outs[i]).fill(0xFFFF)

    def check(self) -> None:
        synchronized()
        assert [int(wrong) for wrong in self.wrong] == [0] * len(self.wrong)


@contextmanager
def closed_gate(stream: Any) -> Iterator[Callable[[], None]]:
    """What is queued on the stream from here on waits until the function that this gives is called."""
    opened = cupy.cuda.alloc_pinned_memory(4)
    flag = np.frombuffer(opened, np.int32, 1)
    flag[0] = 0
    gate = build.compile(GATE)
    gate.load()
    synchronized()
    gate.launch(1, 1, (ctypes.c_uint64(opened.ptr),), stream=stream)

    def open_it() -> None:
        flag[0] = 1

    try:
        yield open_it
    finally:
        flag[0] = 1
        synchronized()


def branches() -> int:
    """How many branches of graphs have a workspace, once those of dropped graphs are gone: the driver tells their end
    in a thread of its own."""
    gc.collect()
    synchronized()
    found = -1
    while found != (found := len(workspace_bytes().graphs)):
        time.sleep(0.2)
    return found


# ---- Graphs ----


@pytest.mark.parametrize(("weight", "m"), [(divided, M), (divided, 1), (ordered, 16), (ordered, 300)])
def test_torchs_recipe_for_a_capture(weight: Callable[[], Weight], m: int) -> None:
    """Three calls on a stream of one's own, then torch.cuda.graph, which captures on another one."""
    torch = pytest.importorskip("torch")
    inputs = Inputs(weight(), m, 3)
    x, packed = as_torch(cupy.empty_like(inputs.xs[0])), inputs.weight.packed
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            marlin_gemm(x, packed)
    torch.cuda.current_stream().wait_stream(side)
    before = branches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = marlin_gemm(x, packed)
        second = marlin_gemm(x, packed)
    divides = not (weight is divided and m == 1)  # of one row no tile is divided
    assert len(workspace_bytes().graphs) == before + divides
    for given, wanted in zip(inputs.xs, inputs.wanted, strict=True):
        x.copy_(as_torch(given))
        first.fill_(0)
        second.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        for out in (first, second):
            assert int(differences(as_cupy(out), wanted)) == 0


def test_make_graphed_callables() -> None:
    """Several captures one after another, without a call between them."""
    torch = pytest.importorskip("torch")
    weights = [divided(), make_weight(N, K)]
    x = as_torch(activations((M, K), "float16"))
    wanted = marlin_gemm(marlin_gemm(x, weights[0].packed), weights[1].packed)
    synchronized()

    def layer(weight: Weight) -> Callable[[Any], Any]:
        return lambda given: marlin_gemm(given, weight.packed)

    samples = ((torch.zeros_like(x),), (torch.zeros((M, N), dtype=x.dtype, device=x.device),))
    graphed = torch.cuda.make_graphed_callables(tuple(map(layer, weights)), samples)
    for _ in range(10):
        out = graphed[1](graphed[0](x))
        torch.cuda.synchronize()
        assert int(differences(as_cupy(out), as_cupy(wanted))) == 0


@pytest.mark.parametrize(("weight", "m"), [(divided, M), (ordered, 16)])
def test_graphs_replayed_at_the_same_time(weight: Callable[[], Weight], m: int) -> None:
    """All captured on one stream that no call was made on, replayed on several at once."""
    inputs = Inputs(weight(), m, 4)
    (capturing,) = new_streams(1)
    streams, graphs = new_streams(4), []
    for i in range(4):
        with capturing:
            capturing.begin_capture()
            inputs.gemm(i)
            graphs.append(capturing.end_capture())
    for _ in range(ROUNDS):
        for i, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
            with stream:
                graph.launch(stream)
                inputs.count(i)
    inputs.check()


@pytest.mark.parametrize(("weight", "m"), [(divided, M), (ordered, 16)])
def test_branches_of_a_graph(weight: Callable[[], Weight], m: int) -> None:
    inputs = Inputs(weight(), m, 3)
    main, *others = new_streams(3)
    begun, *ended = (cupy.cuda.Event(disable_timing=True) for _ in range(3))
    main.begin_capture()
    begun.record(main)
    for i, stream in enumerate((main, *others)):
        if stream is not main:
            stream.wait_event(begun)
        inputs.gemm(i, stream=stream)
        inputs.gemm(i, stream=stream)
    for stream, event in zip(others, ended, strict=True):
        event.record(stream)
        main.wait_event(event)
    graph = main.end_capture()
    with main:
        for _ in range(ROUNDS):
            graph.launch(main)
            for i in range(3):
                inputs.count(i)
    inputs.check()


def test_a_call_during_a_capture_shares_nothing_with_the_graph() -> None:
    """The graph runs on one stream while calls go on on the stream that it was captured on."""
    inputs = Inputs(divided(), M, 2)
    captured, other = new_streams(2)
    with captured:
        inputs.gemm(1)
        captured.begin_capture()
        inputs.gemm(0)
        graph = captured.end_capture()
    synchronized()
    for _ in range(ROUNDS):
        with other:
            graph.launch(other)
            inputs.count(0)
        with captured:
            inputs.gemm(1)
            inputs.count(1)
    inputs.check()


# ---- Threads, and streams that come and go ----


@pytest.mark.parametrize(("weight", "m"), [(divided, M), (ordered, 16)])
def test_per_thread_default_streams(weight: Callable[[], Weight], m: int) -> None:
    inputs = Inputs(weight(), m, 4)

    def work(i: int) -> None:
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds:
            for _ in range(ROUNDS):
                inputs.gemm(i)
                inputs.count(i)
            cupy.cuda.Stream.ptds.synchronize()

    in_threads(4, work)
    inputs.check()


# ---- Results and producers ----


@pytest.fixture
def source() -> Any:
    return activations((4096, 4096), "float16", 3)


def operations(source: Any) -> dict[str, Callable[..., Any]]:
    """Each makes a result as large as ``source``, on a stream."""
    weight = make_weight(4096, 4096)
    return {
        "gemm": lambda stream: marlin_gemm(source, weight.packed, stream=stream),
        "dequantize": lambda stream: c.dequantize(weight.packed, stream=stream),
        "copy": lambda stream: c.copy(source, stream=stream),
        "transpose": lambda stream: c.transpose(source, stream=stream),
    }


@pytest.mark.parametrize(
    ("name", "library"),
    [
        *((name, "cupy") for name in ("gemm", "dequantize", "copy", "transpose")),
        *((name, "torch") for name in ("gemm", "copy", "transpose")),
    ],
)
def test_a_result_is_not_memory_that_another_stream_still_reads(name: str, library: str, source: Any) -> None:
    """A copy of an array is queued, and the array is given back. A result made on another stream must not take its
    place before the copy has read it."""
    given = as_torch(source) if library == "torch" else source
    call = operations(given)[name]
    current, mine = new_streams(2)
    kept = cupy.empty_like(source)
    for _ in range(2):  # compiled and planned, and there is memory on the stream of the launch
        call(mine)
        mine.synchronize()
    if library == "torch":
        torch = pytest.importorskip("torch")
        working: Any = torch.cuda.stream(torch.cuda.ExternalStream(current.ptr))
    else:
        working = current
    with working:
        read = given.clone() if library == "torch" else given.copy()
        synchronized()
        target = as_torch(kept) if library == "torch" else kept
        with closed_gate(current) as open_it:
            if library == "torch":
                target.copy_(read)
            else:
                target[...] = read
            del read  # the next allocation on this stream gets this memory
            out = call(mine)
            mine.synchronize()
            open_it()
            current.synchronize()
    assert int(differences(kept, source)) == 0
    del out


class Foreign:
    """An array of a library that names its stream."""

    def __init__(self, array: Any, stream: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = dict(array.__cuda_array_interface__) | {"stream": stream.ptr}


@pytest.mark.parametrize("name", ["gemm", "copy", "transpose", "tile_copy", "kernel"])
def test_a_launch_on_a_named_stream_waits_for_a_producer(name: str, source: Any) -> None:
    weight = make_weight(4096, 4096)
    x, out = cupy.zeros_like(source), cupy.empty_like(source)
    add = build.compile('extern "C" __global__ void add(unsigned short* x) { x[threadIdx.x] += 1; }')
    producer, mine = new_streams(2)
    calls: dict[str, Callable[[Any], object]] = {
        "gemm": lambda given: marlin_gemm(given, weight.packed, out=out, stream=mine),
        "copy": lambda given: c.copy(given, out=out, stream=mine),
        "transpose": lambda given: c.transpose(given, out=out, stream=mine),
        "tile_copy": lambda given: c.tile_copy(given, out, stream=mine),
        "kernel": lambda given: add.launch(1, 1, (given,), stream=mine),
    }
    wanted = {
        "gemm": lambda: marlin_gemm(source, weight.packed),
        "copy": lambda: source,
        "transpose": lambda: cupy.ascontiguousarray(source.T),
        "tile_copy": lambda: source,
    }
    for _ in range(2):
        calls[name](Foreign(bits(x) if name == "kernel" else x, mine))
    synchronized()
    bits(x).fill(0)
    with closed_gate(producer) as open_it:
        with producer:
            bits(x)[...] = bits(source)
        calls[name](Foreign(bits(x) if name == "kernel" else x, producer))
        time.sleep(0.05)
        done_early = mine.done
        open_it()
        mine.synchronize()
    assert not done_early
    if name == "kernel":
        changed = bits(source).copy()
        changed[0, 0] += 1
        assert bool((bits(x) == changed).all())
    else:
        assert int(differences(out, wanted[name]())) == 0
