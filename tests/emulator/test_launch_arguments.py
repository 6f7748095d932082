"""Launches: names, arguments of every kind, variables that the host sets, output of kernels."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from ptx_of import module_of

from cudatma.descriptor import TensorMap
from cudatma.emulator import TrapError
from cudatma.emulator.ptx.names import plain_name
from cudatma.errors import ArgumentError, ArgumentTypeError

SOURCE = """
extern "C" __device__ int vprintf(const char*, const void*);

namespace app {
__constant__ float weights[4];
__device__ int calls;
static __device__ short steps[3] = {5, -6, 7};

struct Options { int rows; float scale[3]; double bias; char flag; };

template <int N> __global__ void fill(int* out) { out[threadIdx.x] = N; }
template __global__ void fill<3>(int*);
template __global__ void fill<30>(int*);
__global__ void refill(int* out) { out[threadIdx.x] = -1; }

__global__ void combine(Options options, double* out) {
    out[0] = options.rows + options.scale[2] + options.bias + options.flag + weights[threadIdx.x + 1] + steps[1];
    atomicAdd(&calls, 1);
}
}  // namespace app

extern "C" __global__ void scalars(double* out, float f, double d, int i, unsigned char b, unsigned long long u,
                                   const float* maybe) {
    out[0] = f, out[1] = d, out[2] = i, out[3] = b, out[4] = u, out[5] = maybe == nullptr;
}

extern "C" __global__ void hello(int n) {
    struct { int thread, n; double half; } values{static_cast<int>(threadIdx.x), n, threadIdx.x / 2.0};
    if (threadIdx.x < 2) vprintf("%d of %d: %.1f%%\\n", &values);
}

extern "C" __global__ void copy(const TensorMap* map, int* out) {
    __shared__ __align__(128) int tile[64];
    __shared__ __align__(8) u64 bar;
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&bar), 1);
        fence_mbarrier_init();
        fence_proxy_async_shared_cta();
        mbarrier_arrive_expect_tx(shared_address(&bar), sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), map, shared_address(&bar), 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(shared_address(&bar), 0);
    out[threadIdx.x] = tile[threadIdx.x], out[threadIdx.x + 32] = tile[threadIdx.x + 32];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) ranks(int* out) { out[blockIdx.x] = cluster_ctarank(); }
