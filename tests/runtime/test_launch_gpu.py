"""Launching on a real GPU: arguments of every kind, streams, graphs, clusters, devices, forks. Needs CuPy."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from this_gpu import TARGET, cupy
from threads import in_threads

import cudatma.build.kernel as build
from cudatma import arrays, library_streams
from cudatma.build.nvrtc import compile_source
from cudatma.errors import LaunchError
from cudatma.runtime.launch import Kernel
from cudatma.target import get_target

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

EVERYTHING = """
struct Pair { int a; double b; };
struct __align__(2) Half { unsigned short bits; };
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void everything(const float* in, double* out, bool flag, signed char c, unsigned short us, int i,
                                      unsigned u, long long ll, float f, double d, Half h, Pair pair,
                                      const __grid_constant__ Map map, const float* nothing) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        double values[] = {in[1], double(flag), double(c), double(us), double(i), double(u), double(ll), double(f), d,
                           double(h.bits), double(pair.a), pair.b, double(map.opaque[0]), double(map.opaque[15]),
                           double(nothing == nullptr)};
        for (int n = 0; n < 15; n++) out[n] = values[n];
    }
}
"""
ADD = """
extern "C" __global__ void add(float* x, float amount) { x[blockIdx.x * blockDim.x + threadIdx.x] += amount; }
"""
#: Waits until the host lets it go, so that what is queued after it can be told from what is not.
GATE = """
extern "C" __global__ void gate(volatile int* open) { while (*open == 0) {} }
"""
CLUSTER = """
extern "C" __global__ void shape(int* out) {
    unsigned rank, size, x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(x));
    if (threadIdx.x == 0) out[blockIdx.x] = x * 100 + size * 10 + rank;
}
"""
SHARED = """
extern "C" __global__ void __launch_bounds__(128) fill(int* out, int count) {
    extern __shared__ int memory[];
    __shared__ int fixed[64];
    fixed[threadIdx.x % 64] = 1;
    for (int i = threadIdx.x; i < count; i += blockDim.x) memory[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) *out = memory[count - 1] + fixed[63];
}
"""


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))


class Map:
    """What the launcher asks of a tensor map."""

    def __init__(self, device: int = 0) -> None:
        self.data, self.device = (ctypes.c_uint64 * 16)(*range(100, 116)), device


class OnlyCudaArrayInterface:
    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


class OnlyDlpack:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.fixture(scope="module")
def add() -> Kernel:
    return build.compile(ADD)


def test_every_kind_of_argument() -> None:
    kernel = build.compile(EVERYTHING)
    given, out = cupy.asarray([1.5, 2.5], cupy.float32), cupy.full(15, -1.0)
    half = ml_dtypes.bfloat16(1.0)
    rest = (
        True,
        -3,
        np.uint16(65535),
        -7,
        2**32 - 1,
        np.int64(-(2**40)),
        0.25,
        1e-3,
        half,
        Pair(9, 0.125),
        Map(),
        None,
    )
    expected = [2.5, 1, -3, 65535, -7, 2**32 - 1, -(2**40), 0.25, 1e-3, 0x3F80, 9, 0.125, 100, 115, 1]
    for wrap in (lambda a: a, OnlyCudaArrayInterface, OnlyDlpack):
        out.fill(-1)
        kernel.launch(2, 64, (wrap(given), wrap(out), *rest))
        assert out.get().tolist() == expected


def test_torch_tensors_and_torchs_stream() -> None:
    torch = pytest.importorskip("torch")
    kernel = build.compile(ADD)
    x = torch.zeros(64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert library_streams.current_stream("torch", 0) == stream.cuda_stream
        kernel.launch(2, 32, (x, 1.5))
        kernel.launch(2, 32, (x, 1.5), stream=stream)
    stream.synchronize()
    assert bool((x == 3).all())
    half = torch.zeros(4, 6, device="cuda", dtype=torch.bfloat16)[:, ::2]
    found = arrays.describe(half)
    assert (found.pointer, found.strides_bytes, found.dtype) == (half.data_ptr(), (12, 4), ml_dtypes.bfloat16)
    made = arrays.empty_like_library(half, (2, 3), ml_dtypes.bfloat16)
    assert (made.dtype, made.device, tuple(made.shape)) == (torch.bfloat16, half.device, (2, 3))


def test_describe_agrees_across_protocols() -> None:
    array = cupy.zeros((4, 8), cupy.float16)[:, 1:7:2]
    direct = arrays.describe(array)
    for wrapped in (OnlyCudaArrayInterface(array), OnlyDlpack(array)):
        found = arrays.describe(wrapped)
        assert (found.pointer, found.shape, found.strides_bytes) == (direct.pointer, direct.shape, direct.strides_bytes)
        assert (found.device, found.dtype) == (direct.device, direct.dtype)
    made = arrays.empty_like_library(OnlyDlpack(array), (3,), ml_dtypes.bfloat16)
    assert isinstance(made, cupy.ndarray)
    assert made.dtype == ml_dtypes.bfloat16


def test_a_producers_stream_is_waited_for() -> None:
    """An array whose interface names a busy stream: the launch on another stream must come after that work."""
    gate, adder = build.compile(GATE), build.compile(ADD)
    opened = cupy.cuda.alloc_pinned_memory(4)
    flag = np.frombuffer(opened, np.int32, 1)
    flag[0] = 0
    x = cupy.zeros(32, cupy.float32)
    busy, mine = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    gate.load()
    adder.launch(1, 32, (x, 0.0))  # whatever is loaded late is loaded before the gate closes
    cupy.cuda.Device().synchronize()
    gate.launch(1, 1, (ctypes.c_uint64(opened.ptr),), stream=busy)
    with busy:
        interface = dict(x.__cuda_array_interface__) | {"stream": busy.ptr}
    producer = OnlyCudaArrayInterface(x)
    producer.__cuda_array_interface__ = interface
    with mine:
        adder.launch(1, 32, (producer, 1.0))
    time.sleep(0.05)
    done_early = mine.done
    flag[0] = 1
    mine.synchronize()
    assert not done_early
    assert float(x.sum()) == 32


def test_cupys_current_stream_and_explicit_streams(add: Kernel) -> None:
    x = cupy.zeros(64, cupy.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        add.launch(2, 32, (x, 1.0))
    for explicit in (stream, stream.ptr, 0):
        stream.synchronize()
        add.launch(2, 32, (x, 1.0), stream=explicit)
        cupy.cuda.Device().synchronize()
    assert x.get().tolist() == [4.0] * 64


def test_graph_capture_and_replay(add: Kernel) -> None:
    x = cupy.zeros(64, cupy.float32)
    add.load()
    plan = add.plan(2, 32, (x, 10.0))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        add.launch(2, 32, (x, 1.0))
        plan.launch(stream.ptr)
        graph = stream.end_capture()
        assert float(x.get()[0]) == 0
        for _ in range(5):
            graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [55.0] * 64


def test_an_unloaded_kernel_is_refused_during_capture(add: Kernel) -> None:
    made = compile_source(ADD, TARGET)
    kernel = Kernel(made.cubin, "add", TARGET, ptx=made.ptx)
    add.load()
    x = cupy.zeros(64, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        with pytest.raises(LaunchError, match=r"kernel\.load\(0\)"):
            kernel.launch(2, 32, (x, 1.0))
        # The capture is still whole.
        add.launch(2, 32, (x, 1.0))
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [1.0] * 64


def test_loading_while_another_thread_captures(add: Kernel) -> None:
    x = cupy.zeros(64, cupy.float32)
    add.load()
    made = compile_source(ADD, TARGET)
    other = Kernel(made.cubin, "add", TARGET, ptx=made.ptx)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        add.launch(2, 32, (x, 1.0))
        in_threads(1, lambda _: other.load(0))
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert x.get().tolist() == [1.0] * 64


@pytest.mark.skipif(not TARGET.has("cluster"), reason=f"{TARGET.name} has no clusters")
def test_clusters() -> None:
    kernel = build.compile(CLUSTER)
    out = cupy.full(8, -1, cupy.int32)
    kernel.launch(8, 32, (out,), cluster=4)
    assert out.get().tolist() == [40, 41, 42, 43, 140, 141, 142, 143]
    kernel.launch(8, 32, (out,))
    assert out.get().tolist() == [n * 100 + 10 for n in range(8)]


def test_all_of_the_shared_memory() -> None:
    kernel = build.compile(SHARED)
    found = kernel.resources()
    assert found.static_shared_bytes == 256
    assert found.max_threads == 128
    assert found.local_bytes == 0
    assert 0 < found.registers <= 255
    out = cupy.zeros(1, cupy.int32)
    size = found.max_dynamic_shared_bytes
    assert size > 90 * 1024
    kernel.launch(1, 128, (out, size // 4), shared_bytes=size)
    assert int(out[0]) == size // 4
    with pytest.raises(LaunchError, match="shared_bytes"):
        kernel.launch(1, 128, (out, 1), shared_bytes=size + 1)
    assert kernel.occupancy(128, shared_bytes=size) == 1
    assert kernel.occupancy(128) >= 8


PROGRAMMATIC = """
extern "C" __global__ void first(int* x, int* y) {
    asm volatile("griddepcontrol.launch_dependents;");
    for (int i = 0; i < 1000; i++) __nanosleep(1000);
    y[0] = x[0] + 1;
}
extern "C" __global__ void second(int* x, int* y, long long* clocks) {
    long long before, after;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(before) :: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(after) :: "memory");
    clocks[0] = after - before;
    x[0] = y[0] * 10;
}
"""


def test_programmatic_dependent_launch() -> None:
    """With the attribute the second kernel starts early and waits inside; the values are those of the order."""
    first, second = (build.compile(PROGRAMMATIC, entry=name) for name in ("first", "second"))
    waited = {}
    for programmatic in (False, True):
        x, y, clocks = cupy.full(1, 3, cupy.int32), cupy.zeros(1, cupy.int32), cupy.zeros(1, cupy.int64)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        first.load(), second.load()
        first.launch(1, 1, (x, y), stream=stream)
        second.launch(1, 1, (x, y, clocks), stream=stream, programmatic=programmatic)
        stream.synchronize()
        assert (int(x[0]), int(y[0])) == (40, 4)
        waited[programmatic] = int(clocks[0])
    # It waited for most of the millisecond that the first kernel takes, and not at all without the attribute.
    assert waited[False] < 100_000
    assert waited[True] > 300_000


def test_a_cubin_of_another_gpu_is_refused() -> None:
    name = "sm_120a" if TARGET.compute_capability < (10, 0) else "sm_90a"
    kernel = build.compile(ADD, target=get_target(name))
    with pytest.raises(LaunchError, match=name):
        kernel.launch(1, 32, (cupy.zeros(32, cupy.float32), 1.0))


def test_a_thread_without_a_context(add: Kernel) -> None:
    x = cupy.zeros(64, cupy.float32)
    plan = add.plan(2, 32, (x, 1.0))
    cupy.cuda.Device().synchronize()
    in_threads(1, lambda _: plan.launch(0))
    in_threads(1, lambda _: add.launch(2, 32, (x, 1.0)))
    cupy.cuda.Device().synchronize()
    assert x.get().tolist() == [2.0] * 64


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
def test_two_devices(add: Kernel) -> None:
    found = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            found.append(cupy.zeros(64, cupy.float32))
            cupy.cuda.Device(device).synchronize()
    # Device 0 is current: each array decides where its kernel runs, on that device's current stream.
    for x in found:
        add.launch(2, 32, (x, 1.0))
    assert cupy.cuda.runtime.getDevice() == 0
    plan = add.plan(2, 32, (found[1], 1.0))
    plan.launch(0)
    for device, x in enumerate(found):
        with cupy.cuda.Device(device):
            cupy.cuda.Device(device).synchronize()
            assert x.get().tolist() == [1.0 + device] * 64
    with pytest.raises(LaunchError, match="device"):
        build.compile(EVERYTHING).launch(1, 1, (found[0], found[1], *[0] * 12))


_FORK = """
import os, sys, warnings
import cupy
from cudatma.build import kernel as build
from cudatma.errors import LaunchError
warnings.simplefilter("ignore")
kernel = build.compile(sys.argv[1])
x = cupy.zeros(64, cupy.float32)
kernel.launch(2, 32, (x, 1.0))
plan = kernel.plan(2, 32, (x, 1.0))
cupy.cuda.Device().synchronize()
child = os.fork()
if child == 0:
    good = 0
    for call in (lambda: kernel.launch(2, 32, (x, 1.0)), lambda: plan.launch(0), lambda: kernel.load(0)):
        try:
            call()
        except LaunchError as error:
            good += "spawn" in str(error)
    os._exit(0 if good == 3 else 1)
