"""Arguments, parameters and shapes of a launch: against struct.pack and the layout of cuda.h. No GPU."""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.arrays import ArrayInfo
from cudatma.build.nvrtc import compile_source
from cudatma.errors import ArgumentError, CompileError, LaunchError
from cudatma.runtime import launch_args
from cudatma.runtime.launch import Kernel
from cudatma.runtime.launch_args import Parameter, entries, marshal
from cudatma.runtime.launch_config import FunctionLimits, dim3, make_config
from cudatma.target import get_target

HOPPER, CONSUMER = get_target("sm_90a"), get_target("sm_120a")
I8, I16, I32, I64 = (Parameter("p", "int", n) for n in (1, 2, 4, 8))
F32, F64 = Parameter("p", "float", 4), Parameter("p", "float", 8)
B2, B16, MAP = Parameter("p", "bytes", 2), Parameter("p", "bytes", 16), Parameter("p", "bytes", 128)

#: One parameter of each kind, and what it is to the launcher; the widths are those of the C++ types on x86-64 Linux.
SOURCE = """
struct Pair { int a; double b; };
struct __align__(2) Half { unsigned short bits; };
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void empty() {}
extern "C" __global__ void many(const float* in, void** out, bool flag, signed char c, short s, unsigned short us,
                                int i, unsigned u, long long ll, float f, double d, Half h, Pair pair,
                                const __grid_constant__ Map map, char* __restrict__ last) {
    if (flag) last[0] = c + s + us + i + u + ll + f + d + h.bits + pair.b + map.opaque[1] + in[0];
}
template <class T> __global__ void mangled(T* x) { *x = 1; }
template __global__ void mangled<int>(int*);
"""
MANY = (
    *(("int", 8), ("int", 8), ("int", 1), ("int", 1), ("int", 2), ("int", 2), ("int", 4), ("int", 4), ("int", 8)),
    *(("float", 4), ("float", 8), ("bytes", 2), ("bytes", 16), ("bytes", 128), ("int", 8)),
)


def bytes_of(parameter: Parameter, value: Any) -> bytes:
    return bytes(marshal([parameter], [value]).values[0])


# --- the signature


@pytest.mark.parametrize("target", [HOPPER, CONSUMER])
def test_parameters_are_read_from_nvrtcs_ptx(target: Any) -> None:
    found = entries(compile_source(SOURCE, target).ptx)
    assert set(found) == {"empty", "many", "_Z7mangledIiEvPT_"}
    assert found["empty"] == ()
    assert tuple((p.kind, p.size_bytes) for p in found["many"]) == MANY
    assert found["_Z7mangledIiEvPT_"] == (Parameter("_Z7mangledIiEvPT__param_0", "int", 8),)


def test_every_spelling_of_a_parameter() -> None:
    ptx = """
    // .visible .entry commented(.param .u32 a)
    .weak .entry first (
        .param .u64 .ptr .align 1 a,
        .param .u64 .ptr .global .align 16 b, // .param .u32 no
        .param .s32 c, .param .b16 d, .param .f16 e,
        .param .align 4 .b8 f[12],
        .param .b32 g[4]
    )
    .maxntid 32
    { ret; }
    .entry second
    { ret; }
    """
    found = entries(ptx)
    assert list(found) == ["first", "second"]
    kinds = [("int", 8), ("int", 8), ("int", 4), ("int", 2), ("float", 2), ("bytes", 12), ("bytes", 16)]
    assert [(p.kind, p.size_bytes) for p in found["first"]] == kinds
    assert found["second"] == ()


def test_an_unreadable_parameter_is_an_error() -> None:
    with pytest.raises(CompileError, match=r"\.texref"):
        entries(".visible .entry k(.param .texref t)")


def test_a_kernel_knows_its_parameters_without_a_gpu(tmp_path: Path) -> None:
    made = compile_source(SOURCE, HOPPER)
    kernel = Kernel(made.cubin, "many", HOPPER, ptx=made.ptx, log=made.log, folder=tmp_path)
    assert tuple((p.kind, p.size_bytes) for p in kernel.parameters) == MANY
    assert kernel.warnings == made.warnings
    with pytest.raises(ArgumentError, match="empty"):
        Kernel(made.cubin, "other", HOPPER, ptx=made.ptx)


# --- values


@given(st.integers(-(2**31), 2**32 - 1))
def test_ints_are_as_wide_as_their_parameter(value: int) -> None:
    assert bytes_of(I32, value) == struct.pack("<i" if value < 0 else "<I", value)
    assert bytes_of(I64, value) == struct.pack("<q", value)


@pytest.mark.parametrize("parameter", [I8, I16, I32, I64])
def test_the_range_of_ints(parameter: Parameter) -> None:
    bits = 8 * parameter.size_bytes
    for value in (-(1 << (bits - 1)), (1 << bits) - 1):
        assert int.from_bytes(bytes_of(parameter, value), "little") == value % (1 << bits)
    for value in (-(1 << (bits - 1)) - 1, 1 << bits):
        with pytest.raises(LaunchError, match=r"args\[0\]"):
            marshal([parameter], [value])