extern "C" __global__ void __launch_bounds__(64) bounded(int* out) { out[threadIdx.x] = 1; }
"""


class Options(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int),
        ("scale", ctypes.c_float * 3),
        ("bias", ctypes.c_double),
        ("flag", ctypes.c_byte),
    )


def _record() -> Any:
    record = np.zeros((), np.dtype([("rows", "i4"), ("scale", "f4", 3), ("bias", "f8"), ("flag", "i1")], align=True))
    record["rows"], record["scale"][2], record["bias"], record["flag"] = 5, 3.5, 2.25, 7
    return record


STRUCTURE = Options(5, (1, 2, 3.5), 2.25, 7)


@pytest.mark.parametrize("value", [STRUCTURE, _record()[()], bytes(STRUCTURE), bytearray(STRUCTURE), _record()])
def test_a_structure_goes_by_value(value: Any) -> None:
    module, out = module_of(SOURCE), np.zeros(1)
    module.globals["weights"] = np.float32([0, 0.5, 0, 0])
    assert module.launch("combine", 1, 1, (value, out)).is_clean
    assert out[0] == 5 + 3.5 + 2.25 + 7 + 0.5 - 6


def test_variables_are_read_and_written_by_name() -> None:
    module, out = module_of(SOURCE), np.zeros(1)
    assert module.globals["calls"].view(np.int32)[0] == 0
    assert (module.globals["app::steps"].view(np.int16) == [5, -6, 7]).all()
    module.globals["steps"].view(np.int16)[1] = 100
    module.launch("combine", 1, 1, (STRUCTURE, out), schedules=1)
    module.launch("combine", 1, 1, (STRUCTURE, out), schedules=1)
    assert out[0] == 17.75 + 100
    assert module.globals["calls"].view(np.int32)[0] == 2
    assert "weights" in module.globals
    assert "nothing" not in module.globals
    assert any("weights" in name for name in module.globals)
    with pytest.raises(ArgumentError, match=r"weights must be 16 bytes.*got 8 bytes"):
        module.globals["weights"] = np.zeros(2, np.float32)
    with pytest.raises(ArgumentError, match=r"name must be .*weights.*got wights"):
        module.variable("wights")


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 3, -4, 5, 6, None),
        (2.0, 3.0, -4, True, 6, 0),
        (np.float64(2), np.float32(3), np.int64(-4), np.int8(5), np.uint8(6), None),
        (np.int32(2), np.int32(3), np.int8(-4), np.uint64(5), np.int16(6), np.uint64(0)),
        (
            ctypes.c_float(2),
            ctypes.c_double(3),
            ctypes.c_int(-4),
            ctypes.c_ubyte(5),
            ctypes.c_uint64(6),
            ctypes.c_void_p(),
        ),
    ],
)
def test_numbers_take_the_parameter_s_type(numbers: tuple[Any, ...]) -> None:
    out = np.zeros(6)
    assert module_of(SOURCE).launch("scalars", 1, 1, (out, *numbers)).is_clean
    assert out.tolist() == [2, 3, -4, 1 if numbers[3] is True else 5, 6, 1]


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [
        (3, 2.5, ArgumentError),
        (3, np.float32(4), ArgumentError),
        (3, 1 << 40, ArgumentError),
        (4, 300, ArgumentError),
        (3, "4", ArgumentTypeError),
        (1, 1e60, ArgumentError),
    ],
)
def test_numbers_that_do_not_fit_are_refused(place: int, value: Any, error: type[Exception]) -> None:
    arguments: list[Any] = [np.zeros(6), 2.0, 3.0, -4, 5, 6, None]
    arguments[place] = value
    with pytest.raises(error, match=rf"args\[{place}\]"):
        module_of(SOURCE).launch("scalars", 1, 1, arguments)


def test_kernels_go_by_plain_qualified_and_partial_names() -> None:
    module, out = module_of(SOURCE), np.zeros(1, np.int32)
    for name, value in (
        ("refill", -1),
        ("app::refill", -1),
        ("refill(int*)", -1),
        ("fillILi30E", 30),
        ("fillILi3E", 3),
    ):
        module.launch(name, 1, 1, (out,), schedules=1)
        assert out[0] == value
    with pytest.raises(
        ArgumentError, match=r"must be .*fillILi3E.*fillILi30E.*pass a longer part of the name because 2 names match"
    ):
        module.launch("fill", 1, 1, (out,))
    with pytest.raises(ArgumentError, match=r"must be scalars, .*got scalers "):
        module.launch("scalers", 1, 1, (out,))


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_Z3addPf", "add"),
        ("_ZN3app4fillILi3EEEvPi", "app::fill"),
        ("_ZL5table", "table"),
        ("plain_c_name", "plain_c_name"),
        ("_ZN12_GLOBAL__N_14kernEv", "_GLOBAL__N_1::kern"),
        ("_Z", "_Z"),
        ("_Z999x", "x"),
    ],
)
def test_plain_names(symbol: str, name: str) -> None:
    assert plain_name(symbol) == name


def test_what_kernels_print_is_kept() -> None:
    assert module_of(SOURCE).launch("hello", 1, 32, (9,), schedules=1).printed == ["0 of 9: 0.0%\n", "1 of 9: 0.5%\n"]


@pytest.mark.parametrize("as_array", [True, False])
def test_a_tensor_map_in_global_memory(as_array: bool) -> None:
    data, out = np.arange(64, dtype=np.int32).reshape(8, 8), np.zeros(64, np.int32)
    tensor_map = TensorMap.from_array(data, (8, 8), encoder="codec")
    raw = np.zeros(128 + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    place = raw[skip : skip + 128]
    place[:] = np.frombuffer(tensor_map.data, np.uint8)
    first: Any = place if as_array else place.ctypes.data
    assert module_of(SOURCE).launch("copy", 1, 32, (first, out), arrays=(data, place)).is_clean
    assert (out == np.arange(64)).all()


def test_directives_of_the_kernel_hold() -> None:
    module, out = module_of(SOURCE), np.full(64, -1, np.int32)
    module.launch("ranks", 4, 1, (out,))
    assert out[:4].tolist() == [0, 1, 0, 1]
    with pytest.raises(ArgumentError, match="block"):
        module.launch("bounded", 1, 96, (np.zeros(96, np.int32),))


def test_a_trap_names_its_place() -> None:
    source = 'extern "C" __global__ void stop(int n) { if (threadIdx.x == n) __trap(); }'
    with pytest.raises(TrapError, match="trap"):
        module_of(source).launch("stop", 1, 32, (3,))


def test_messages_use_the_caller_s_names() -> None:
    module = module_of('extern "C" __global__ void put(int* to, int** table) { to[4] = 1; table[0][2] = 1; }')
    to, other = np.zeros(4, np.int32), np.zeros(2, np.int32)
    table = np.array([other.ctypes.data], np.uint64)
    names = ("to", "table", "other")
    report = module.launch("put", 1, 1, (to, table), arrays=(other,), names=names, hazards="collect", schedules=1)
    assert "past the end of to (16 bytes)" in str(report.hazards[0])
    with pytest.raises(
        ArgumentError, match=r"names must be a sequence with 2 names for args and 0 for arrays.*got 1 names"
    ):
        module.launch("put", 1, 1, (to, table), names=("to",))