status = os.waitpid(child, 0)[1]
kernel.launch(2, 32, (x, 1.0))
print(status, float(x.sum()))
"""


def test_fork_is_noticed() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, "-c", _FORK, ADD], env=environment, text=True, timeout=120)
    assert said.split() == ["0", "128.0"]


_SPAWN = """
import multiprocessing, pickle, sys
from cudatma.build import kernel as build

def work(kernel):
    import cupy
    x = cupy.zeros(32, cupy.float32)
    kernel.launch(1, 32, (x, 2.0))
    return float(x.sum())

if __name__ == "__main__":
    kernel = build.compile(sys.argv[1])
    kernel.load()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, (kernel,)))
"""


def test_a_spawned_worker_launches(tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(_SPAWN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, str(script), ADD], env=environment, text=True, timeout=120)
    assert float(said) == 64


def test_an_error_of_the_kernel_is_named() -> None:
    """A trap destroys the context, so it happens in a process of its own."""
    code = (
        "import cupy, sys, time\n"
        "from cudatma.build import kernel as build\n"
        "from cudatma.errors import DriverError\n"
        "bad = build.compile('extern \"C\" __global__ void bad(int* x) { *x = 1; }')\n"
        "bad.launch(1, 1, (8,))\n"
        "time.sleep(0.5)\n"
        "try: bad.launch(1, 1, (8,))\n"
        "except DriverError as error: print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert "cuLaunchKernelEx failed: CUDA_ERROR_" in done.stdout