@given(st.floats(width=32))
def test_floats(value: float) -> None:
    assert bytes_of(F32, value) == struct.pack("<f", value)
    assert bytes_of(F64, value) == struct.pack("<d", value)


@given(st.floats())
def test_a_float_that_float32_cannot_hold(value: float) -> None:
    try:
        expected = struct.pack("<f", value)
    except OverflowError:
        with pytest.raises(LaunchError, match="float"):
            marshal([F32], [value])
    else:
        # struct rounds what lies within half a unit above the largest float down to it.
        assert bytes_of(F32, value) == expected or value != value


SCALARS = [
    (I8, np.uint8(200)),
    (I8, np.int8(-3)),
    (I8, np.bool_(True)),
    (I8, True),
    (I32, True),
    (I32, np.int32(-5)),
    (I64, np.uint64(2**64 - 1)),
    (F32, np.float32(1.5)),
    (F64, np.float64(1e300)),
    (B2, np.float16(1.5)),
    (B2, ml_dtypes.bfloat16(1.5)),
    (Parameter("p", "bytes", 8), np.complex64(1 + 2j)),
    (Parameter("p", "float", 2), np.float16(2.5)),
]


@pytest.mark.parametrize(("parameter", "value"), SCALARS)
def test_scalars(parameter: Parameter, value: Any) -> None:
    raw = value.tobytes() if isinstance(value, np.generic) else bytes([value])
    assert bytes_of(parameter, value) == raw.ljust(parameter.size_bytes, b"\0")


def test_other_values() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))

    pair = Pair(3, 4.5)
    assert marshal([B16], [pair]).values[0] is pair
    assert bytes_of(B16, bytes(pair)) == struct.pack("<i4xd", 3, 4.5)
    assert bytes_of(B16, bytearray(16)) == bytes(16)
    assert bytes_of(I64, None) == bytes(8)
    assert bytes_of(I32, ctypes.c_int(-1)) == b"\xff" * 4
    assert bytes_of(F32, 3) == struct.pack("<f", 3.0)


class FakeMap:
    def __init__(self, device: int | None = 0, size: int = 128) -> None:
        self.data, self.device = (ctypes.c_ubyte * size)(*[i % 251 for i in range(size)]), device
        self.owner: object = None


def array(device: int | None = 0, kind: str = "cupy", pointer: int = 0x7000) -> ArrayInfo:
    return ArrayInfo(pointer, (4,), (4,), np.dtype("float32"), device, None, kind)


def test_tensor_maps_are_copied() -> None:
    tensor_map = FakeMap(device=3)
    made = marshal([MAP], [tensor_map])
    assert bytes(made.values[0]) == bytes(tensor_map.data)
    assert made.device == 3
    made.values[0][0] = 0x123456789
    assert bytes(made.values[0]) == struct.pack("<Q", 0x123456789) + bytes(tensor_map.data)[8:]
    assert marshal([MAP], [FakeMap(device=None)]).device is None
    assert bytes_of(MAP, bytes(range(128))) == bytes(range(128))


def test_arrays_give_pointer_device_and_library() -> None:
    made = marshal([I64, I64], [array(1), array(1, "torch", 0x8000)])
    assert [value.value for value in made.values] == [0x7000, 0x8000]
    assert (made.device, made.kind) == (1, "torch")
    assert (marshal([I64], [array(0)]).kind, marshal([I32], [1]).device) == ("cupy", None)


def test_a_tensor_map_of_a_torch_tensor_means_torchs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        pass

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    of_torch, of_another = FakeMap(), FakeMap()
    of_torch.owner, of_another.owner = Tensor(), object()
    assert marshal([MAP], [of_torch]).kind == "torch"
    assert marshal([MAP], [of_another]).kind == "cupy"


def test_addresses_point_at_the_values() -> None:
    made = marshal([I32, F64], [7, 2.5])
    first, second = made.addresses()
    assert ctypes.c_uint32.from_address(first).value == 7
    assert ctypes.c_double.from_address(second).value == 2.5
    made.values[0].value = 8
    assert ctypes.c_uint32.from_address(first).value == 8


WRONG = [
    (I32, 1.0),
    (I64, 2.0),
    (F32, True),
    (F32, np.int32(1)),
    (I32, np.float32(1)),
    (I32, np.int64(1)),
    (F64, np.float32(1)),
    (B2, 1.5),
    (B2, 1),
    (B16, 3),
    (B16, bytes(15)),
    (I32, ctypes.c_int64(1)),
    (I32, None),
    (B16, None),
    (I32, array()),
    (F64, array()),
    (B16, array()),
    (MAP, array()),
    (MAP, FakeMap(size=64)),
    (MAP, np.zeros(128, np.uint8)),
    (I64, FakeMap()),
    (I64, array(None)),
    (I64, np.zeros(3)),
    (I64, "text"),
    (I64, [1]),
    (I64, object()),
    (I64, 1j),
]


