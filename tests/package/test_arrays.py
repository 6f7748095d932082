"""Arrays of any library as ArrayInfo: against NumPy's own answers, and overlap against sets of bytes."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma import arrays
from cudatma.arrays import ArrayInfo, describe, empty_like_library, overlaps, producer_of
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.library_streams import stream_handle


def info(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str = "uint8", device: int = 0) -> Any:
    return ArrayInfo(pointer, shape, strides, np.dtype(dtype), device, None, "cai")


def bytes_of(array: ArrayInfo) -> set[int]:
    """Every byte address, one element at a time."""
    found = set()
    for index in itertools.product(*(range(n) for n in array.shape)):
        start = array.pointer + sum(i * s for i, s in zip(index, array.strides_bytes, strict=True))
        found.update(range(start, start + array.dtype.itemsize))
    return found


arrays_of_bytes = st.integers(0, 3).flatmap(
    lambda rank: st.builds(
        info,
        st.integers(1000, 1100),
        st.tuples(*[st.integers(0, 4)] * rank),
        st.tuples(*[st.sampled_from([-24, -5, -1, 0, 1, 2, 8, 24])] * rank),
        st.sampled_from(["uint8", "uint16"]),
    )
)


@given(arrays_of_bytes)
def test_extent_is_first_and_last_byte(array: ArrayInfo) -> None:
    touched = bytes_of(array)
    low, end = array.extent
    if touched:
        assert (low, end) == (min(touched), max(touched) + 1)
    else:
        assert low == end


@given(arrays_of_bytes, arrays_of_bytes)
def test_overlaps_never_misses_a_shared_byte(a: ArrayInfo, b: ArrayInfo) -> None:
    if bytes_of(a) & bytes_of(b):
        assert overlaps(a, b)
        assert overlaps(b, a)
    elif a.extent[1] <= b.extent[0] or b.extent[1] <= a.extent[0]:
        assert not overlaps(a, b)


@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5), st.integers(2, 4))
def test_column_windows_of_one_buffer(a0: int, an: int, b0: int, bn: int, rows: int) -> None:
    buffer = np.zeros((rows, 10), np.uint16)
    a, b = buffer[:, a0 : a0 + an], buffer[:, b0 : b0 + bn]
    assert overlaps(describe(a), describe(b)) == np.shares_memory(a, b)


def test_overlap_needs_one_device() -> None:
    assert overlaps(info(1000, (8,), (1,)), info(1004, (8,), (1,)))
    assert not overlaps(info(1000, (8,), (1,)), info(1004, (8,), (1,), device=1))


@pytest.mark.parametrize("dtype", ["float16", "int8", "complex64", ml_dtypes.bfloat16])
def test_numpy(dtype: Any) -> None:
    array = np.zeros((3, 4, 5), dtype)[:, ::-2, 1:]
    found = describe(array)
    assert (found.pointer, found.shape, found.strides_bytes) == (array.ctypes.data, array.shape, array.strides)
    assert (found.dtype, found.device, found.kind, found.owner is array) == (array.dtype, None, "numpy", True)
    assert found.is_contiguous == array.flags.c_contiguous
    assert not found.readonly
    assert describe(found) is found


def test_contiguity_is_numpys() -> None:
    base = np.zeros((4, 6, 1), np.float32)
    for view in (base, base[:1, ::2], base[:, :3], base.T, base[:, :, ::-1], base[:0], base[2:3, 1:2]):
        assert describe(view).is_contiguous == view.flags.c_contiguous


def test_which_elements_share_memory() -> None:
    base = np.zeros((4, 10, 3), np.float32)
    for view in (base, base.T, base[::-1, ::3, :1], base[:, :, ::-2], base[:0]):
        assert describe(view).is_disjoint
    for shape, strides in (((4, 10), (4, 4)), ((4, 10), (0, 4)), ((4, 10), (36, 4)), ((3, 2), (-4, -8)), ((5,), (2,))):
        assert not describe(np.lib.stride_tricks.as_strided(base[3, 9:, 2:], shape, strides)).is_disjoint
    assert describe(np.lib.stride_tricks.as_strided(base, (4, 0), (0, 4))).is_disjoint


def test_readonly_numpy() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert describe(array).readonly


def test_cupy_needs_attributes_only() -> None:
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(0x7F0000000000, 4096, None, 1)
    array = cupy.ndarray((4, 8), np.float16, cupy.cuda.MemoryPointer(memory, 256))
    found = describe(array)
    assert (found.pointer, found.shape, found.strides_bytes) == (0x7F0000000100, (4, 8), (16, 2))
    assert (found.device, found.kind, found.dtype) == (1, "cupy", np.float16)


class Producer:
    """A device array that knows nothing but the CUDA array interface."""

    def __init__(self, **fields: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f2",
            "data": (4096, True),
            "version": 3,
            "strides": None,
        } | fields


def test_cuda_array_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "pointer_device", lambda pointer, field: 3)
    dense = describe(Producer())
    assert (dense.pointer, dense.strides_bytes, dense.dtype) == (4096, (6, 2), np.float16)
    assert (dense.device, dense.kind, dense.readonly) == (3, "cai", True)
    assert describe(Producer(strides=(64, 4))).strides_bytes == (64, 4)


def test_cuda_array_interface_names_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "pointer_device", lambda pointer, field: 3)
    for stream in (None, 1, 17):
        assert describe(Producer(stream=stream)).producer == producer_of(Producer(stream=stream)) == stream
    assert producer_of(None) is producer_of(np.zeros(1)) is describe(np.zeros(1)).producer is None
    with pytest.raises(ArgumentError, match="a positive handle"):
        producer_of(Producer(stream=0))


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": object()},
        {"typestr": "no type"},
        {"shape": 3},
        {"data": None},
        {"strides": (2,)},
        {"shape": ("a",)},
    ],
)
def test_broken_cuda_array_interface(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "pointer_device", lambda pointer, field: 0)
    with pytest.raises(ArgumentTypeError, match="weight"):
        describe(Producer(**fields), "weight")


class HostDlpack:
    def __init__(self, array: Any, place: int = 1) -> None:
        self.array, self.place = array, place

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place, 0


def test_dlpack_on_the_host() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:]
    found = describe(HostDlpack(array))
    assert (found.pointer, found.shape, found.strides_bytes) == (array.ctypes.data, (3, 3), (16, 4))
    assert (found.device, found.kind, found.dtype) == (None, "dlpack", np.int32)


def test_dlpack_on_another_device() -> None:
    with pytest.raises(ArgumentTypeError, match="DLPack device type 10"):
        describe(HostDlpack(np.zeros(3), place=10))


@pytest.mark.parametrize("value", [None, [1, 2], 3, "text", b"bytes", memoryview(b"abc")])
def test_no_array(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"x\[2\]"):
        describe(value, "x[2]")
    with pytest.raises(TypeError):
        describe(value)


class FakeTensor:
    """The attributes of torch.Tensor that are read, over a NumPy array."""

    def __init__(self, array: Any, dtype: str, device: str = "cpu", index: int | None = None, **odd: Any) -> None:
        self.array, self.dtype = array, f"torch.{dtype}"
        self.device = types.SimpleNamespace(type=device, index=index)
        self.layout = odd.get("layout", "strided")
        self.shape, self.negated = array.shape, odd.get("negated", False)

    def is_neg(self) -> bool:
        return bool(self.negated)

    def is_conj(self) -> bool:
        return False

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[tuple[Any, ...]] = []
    module = types.SimpleNamespace(
        Tensor=FakeTensor,
        strided="strided",
        bfloat16="torch.bfloat16",
        float16="torch.float16",
        empty=lambda shape, dtype, device: made.append((shape, dtype, device)) or made[-1],
        cuda=types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=100 + device)),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_torch(torch: Any) -> None:
    array = np.zeros((4, 6), ml_dtypes.bfloat16)[:, ::2]
    found = describe(FakeTensor(array, "bfloat16", "cuda", 2))
    assert (found.pointer, found.shape, found.strides_bytes) == (array.ctypes.data, (4, 3), (12, 4))
    assert (found.dtype, found.device, found.kind) == (ml_dtypes.bfloat16, 2, "torch")
    assert describe(FakeTensor(array, "bfloat16")).device is None


@pytest.mark.parametrize(
    "tensor",
    [
        FakeTensor(np.zeros(2, np.uint8), "quint8"),
        FakeTensor(np.zeros(2, np.uint8), "uint8", layout="sparse_coo"),
        FakeTensor(np.zeros(2, np.uint8), "uint8", device="meta"),
        FakeTensor(np.zeros(2, np.float32), "float32", negated=True),
    ],
)
def test_torch_refusals(torch: Any, tensor: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        describe(tensor)


def test_results_of_the_same_library(torch: Any) -> None:
    half = np.zeros(4, np.float16)
    tensor = FakeTensor(half, "float16", "cuda", 1)
    assert empty_like_library(tensor, (2, 3), ml_dtypes.bfloat16) == ((2, 3), "torch.bfloat16", "cuda:1")
    assert empty_like_library(FakeTensor(half, "float16"), [5], "float16") == ((5,), "torch.float16", "cpu")
    with pytest.raises(ArgumentTypeError, match="dtype"):
        empty_like_library(tensor, (2,), "S3")
    made = empty_like_library(half, (2, 3), ml_dtypes.bfloat16)
    assert isinstance(made, np.ndarray)
    assert (made.shape, made.dtype) == ((2, 3), ml_dtypes.bfloat16)


def test_streams(torch: Any) -> None:
    class CudaStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 9

    assert stream_handle(None, "torch", 3) == 103
    assert stream_handle(0, "cupy", 0) == 0
    assert stream_handle(7, "cupy", 0) == 7
    assert stream_handle(types.SimpleNamespace(ptr=5), "cupy", 0) == 5
    assert stream_handle(types.SimpleNamespace(cuda_stream=6), "cupy", 0) == 6
    assert stream_handle(CudaStream(), "cupy", 0) == 9
    for wrong in (True, 1.5, "default", object()):
        with pytest.raises(ArgumentTypeError, match="stream"):
            stream_handle(wrong, "cupy", 0)
    with pytest.raises(ArgumentError, match="stream"):
        stream_handle(-1, "cupy", 0)


def test_driver_stream_object() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert stream_handle(driver.CUstream(0x1234), "cupy", 0) == 0x1234
