"""cuda-python's driver functions on the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import cudatma
from cudatma.errors import ArgumentError, ArgumentTypeError, DriverError, LaunchError

driver: Any = pytest.importorskip("cuda.bindings.driver")

SCALE = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 x, .param .f32 factor, .param .u32 n)
{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .f32 %f<3>;
    .reg .b64 %rd<4>;
    mov.u32 %r1, %tid.x;
    ld.param.u32 %r2, [n];
    setp.ge.u32 %p, %r1, %r2;
    @%p bra DONE;
    ld.param.u64 %rd1, [x];
    ld.param.f32 %f1, [factor];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.f32 %f2, [%rd3];
    mul.f32 %f2, %f2, %f1;
    st.global.f32 [%rd3], %f2;
DONE:
    ret;
}
"""
VALUES = np.arange(40, dtype=np.float32)


def ok(result: tuple[Any, ...]) -> Any:
    assert result[0] == driver.CUresult.CUDA_SUCCESS
    return result[1] if len(result) == 2 else result[1:]


def scale_function() -> Any:
    ok(driver.cuInit(0))
    ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
    return ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(SCALE.encode() + b"\0")), b"scale"))


def as_tuples(address: int) -> Any:
    return (driver.CUdeviceptr(address), 2.0, 40), (None, ctypes.c_float, ctypes.c_uint32)


def as_pointers(address: int) -> Any:
    as_pointers.kept = values = [np.uint64(address).reshape(1), np.full(1, 2, np.float32), np.full(1, 40, np.uint32)]  # type: ignore[attr-defined]
    return np.array([value.ctypes.data for value in values], np.uint64)


@pytest.mark.parametrize("kernel_params", [as_tuples, as_pointers, lambda address: as_pointers(address).ctypes.data])
def test_memory_is_copied_to_the_device_and_back(kernel_params: Any) -> None:
    with cudatma.emulate_launches() as log:
        function, result = scale_function(), np.zeros_like(VALUES)
        memory = ok(driver.cuMemAlloc(VALUES.nbytes))
        ok(driver.cuMemcpyHtoD(memory, VALUES, VALUES.nbytes))
        params = kernel_params(int(memory))
        ok(driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, 0, params, 0))
        ok(driver.cuMemcpyDtoHAsync(result.ctypes.data, memory, VALUES.nbytes, 0))
        ok(driver.cuMemFree(memory))
    assert (result == 2 * VALUES).all()
    launch = log[0].launch
    assert (launch.entry, launch.library, launch.block) == ("scale", "cuda-python", (64, 1, 1))
    assert "test_driver.py" in launch.place


def test_a_host_array_of_the_caller_is_found_by_its_address() -> None:
    x = VALUES.copy()
    with cudatma.emulate_launches() as log:
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = 64
        ok(driver.cuLaunchKernelEx(config, scale_function(), as_tuples(x.ctypes.data), 0))
    assert (x == 2 * VALUES).all()
    assert log[0].launch.names[-1] == "x"


def test_one_thread_too_many_is_named_by_the_array() -> None:
    with cudatma.emulate_launches(hazards="collect") as log:
        memory = ok(driver.cuMemAlloc(39 * 4))
        driver.cuLaunchKernel(scale_function(), 1, 1, 1, 64, 1, 1, 0, 0, as_tuples(int(memory)), 0)
    assert "past the end of an allocation of 156 bytes" in str(log)


def test_a_tensor_map_has_the_bytes_of_the_codec() -> None:
    x = np.zeros((64, 64), np.float16)
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    with cudatma.emulate_launches():
        encoded = ok(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                2,
                x.ctypes.data,
                [u64(64), u64(64)],
                [u64(128)],
                [u32(64), u32(8)],
                [u32(1), u32(1)],
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
    expected = cudatma.TensorMap.from_array(x, box=(8, 64), swizzle="128B", encoder="codec", l2_promotion="none")
    assert b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque) == bytes(expected.data)


@pytest.mark.parametrize(("size", "code"), [(0, "CUDA_ERROR_INVALID_VALUE"), (1 << 45, "CUDA_ERROR_OUT_OF_MEMORY")])
def test_an_impossible_size_is_an_error_code(size: int, code: str) -> None:
    with cudatma.emulate_launches():
        assert driver.cuMemAlloc(size) == (driver.CUresult[code], None)


def test_more_than_48_kib_of_dynamic_shared_memory_need_an_opt_in() -> None:
    name, x = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, VALUES.copy()
    with cudatma.emulate_launches():
        function, args = scale_function(), (0, as_tuples(x.ctypes.data), 0)
        assert ok(driver.cuFuncGetAttribute(name, function)) == 48 << 10
        with pytest.raises(LaunchError, match="at most 49152 bytes without an opt-in"):
            driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 50000, *args)
        ok((*driver.cuFuncSetAttribute(function, name, 50000), None))
        ok((*driver.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 50000, *args), None))
    assert (x == 2 * VALUES).all()


