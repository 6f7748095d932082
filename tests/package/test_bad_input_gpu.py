"""Wrong calls with real arrays: each is answered by its typed error, writes nothing, and leaves the context usable.

A GEMM of the same shapes has run before, so that the repeated call's short way is refused as well as the first call's.
tests/package/test_bad_input.py has the table of what needs no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from this_gpu import cupy

import cudatma as c
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    CudaTmaError,
    DescriptorError,
    DriverError,
    FieldError,
    LaunchError,
    QuantizationError,
)

pytestmark = pytest.mark.gpu

M, K, N = 5, 256, 128
BF16 = np.dtype(ml_dtypes.bfloat16)
#: A quiet NaN of fp16 that no sum gives.
POISON = 0x7E5A


class Interface:
    """An array as ``__cuda_array_interface__`` shows it, right but for ``changes`` (None leaves a part out)."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.array = array
        right = {"shape": array.shape, "typestr": "<f2", "data": (array.data.ptr, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = right | changes


@dataclass
class Bench:
    """Weights on device 0, and the outputs that were handed out, which must stay as they are."""

    weight: c.PackedWeight
    bf16_weight: c.PackedWeight
    host_weight: c.PackedWeight
    poisoned: list[Any] = field(default_factory=list)

    def x(self, *shape: int, dtype: Any = np.float16) -> Any:
        """Ones, (M, K) unless a shape is named."""
        return as_type(cupy.ones(shape or (M, K), cupy.float32), dtype)

    def poison(self, *shape: int, offset: int = 0) -> Any:
        """A poisoned fp16 array, (M, N) unless a shape is named, ``offset`` elements after an aligned address."""
        shape = shape or (M, N)
        size = int(np.prod(shape))
        whole = cupy.full(size + offset, POISON, cupy.uint16)
        self.poisoned.append(whole)
        return whole[offset:].view(cupy.float16).reshape(shape)

    def gemm(self, **changes: Any) -> Any:
        call = {"x": self.x(), "w": self.weight, "out": self.poison()}
        return c.marlin_gemm(**(call | changes))

    def torch(self, *shape: int, dtype: str = "float16", device: str = "cuda") -> Any:
        torch = pytest.importorskip("torch")
        return torch.ones(shape or (M, K), dtype=getattr(torch, dtype), device=device)

    def nothing_was_written(self) -> bool:
        return all(bool((whole == POISON).all()) for whole in self.poisoned)


def as_type(array: Any, dtype: Any) -> Any:
    if np.dtype(dtype) != BF16:
        return array.astype(dtype)
    return (array.astype(cupy.float32).view(cupy.uint32) >> 16).astype(cupy.uint16).view(BF16)


def expect_right(weight: c.PackedWeight, x: Any, out: Any) -> None:
    """out = x W to fp16's accuracy, against float64."""
    wanted = cupy.asnumpy(x).astype(np.float64) @ weight.dequantize()
    error = np.linalg.norm(cupy.asnumpy(out).astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 1e-3


@pytest.fixture(scope="module")
def weights() -> tuple[c.PackedWeight, ...]:
    dense = np.random.default_rng(1).standard_normal((K, N), np.float32)
    host = c.quantize(dense, group_size=64)
    return host.to_device(0), c.quantize(dense, group_size=64, dtype="bfloat16").to_device(0), host


@pytest.fixture
def bench(weights: tuple[c.PackedWeight, ...]) -> Iterator[Bench]:
    """A right call before the test, and after it: the same shapes, other values."""
    made = Bench(*weights)
    a_right_call(made, seed=2)
    yield made
    a_right_call(made, seed=3)


def a_right_call(bench: Bench, seed: int) -> None:
    x = cupy.asarray(np.random.default_rng(seed).standard_normal((M, K)).astype(np.float16))
    out = cupy.empty((M, N), cupy.float16)
    assert c.marlin_gemm(x, bench.weight, out=out) is out
    expect_right(bench.host_weight, x, out)


@dataclass(frozen=True)
class Case:
    """A wrong call and its answer: the error's class, its field, and what else its message says."""

    name: str
    error: type[CudaTmaError]
    field: str
    says: str
    call: Callable[[Bench], object]


def buffer(elements: int) -> Any:
    return cupy.zeros(elements, cupy.float16)


def over_x(b: Bench) -> Any:
    shared = buffer(M * K)
    return b.gemm(x=shared.reshape(M, K), out=shared[: M * N].reshape(M, N))


def over_bias(b: Bench) -> Any:
    shared = b.poison(M, N)
    return b.gemm(out=shared, bias=shared[2])


def with_nan_scales(b: Bench) -> Any:
    scales = b.weight.scales.copy()
    scales[1, 0] = cupy.nan
    return replace(b.weight, scales=scales)


def with_nan(dense: Any) -> Any:
    dense[3, 4] = cupy.nan
    return dense


# One row a line, wrapped by hand: the table is read by columns.
# fmt: off
CASES = [
    # shapes
    Case("K too small", ArgumentError, "x.shape", "(..., 256)", lambda b: b.gemm(x=b.x(M, K - 16))),
    Case("x of no dimension", ArgumentError, "x.shape", "()", lambda b: b.gemm(x=cupy.zeros((), cupy.float16))),
    Case("x a flat array", ArgumentError, "x.shape", "(1280,)", lambda b: b.gemm(x=b.x(M * K))),
    Case("out a row short", ArgumentError, "out.shape", "(5, 128)", lambda b: b.gemm(out=b.poison(M - 1, N))),
    Case("out of no dimension", ArgumentError, "out.shape", "()", lambda b: b.gemm(out=b.poison(1).reshape(()))),
    Case("bias too long", ArgumentError, "bias.shape", "(128,)", lambda b: b.gemm(bias=b.x(N + 1))),
    # dtypes
    Case("x float32", ArgumentTypeError, "x.dtype", "float32", lambda b: b.gemm(x=b.x(dtype=np.float32))),
    Case("x bf16, weight fp16", ArgumentTypeError, "x.dtype", "bfloat16", lambda b: b.gemm(x=b.x(dtype=BF16))),
    Case("x fp16, weight bf16", ArgumentTypeError, "x.dtype", "must be bfloat16", lambda b: b.gemm(w=b.bf16_weight)),
    Case("out float32", ArgumentTypeError, "out.dtype", "float32",
         lambda b: b.gemm(out=b.poison(M, 2 * N).view(cupy.float32))),
    Case("bias float32", ArgumentTypeError, "bias.dtype", "float32", lambda b: b.gemm(bias=b.x(N, dtype=np.float32))),
    # devices
    Case("x on the host", ArgumentError, "x.device", "the host", lambda b: b.gemm(x=np.ones((M, K), np.float16))),
    Case("weight on the host", ArgumentError, "x.device", "w.to_device()", lambda b: b.gemm(w=b.host_weight)),
    Case("both on the host", ArgumentError, "x.device", "a CUDA device",
         lambda b: b.gemm(x=np.ones((M, K), np.float16), w=b.host_weight, out=None, backend="cuda")),
    Case("out on the host", ArgumentError, "out.device", "device 0",
         lambda b: b.gemm(out=np.zeros((M, N), np.float16))),
    Case("bias on the host", ArgumentError, "bias.device", "device 0",
         lambda b: b.gemm(bias=np.zeros(N, np.float16))),
    Case("device arrays for the reference", ArgumentError, "x.device", "reference",
         lambda b: b.gemm(backend="reference")),
    # strides
    Case("x transposed", ArgumentError, "x.strides", "last dimension", lambda b: b.gemm(x=b.x(K, M).T)),
    Case("x backwards", ArgumentError, "x.strides", "must be nonnegative", lambda b: b.gemm(x=b.x()[::-1])),
    Case("x's columns backwards", ArgumentError, "x.strides", "last dimension", lambda b: b.gemm(x=b.x()[:, ::-1])),
    Case("every second column", ArgumentError, "x.strides", "last dimension",
         lambda b: b.gemm(x=b.x(M, 2 * K)[:, ::2])),
    Case("x without one pitch", ArgumentError, "x.strides", "one pitch",
         lambda b: b.gemm(x=b.x(2, 5, K)[:, :3], out=b.poison(2, 3, N))),
    Case("out transposed", ArgumentError, "out.strides", "last dimension", lambda b: b.gemm(out=b.poison(N, M).T)),
    Case("out backwards", ArgumentError, "out.strides", "must be nonnegative", lambda b: b.gemm(out=b.poison()[::-1])),
    Case("out one row for all", ArgumentError, "out.strides", "overlap",
         lambda b: b.gemm(out=cupy.broadcast_to(b.poison(1, N), (M, N)))),
    Case("bias with gaps", ArgumentError, "bias.strides", "contiguous", lambda b: b.gemm(bias=b.x(2 * N)[::2])),
    # addresses
    Case("x off by half an element", ArgumentError, "x.pointer", "multiple of 2",
         lambda b: b.gemm(x=Interface(x := b.x(), data=(x.data.ptr + 1, False)))),
    Case("out off by an element", ArgumentError, "out.pointer", "multiple of 16",
         lambda b: b.gemm(out=b.poison(M, N, offset=1))),
    Case("out inside x", ArgumentError, "out", "overlaps x", over_x),
    Case("out over bias", ArgumentError, "out", "overlaps bias", over_bias),
    Case("out read-only", ArgumentError, "out", "read-only",
         lambda b: b.gemm(out=Interface(out := b.poison(), data=(out.data.ptr, True)))),
    # what is no array
    Case("x a list", ArgumentTypeError, "x", "list", lambda b: b.gemm(x=[1.0] * K)),
    Case("interface with a mask", ArgumentTypeError, "x", "mask", lambda b: b.gemm(x=Interface(b.x(), mask=b.x()))),
    Case("interface without data", ArgumentTypeError, "x", "invalid", lambda b: b.gemm(x=Interface(b.x(), data=None))),
    Case("interface of another type", ArgumentTypeError, "x.dtype", "float32",
         lambda b: b.gemm(x=Interface(b.x(), typestr="<f4"))),
    Case("interface, big-endian", ArgumentTypeError, "x.dtype", ">f2",
         lambda b: b.gemm(x=Interface(b.x(), typestr=">f2"))),
    Case("interface, negative extent", ArgumentError, "x.shape", "-5",
         lambda b: b.gemm(x=Interface(b.x(), shape=(-M, K)))),
    Case("interface, few strides", ArgumentTypeError, "x", "1 strides",
         lambda b: b.gemm(x=Interface(b.x(), strides=(2,)))),
    Case("interface, odd pitch", ArgumentError, "x.strides", "multiples of the element size",
         lambda b: b.gemm(x=Interface(b.x(), strides=(2 * K - 1, 2)))),
    Case("interface, null", ArgumentError, "x.pointer", "0x0", lambda b: b.gemm(x=Interface(b.x(), data=(0, False)))),
    Case("interface, an address of nobody", ArgumentError, "x", "0x10",
         lambda b: b.gemm(x=Interface(b.x(), data=(16, False)))),
    Case("interface, stream 0", ArgumentError, "x.stream", "at least 1",
         lambda b: b.gemm(x=Interface(b.x(), stream=0))),
    # options
    Case("workspace an array", ArgumentTypeError, "workspace", "ndarray", lambda b: b.gemm(workspace=b.x())),
    Case("stream by name", ArgumentTypeError, "stream", "str", lambda b: b.gemm(stream="default")),
    Case("programmatic a number", ArgumentTypeError, "programmatic", "int", lambda b: b.gemm(programmatic=1)),
    Case("programmatic a list", ArgumentTypeError, "programmatic", "list", lambda b: b.gemm(programmatic=[])),
    # torch
    Case("torch: float32", ArgumentTypeError, "x.dtype", "float32", lambda b: b.gemm(x=b.torch(dtype="float32"))),
    Case("torch: bf16, weight fp16", ArgumentTypeError, "x.dtype", "bfloat16",
         lambda b: b.gemm(x=b.torch(dtype="bfloat16"))),
    Case("torch: on the host", ArgumentError, "x.device", "the host", lambda b: b.gemm(x=b.torch(device="cpu"))),
    Case("torch: no memory", ArgumentTypeError, "x", "meta", lambda b: b.gemm(x=b.torch(device="meta"))),
    Case("torch: sparse", ArgumentTypeError, "x", "sparse", lambda b: b.gemm(x=b.torch().to_sparse())),
    Case("torch: transposed", ArgumentError, "x.strides", "last dimension", lambda b: b.gemm(x=b.torch(K, M).T)),
    Case("torch: out expanded", ArgumentError, "out.strides", "overlap",
         lambda b: b.gemm(x=b.torch(), out=b.torch(1, N).expand(M, N))),
    Case("torch: a batch of another K", ArgumentError, "x.shape", "(2, 5, 255)",
         lambda b: b.gemm(x=b.torch(2, M, K - 1), out=None)),
    # weights, layers, maps, devices
    Case("scales NaN", QuantizationError, "scales[1, 0]", "nan", with_nan_scales),
    Case("scales on the host", QuantizationError, "scales", "numpy",
         lambda b: replace(b.weight, scales=b.host_weight.scales)),
    Case("unknown layout version", QuantizationError, "layout_version", "got 2",
         lambda b: replace(b.weight, layout_version=2)),
    Case("dense weight NaN", QuantizationError, "weight[3, 4]", "nan",
         lambda b: c.quantize(with_nan(b.x(K, N, dtype=np.float32)), group_size=64)),
    Case("layer with a host bias", ArgumentError, "bias", "device 0",
         lambda b: c.MarlinLinear(b.weight, np.zeros(N, np.float16))),
    Case("map off 16 bytes", DescriptorError, "address", "a multiple of 16",
         lambda b: c.TensorMap.from_array(b.x(M, K + 8)[:, 1 : K + 1], (M, 64))),
    Case("map of an odd pitch", DescriptorError, "strides_bytes[0]", "a multiple of 16",
         lambda b: c.TensorMap.from_array(b.x(M, K + 1)[:, :K], (M, 64))),
    Case("workspace on device 99", LaunchError, "device", "99", lambda b: c.Workspace(99)),
    Case("workspace on device -1", LaunchError, "device", "-1", lambda b: c.Workspace(-1)),
    Case("weight to device 99", DriverError, "PackedWeight.to_device", "cudaErrorInvalidDevice",
         lambda b: b.host_weight.to_device(99)),
]
# fmt: on


@pytest.mark.parametrize("wrong", CASES, ids=lambda wrong: wrong.name)
def test_a_wrong_call_is_answered(wrong: Case, bench: Bench) -> None:
    with pytest.raises(wrong.error) as caught:
        wrong.call(bench)
    error, message = caught.value, str(caught.value)
    assert type(error) is wrong.error
    assert isinstance(error, ValueError | TypeError | RuntimeError)
    assert wrong.says in message
    if isinstance(error, FieldError):
        assert error.field == wrong.field
        assert message.startswith(f"{wrong.field} must be ")
        assert error.got is ... or re.search(", (got|found) ", message)
    else:
        assert wrong.field in message
    cupy.cuda.Device(0).synchronize()
    assert bench.nothing_was_written()


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("operand", ["x", "out", "bias", "workspace"])
def test_an_operand_on_another_device(operand: str, bench: Bench) -> None:
    with cupy.cuda.Device(1):
        made = {"x": bench.x(), "out": bench.poison(), "bias": bench.x(N), "workspace": c.Workspace(1)}[operand]
    with pytest.raises(LaunchError if operand == "workspace" else ArgumentError, match="device 1"):
        bench.gemm(**{operand: made})
    assert bench.nothing_was_written()