@pytest.mark.parametrize(("parameter", "value"), WRONG)
def test_wrong_arguments(parameter: Parameter, value: Any) -> None:
    with pytest.raises(LaunchError, match=r"args\[1\]") as caught:
        marshal([I32, parameter], [0, value])
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3)])
def test_a_wrong_count(args: Any) -> None:
    with pytest.raises(LaunchError, match="2 "):
        marshal([I32, F32], args)


@pytest.mark.parametrize("args", ["ab", b"ab", 5, None, {1: 2}, iter(())])
def test_args_are_a_sequence(args: Any) -> None:
    with pytest.raises(LaunchError, match="args"):
        marshal([I32, F32], args)


def test_arrays_of_two_devices() -> None:
    for pair in ([array(0), array(1)], [array(1), FakeMap(0)]):
        with pytest.raises(LaunchError, match=r"args\[1\].*device"):
            marshal([I64, MAP if isinstance(pair[1], FakeMap) else I64], pair)


def test_the_largest_float_is_numpys() -> None:
    assert float(np.finfo(np.float32).max) == launch_args._FLOAT32_MAX


# --- grid, block, cluster


@pytest.mark.parametrize(
    ("value", "expected"), [(5, (5, 1, 1)), ((2, 3), (2, 3, 1)), ([4, 5, 6], (4, 5, 6)), (np.int64(7), (7, 1, 1))]
)
def test_dim3(value: Any, expected: Any) -> None:
    assert dim3(value, "grid") == expected


@pytest.mark.parametrize("value", [0, -1, (1, 0), (), (1, 1, 1, 1), 1.0, "1", None, True, (1, True), (1, 2.0)])
def test_wrong_dim3(value: Any) -> None:
    with pytest.raises(LaunchError, match="grid"):
        dim3(value, "grid")


LIMITS = FunctionLimits(max_threads=256, max_dynamic_shared_bytes=200 * 1024)
WRONG_SHAPES = [
    ("grid.x", {"grid": 2**31}),
    ("grid.y", {"grid": (1, 65536)}),
    ("grid.z", {"grid": (1, 1, 65536)}),
    ("block.x", {"block": 1025}),
    ("block.z", {"block": (1, 1, 65)}),
    ("block", {"block": (33, 32)}),
    ("block", {"block": 257, "limits": LIMITS}),
    ("shared_bytes", {"shared_bytes": -1}),
    ("shared_bytes", {"shared_bytes": 227 * 1024 + 1}),
    ("shared_bytes", {"shared_bytes": 200 * 1024 + 1, "limits": LIMITS}),
    ("shared_bytes", {"shared_bytes": 1.5}),
    ("shared_bytes", {"shared_bytes": True}),
    ("cluster", {"grid": 16, "cluster": 16}),
    ("cluster", {"cluster": 0}),
    ("cluster", {"grid": 2, "cluster": 2, "target": CONSUMER}),
    ("grid.x", {"grid": 3, "cluster": 2}),
    ("grid.y", {"grid": (2, 3), "cluster": (1, 2)}),
    ("shared_bytes", {"shared_bytes": 99 * 1024 + 1, "target": CONSUMER}),
]


@pytest.mark.parametrize(("field", "change"), WRONG_SHAPES)
def test_wrong_shapes(field: str, change: dict[str, Any]) -> None:
    call = {"target": HOPPER, "grid": 1, "block": 1} | change
    with pytest.raises(LaunchError, match=f"^{field}"):
        make_config(call.pop("target"), call.pop("grid"), call.pop("block"), **call)


def test_the_limits_themselves_are_allowed() -> None:
    make_config(HOPPER, (2**31 - 1, 65535, 65535), (16, 1, 64), shared_bytes=227 * 1024)
    make_config(HOPPER, 8, 256, cluster=8, shared_bytes=200 * 1024, limits=LIMITS)
    assert make_config(CONSUMER, 3, 1, cluster=1).cluster is None


def test_the_drivers_structure() -> None:
    """Byte for byte what cuda.h says: 3 + 3 + 1 words, padding, stream, attributes, count; an attribute is 72 bytes."""
    driver = pytest.importorskip("cuda.bindings.driver")
    shaped = make_config(HOPPER, (6, 4, 3), (32, 2), cluster=(2, 2), shared_bytes=5000, programmatic=True)
    config = shaped.for_driver(driver)
    config.hStream = 0xABC0
    raw = ctypes.string_at(config.getPtr(), 56)
    assert struct.unpack_from("<7I4xQ", raw) == (6, 4, 3, 32, 2, 1, 5000, 0xABC0)
    pointer, count = struct.unpack_from("<QI", raw, 40)
    assert count == 2
    attributes = ctypes.string_at(pointer, 144)
    assert struct.unpack_from("<I4x3I", attributes) == (4, 2, 2, 1)
    assert struct.unpack_from("<I4xi", attributes, 72) == (6, 1)
    plain = ctypes.string_at(make_config(HOPPER, 1, 1).for_driver(driver).getPtr(), 56)
    assert struct.unpack_from("<I", plain, 48) == (0,)
