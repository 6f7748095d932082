"""Quantization on a GPU: the same integers as on the host, and weights there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudatma.errors import QuantizationError
from cudatma.quantization import PackedWeight, pack, quantize, quantize_linear, unpack

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)


def dense(depth: int = 200, width: int = 150) -> Any:
    return np.random.default_rng(depth).normal(0, 0.02, (depth, width)).astype(np.float32)


def same(on_device: PackedWeight, on_host: PackedWeight) -> None:
    assert on_device.device is not None
    back = on_device.to_host()
    for name in ("qweight", "scales", "zeros", "perm"):
        one, other = getattr(back, name), getattr(on_host, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_quantize_gives_what_the_host_gives(dtype: str, symmetric: bool, group_size: int) -> None:
    cupy = pytest.importorskip("cupy")
    options: dict[str, Any] = {"dtype": dtype, "symmetric": symmetric, "group_size": group_size}
    same(quantize(cupy.asarray(dense()), **options), quantize(dense(), **options))


def test_clip_search_is_as_good_as_on_the_host() -> None:
    cupy = pytest.importorskip("cupy")
    errors = [
        ((quantize(weight, clip_search=True).dequantize() - dense()) ** 2).mean()
        for weight in (dense(), cupy.asarray(dense()))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_a_weight_there_and_back(tmp_path: Path, dtype: Any) -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(1)
    arguments = (rng.integers(0, 16, (100, 72), dtype=np.uint8), rng.uniform(0.01, 0.02, (4, 72)).astype(dtype))
    zeros, perm = rng.integers(0, 17, (4, 72)), rng.permutation(100)
    host = pack(*arguments, zeros, group_size=32, perm=perm)
    device = host.to_device()
    assert device.to_device() is device
    same(device, host)
    same(pack(cupy.asarray(arguments[0]), arguments[1], zeros, group_size=32, perm=perm), host)
    np.testing.assert_array_equal(unpack(device).q.get(), arguments[0])
    np.testing.assert_array_equal(device.dequantize(), host.dequantize())
    device.save(tmp_path / "weight.safetensors")
    np.testing.assert_array_equal(PackedWeight.load(tmp_path / "weight.safetensors").qweight, host.qweight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_torch_tensors(dtype: str, symmetric: bool) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(dense(2100, 4500)).to(getattr(torch, dtype))  # more than one tile
    same(quantize(tensor.cuda(), symmetric=symmetric), quantize(tensor, symmetric=symmetric))
    same(quantize_linear(tensor.cuda().T, symmetric=symmetric), quantize(tensor, symmetric=symmetric))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_quantizing_takes_at_most_twice_the_memory_of_the_weight(dtype: str, group_size: int) -> None:
    cupy = pytest.importorskip("cupy")
    weight = cupy.asarray(dense(4096, 4096).astype(dtype))
    quantize(weight, group_size=group_size)  # loads the kernels of CuPy
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        packed = quantize(weight, group_size=group_size)
        assert packed.nbytes <= pool.total_bytes() <= 2 * weight.nbytes  # a pool gives nothing back: at least the peak


def test_what_is_refused() -> None:
    cupy = pytest.importorskip("cupy")
    weight = cupy.asarray(dense())
    weight[40, 7] = np.nan
    with pytest.raises(QuantizationError, match=r"weight\[40, 7\]"):
        quantize(weight)
    weight[40, 7] = 1e6
    with pytest.raises(QuantizationError, match="group 0, column 7"):
        quantize(weight)
    good = quantize(dense())
    with pytest.raises(QuantizationError, match="scales must be on the device of qweight"):
        PackedWeight(cupy.asarray(good.qweight), good.scales, None, None, good.shape, good.group_size, good.dtype)
    broken = np.full(good.scales.shape, np.nan, np.float16)
    device = good.to_device()
    with pytest.raises(QuantizationError, match=r"scales\[0, 0\]"):
        PackedWeight(device.qweight, cupy.asarray(broken), None, None, good.shape, good.group_size, good.dtype)
