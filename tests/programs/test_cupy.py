"""CuPy's RawKernel and RawModule on the emulator, without a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.errors import ArgumentError, CompileError, LaunchError

cupy: Any = pytest.importorskip("cupy")

ADD = """
#include <cuda_fp16.h>
template <typename T> __global__ void add(T* x, T value, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] + value;
}
extern "C" __global__ void scale(float* x, float factor, long long n) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < n) x[threadIdx.x] = SIGN * tile[threadIdx.x] * factor;
}
"""
OPTIONS = ("-std=c++17", "-DSIGN=-1")
NAMES = ["add<float>", "add<__half>"]
#: A kernel that exists before the emulator takes over.
EARLY = cupy.RawKernel(ADD, "scale", OPTIONS)


def test_kernels_of_a_module_are_named_as_in_the_source() -> None:
    x, y = np.zeros(100, np.float32), np.zeros(64, np.float16)
    with cudatma.emulate_launches() as log:
        module = cupy.RawModule(code=ADD, options=OPTIONS, name_expressions=NAMES)
        module.get_function("add<float>")((2,), (64,), (x, np.float32(2), 100))
        module.get_function("add<__half>")((1,), (64,), (y, np.float16(3), np.int32(64)))
    assert (x == 2).all()
    assert (y == 3).all()
    assert [(entry.launch.library, entry.launch.grid) for entry in log] == [("cupy", (2, 1, 1)), ("cupy", (1, 1, 1))]


@pytest.mark.usefixtures("all_objects")
def test_a_kernel_in_a_variable_of_a_module_launches_on_the_emulator() -> None:
    before, x = EARLY, np.arange(32, dtype=np.float32)
    with cudatma.emulate_launches():
        EARLY((1,), (32,), (x, np.float32(2), 30), shared_mem=128)
        EARLY((1,), (32,), (x.ctypes.data, np.float32(2), 30), shared_mem=128)
    assert (x == np.where(np.arange(32) < 30, 4, 1) * np.arange(32)).all()
    assert EARLY is before


def test_kernels_in_dicts_lists_attributes_and_closures_launch_on_the_emulator() -> None:
    kernels = [cupy.RawKernel(ADD, "scale", OPTIONS) for _ in range(4)]
    by_name, holder, x = {"scale": kernels[0]}, SimpleNamespace(kernel=kernels[1]), np.ones(32, np.float32)

    def bound(kernel: Any) -> Any:
        return lambda: kernel((1,), (32,), (x, np.float32(2), 32), shared_mem=128)

    call, before = bound(kernels[2]), list(map(id, kernels))
    with cudatma.emulate_launches() as log:
        for kernel in (by_name["scale"], holder.kernel, kernels[3]):
            bound(kernel)()
        call()
    assert (len(log), x[0]) == (4, 16)
    assert [id(by_name["scale"]), id(holder.kernel), *map(id, kernels[2:])] == before


def test_an_array_of_structs_is_passed_by_value() -> None:
    source = 'struct S { float a; int b; }; extern "C" __global__ void f(float* x, S s) { x[0] = s.a + s.b; }'
    pair = np.array((1.5, 7), [("a", "f4"), ("b", "i4")])
    x = np.zeros(1, np.float32)
    with cudatma.emulate_launches():
        cupy.RawKernel(source, "f")((1,), (1,), (x, pair))
    assert x[0] == 8.5


def test_more_than_48_kib_of_dynamic_shared_memory_need_an_opt_in() -> None:
    x = np.ones(32, np.float32)
    with cudatma.emulate_launches() as log:
        module = cupy.RawModule(code=ADD, options=OPTIONS)
        with pytest.raises(LaunchError, match=r"must be at most 49152 bytes without an opt-in.*got 65536 bytes"):
            module.get_function("scale")((1,), (32,), (x, np.float32(2), 32), shared_mem=65536)
        module.get_function("scale").max_dynamic_shared_size_bytes = 65536
        module.get_function("scale")((1,), (32,), (x, np.float32(2), 32), shared_mem=65536)
    assert (len(log), x[0]) == (1, -2)


def test_a_torch_tensor_is_an_array() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(32)
    with cudatma.emulate_launches():
        kernel = cupy.RawKernel(ADD, "scale", OPTIONS)
        kernel((1,), (32,), (x, np.float32(2), 32), shared_mem=128)
        holder = SimpleNamespace(x=torch.ones(32))
        kernel((1,), (32,), (holder.x.data_ptr(), np.float32(3), 32), shared_mem=128)
    assert (x == -2).all()
    assert (holder.x == -3).all()


def test_ptx_of_a_file_runs(tmp_path: Path) -> None:
    kernel = cudatma.compile('extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1; }', target="sm_90a")
    (tmp_path / "one.ptx").write_text(kernel.ptx)
    x = np.zeros(32, np.float32)
    with cudatma.emulate_launches():
        cupy.RawModule(path=str(tmp_path / "one.ptx")).get_function("one")((1,), (32,), (x,))
    assert (x == 1).all()


@pytest.mark.usefixtures("all_objects")
def test_mistakes_are_named() -> None:
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (
            lambda x: EARLY((1,), (32,), (x, 2.0, 32)),
            ArgumentError,
            r"launch of scale at .*test_cupy.py:.*: args\[1\] must be .*got 2.0.*numpy.float32",
        ),
        (lambda x: EARLY((1,), (32,), (x, np.float32(2), np.int32(32))), ArgumentError, "must be a value of 8 bytes"),
        (lambda x: EARLY((1,), (32,), (x, 2, 32)), ArgumentError, r"must be a float of 4 bytes.*got 2 \(int\)"),
        (lambda x: EARLY((1,), (32,), (x, np.float64(2), 32)), ArgumentError, "must be a float of 4 bytes"),
        (lambda x: EARLY((1,), (32,), (x,)), ArgumentError, "args must be a tuple of 3 values.*got 1 value"),
        (
            lambda x: cupy.RawKernel("void", "f")((1,), (1,), ()),
            CompileError,
            "NVRTC cannot compile raw_kernel.cu for sm_90a",
        ),
        (lambda x: cupy.RawKernel(ADD, "add", OPTIONS)((1,), (1,), ()), ArgumentError, "name_expressions"),
        (
            lambda x: EARLY(1.5, (32,), (x, np.float32(2), 32)),
            LaunchError,
            "launch of scale at .*: grid must be .*got 1.5",
        ),
        (lambda x: EARLY((1,), (32,), x), ArgumentError, "args must be a tuple of 3 values.*got ndarray"),
        (
            lambda x: cupy.RawModule(path="no.ptx").compile(),
            ArgumentError,
            "path must be a readable PTX file, got no.ptx",
        ),
        (
            lambda x: cupy.zeros(3),
            LaunchError,
            "cupy must be used only for RawKernel and RawModule with NumPy.*got a CuPy array",
        ),
    ]
    with cudatma.emulate_launches():
        for call, error, text in mistakes:
            with pytest.raises(error, match=text):
                call(np.ones(32, np.float32))


def test_an_error_of_cupy_says_what_works() -> None:
    with (
        pytest.raises(Exception, match="Without a GPU, CuPy can launch only the kernels of"),
        cudatma.emulate_launches(),
    ):
        cupy.cuda.runtime.getDevice()


def test_a_module_that_is_imported_in_the_block_gets_the_original_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text("from cupy import RawKernel, asarray as as_array\n")
    monkeypatch.syspath_prepend(tmp_path)
    with cudatma.emulate_launches():
        late: Any = importlib.import_module("late_module")
        assert late.RawKernel is cupy.RawKernel
    monkeypatch.delitem(sys.modules, "late_module")
    assert (late.RawKernel, late.as_array) == (cupy.RawKernel, cupy.asarray)


def test_sarif_of_a_kernel_without_a_file_names_the_call() -> None:
    code = 'extern "C" __global__ void count(int* p) {\n*p += 1;\n}'
    with cudatma.emulate_launches(hazards="collect") as log:
        cupy.RawKernel(code, "count")((2,), (32,), (np.zeros(1, np.int32),))
    result = json.loads(log[0].report.to_sarif())["runs"][0]["results"][0]
    for place in (*result["locations"], *result["relatedLocations"]):
        assert place["physicalLocation"]["artifactLocation"]["uri"].endswith("test_cupy.py")
    assert "raw_kernel.cu:2" in result["message"]["text"]