def launch_of_unknown_memory() -> None:
    room = ctypes.create_string_buffer(400)
    driver.cuLaunchKernel(scale_function(), 1, 1, 1, 64, 1, 1, 0, 0, as_tuples(ctypes.addressof(room)), 0)


def copy_past_the_end() -> None:
    driver.cuMemcpyHtoD(ok(driver.cuMemAlloc(8)), VALUES, 12)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (launch_of_unknown_memory, ArgumentError, "launch of scale at .*: args must be .*got 0x"),
        (copy_past_the_end, ArgumentError, "12 bytes at byte 0 of an allocation of 8 bytes"),
        (lambda: driver.cuMemFree(12), ArgumentError, "has not been freed"),
        (lambda: driver.cuModuleLoadData(b"\x7fELF" + bytes(60)), ArgumentTypeError, "must be PTX.*got a cubin"),
        (lambda: driver.cuMemAlloc(1.5), ArgumentError, "cuMemAlloc: bytesize must be a nonnegative integer, got 1.5"),
        (
            lambda: driver.cuMemcpyHtoD(ok(driver.cuMemAlloc(8)), 0, 4),
            ArgumentError,
            "srcHost must be a buffer.*got 0x0",
        ),
        (
            lambda: driver.cuMemcpyHtoD(ok(driver.cuMemAlloc(8)), VALUES, -4),
            ArgumentError,
            "ByteCount must be .*got -4",
        ),
        (
            lambda: driver.cuLaunchKernel(scale_function(), 1),
            ArgumentTypeError,
            "must be called with 11 arguments, got 2 arguments",
        ),
        (lambda: driver.cuModuleLoad(b"no.ptx"), ArgumentError, "path must be a readable PTX file, got no.ptx"),
        (lambda: driver.cuGraphCreate(0), DriverError, "cuGraphCreate failed: the emulator does not support this"),
    ],
)
def test_mistakes_are_named(call: Any, error: type[Exception], text: str) -> None:
    with cudatma.emulate_launches(), pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "results"),
    [
        (lambda: driver.cuModuleGetFunction(driver.CUmodule(5), b"scale"), 1),
        (lambda: driver.cuModuleGetGlobal(driver.CUmodule(5), b"counter"), 2),
        (lambda: driver.cuModuleUnload(driver.CUmodule(5)), 0),
        (lambda: driver.cuFuncGetName(driver.CUfunction(5)), 1),
        (lambda: driver.cuLaunchKernel(driver.CUfunction(5), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0), 0),
        (lambda: driver.cuEventElapsedTime(ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))), 1),
    ],
)
def test_an_unknown_handle_is_an_error_code(call: Any, results: int) -> None:
    with cudatma.emulate_launches():
        assert call() == (driver.CUresult.CUDA_ERROR_INVALID_HANDLE, *[None] * results)


COUNT = """
.version 8.0
.target sm_90a
.address_size 64
.visible .global .u32 counter = 5;
.visible .entry count()
{
    .reg .b32 %r<2>;
    ld.global.u32 %r1, [counter];
    add.u32 %r1, %r1, 1;
    st.global.u32 [counter], %r1;
    ret;
}
"""


def test_each_loaded_module_has_its_own_variables() -> None:
    values, first = [], np.array([7], np.uint32)
    for _ in range(2):
        with cudatma.emulate_launches():
            modules = [ok(driver.cuModuleLoadData(COUNT.encode())) for _ in range(2)]
            address, size = ok(driver.cuModuleGetGlobal(modules[1], b"counter"))
            ok(driver.cuMemcpyHtoD(address, first, size))
            for module in modules:
                function = ok(driver.cuModuleGetFunction(module, b"count"))
                for _ in range(2):
                    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
                result = np.zeros(1, np.uint32)
                ok(driver.cuMemcpyDtoH(result, ok(driver.cuModuleGetGlobal(module, b"counter"))[0], size))
                values.append(int(result[0]))
            ok(driver.cuModuleUnload(modules[1]))
            with pytest.raises(ArgumentError, match="dstDevice"):
                driver.cuMemcpyHtoD(address, first, size)
    assert values == [7, 9] * 2


def test_attributes_are_those_of_the_target() -> None:
    names = driver.CUdevice_attribute
    with cudatma.emulate_launches(target="sm_120a"):
        threads = driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 0)
        assert ok(threads) == 1536


def test_the_functions_are_restored() -> None:
    before, was_emulated = driver.cuInit, cudatma.selected_backend("auto")
    runtime = cudatma.context.runtime()
    with cudatma.emulate_launches(target="sm_90a"):
        assert driver.cuInit is not before
        assert cudatma.selected_backend("auto") == was_emulated
        assert cudatma.context.runtime() is not runtime
        assert cudatma.context.device(0).compute_capability == (9, 0)
    assert driver.cuInit is before
    assert 0 not in cudatma.context._devices or was_emulated == "cuda"
    assert cudatma.context.runtime() is runtime
