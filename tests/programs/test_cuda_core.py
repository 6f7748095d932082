"""Programs that use cuda.core on the emulator, without a GPU, and the examples of CuPy and cuda.core."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.errors import ArgumentError, ArgumentTypeError, LaunchError

core: Any = pytest.importorskip("cuda.core")
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

CODE = """
#include <cuda/std/cstdint>
template <typename T> __global__ void add(T* x, const T* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}
extern "C" __global__ void ranks(unsigned* x) {
    unsigned rank, blocks;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    x[blockIdx.x] = FACTOR * blocks + rank;
}
"""


def kernel_of(name: str) -> Any:
    options = core.ProgramOptions(std="c++17", arch=f"sm_{core.Device().arch}", define_macro=("FACTOR", "10"))
    return core.Program(CODE, "c++", options).compile("cubin", name_expressions=("add<float>",)).get_kernel(name)


def test_buffers_arrays_and_addresses_are_arguments() -> None:
    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    with cudatma.emulate_launches() as log:
        device = core.Device()
        device.set_current()
        stream, config = device.create_stream(), core.LaunchConfig(grid=2, block=64)
        pinned = core.LegacyPinnedMemoryResource().allocate(x.nbytes, stream=stream)
        np.from_dlpack(pinned).view(np.float32)[:] = x
        memory = device.allocate(x.nbytes, stream=stream)
        memory.copy_from(pinned, stream=stream)
        kernel = kernel_of("add<float>")
        core.launch(stream, config, kernel, memory, y, 100)
        core.launch(stream, config, kernel, int(memory.handle), y.ctypes.data, np.int32(50))
        memory.copy_to(pinned, stream=stream)
        stream.sync()
        result = np.from_dlpack(pinned).view(np.float32).copy()
        for buffer in (memory, pinned):
            buffer.close(stream)
    assert (result == x + np.where(np.arange(100) < 50, 2, 1)).all()
    assert [entry.launch.library for entry in log] == ["cuda.core"] * 2
    assert log[1].launch.names[-1] == "y"


def test_the_grid_of_a_cluster_launch_counts_clusters() -> None:
    x = np.zeros(6, np.uint32)
    with cudatma.emulate_launches() as log:
        core.launch(core.Device().default_stream, core.LaunchConfig(grid=3, cluster=2, block=1), kernel_of("ranks"), x)
    assert x.tolist() == [20, 21] * 3
    assert log[0].launch.grid == (6, 1, 1)


def test_ptx_is_loaded() -> None:
    x = np.zeros(32, np.float32)
    ptx = cudatma.compile('extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1; }', target="sm_90a").ptx
    with cudatma.emulate_launches():
        kernel = core.ObjectCode.from_ptx(ptx.encode()).get_kernel("one")
        core.launch(core.Device().default_stream, core.LaunchConfig(grid=1, block=32), kernel, x)
    assert (x == 1).all()


def test_memory_is_freed_with_its_buffer() -> None:
    with cudatma.emulate_launches(hazards="collect") as log:
        device, config = core.Device(), core.LaunchConfig(grid=1, block=1)
        view = np.from_dlpack(device.allocate(64))
        view[:] = 7  # the array keeps its memory
        device.allocate(64)
        gc.collect()
        core.launch(device.default_stream, config, kernel_of("ranks"), np.zeros(1, np.uint32))
        buffer = device.allocate(64)
        buffer.fill(b"ab")
        core.launch(device.default_stream, config, kernel_of("ranks"), buffer)
    assert [sum("64 bytes" in name for name in entry.launch.names) for entry in log] == [1, 2]
    assert bytes(view) == b"\7" * 64
    assert bytes(np.from_dlpack(buffer))[4:] == b"ab" * 30


def launch_float_for_int() -> None:
    core.launch(None, core.LaunchConfig(grid=1, block=1), kernel_of("add<float>"), np.ones(1), np.ones(1), 1.0)


def launch_too_few() -> None:
    core.launch(None, core.LaunchConfig(grid=1, block=1), kernel_of("ranks"))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (launch_float_for_int, ArgumentError, "a 4-byte integer"),
        (
            launch_too_few,
            LaunchError,
            "launch of ranks at .*test_cuda_core.py:.*kernel_args must be a sequence of 1 argument, got 0 arguments",
        ),
        (lambda: core.ObjectCode.from_cubin(b"\x7fELF"), ArgumentTypeError, "must be PTX.*got a cubin"),
        (lambda: kernel_of("sum"), ArgumentError, "name must be .*got sum"),
        (lambda: core.Device().allocate(10).fill(b"abc"), ArgumentError, "value must be 1, 2 or 4.*got 3 bytes"),
        (lambda: core.Device().allocate(-1), ArgumentError, "size must be a nonnegative integer.*got -1"),
        (lambda: core.Device(1), ArgumentError, r"0 \(the emulator has one device\)"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], text: str) -> None:
    with cudatma.emulate_launches(), pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("example", "library", "kind", "line"),
    [
        ("cupy_kernel", "cupy", "data_race", "tile[threadIdx.x] = x[i];"),
        ("cuda_core_program", "cuda.core", "missing_proxy_fence", "cvta_generic_to_global(y"),
    ],
)
def test_the_mistake_of_an_example_is_found(
    example: str,
    library: str,
    kind: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(library)
    main = importlib.import_module(example).main
    monkeypatch.setattr(sys, "argv", [example])
    assert main() == 0
    printed = capsys.readouterr().out
    assert "no hazards in 2 schedules" in printed
    assert printed.endswith("wrong elements: 0\n")
    monkeypatch.setattr(sys, "argv", [example, "--broken"])
    assert main() == 1
    printed = capsys.readouterr().out
    assert f"\n{kind}: " in printed
    assert line in printed
