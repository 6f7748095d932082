"""marlin_gemm with the formats other than int4: every kernel on the emulator against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from marlin_builders import mma_sync, skinny, wgmma
from marlin_runner import TOLERANCE, run_marlin

import cudatma
from cudatma.dtypes import activation_type
from cudatma.errors import ArgumentError
from cudatma.kernels.gpu import H200
from cudatma.kernels.marlin.choose import choose_untuned
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.quantization import pack, quantize
from cudatma.quantization.weight_format import WEIGHT_FORMATS

#: Each format with each of its kinds of scales, and a type that alternates.
CASES = [
    ("mxfp4", 32, "bfloat16"),
    ("mxfp4", 32, "float16"),
    ("nvfp4", 16, "bfloat16"),
    ("nvfp4", 16, "float16"),
    ("fp8", 128, "bfloat16"),
    ("fp8", -1, "float16"),
    ("int8", 32, "float16"),
    ("int8", -1, "bfloat16"),
]
#: A tile of each kernel, with a half row of 32 columns in the skinny kernel.
KERNELS = {
    "skinny": skinny(tile_m=8, tile_n=96, tile_k=256, stages=2, slice_k=2),
    "wgmma": wgmma(tile_m=24, tile_n=128, tile_k=128, warpgroups=1, stages=3),
    "mma_sync": mma_sync(tile_m=16, tile_n=64, tile_k=128, warps_n=2, stages=3),
}


def config_of(name: str, weight_format: str, group_size: int, dtype: str) -> MarlinConfig:
    fields: dict[str, Any] = {"format": weight_format, "group_size": group_size, "dtype": dtype}
    if name == "mma_sync":
        exact = WEIGHT_FORMATS[weight_format].has_exact_products
        fields["scale_on"] = "epilogue" if group_size == -1 else "weight" if exact else "accumulator"
    return replace(KERNELS[name], **fields)


def combinations() -> Iterator[Any]:
    """Yield every kernel with every case. A quick run tests each format with one kernel."""
    kernels = [(name, "sm_90a") for name in KERNELS] + [("skinny", "sm_120a")]
    for index, case in enumerate(CASES):
        for number, kernel in enumerate(kernels):
            is_quick = (index, number) in ((0, 0), (2, 2), (5, 1), (7, 3))
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(*kernel, *case, marks=marks)


@pytest.mark.parametrize(("kernel", "target", "weight_format", "group_size", "dtype"), list(combinations()))
def test_results(kernel: str, target: str, weight_format: str, group_size: int, dtype: str) -> None:
    """K and N end inside a block, and the ring wraps."""
    m, k, n = 13, 584, 88
    random = np.random.default_rng(k)
    w = quantize(
        random.standard_normal((k, n)).astype(np.float32), format=weight_format, group_size=group_size, dtype=dtype
    )
    x = random.standard_normal((m, k)).astype(activation_type(dtype).numpy)
    bias = random.standard_normal(n).astype(x.dtype)
    config = config_of(kernel, weight_format, group_size, dtype)
    out, report = run_marlin(x, w, target=target, processors=2, config=config, bias=bias)
    assert report.is_clean
    expected = x.astype(np.float64) @ w.dequantize() + bias.astype(np.float64)
    assert np.linalg.norm(out.astype(np.float64) - expected) < TOLERANCE[dtype] * np.linalg.norm(expected)


@pytest.mark.parametrize(("kernel", "target", "weight_format", "group_size", "dtype"), list(combinations()))
def test_every_code_is_exact(kernel: str, target: str, weight_format: str, group_size: int, dtype: str) -> None:
    """A row of the identity selects a row of the weight, whose values are rounded once."""
    kind = WEIGHT_FORMATS[weight_format]
    k, n = 256, 64
    codes = np.resize(np.arange(2**kind.bits), (n, k)).T.astype(np.uint8)
    if weight_format == "fp8":
        codes[(codes & 127) == 127] = 0
    groups = 1 if group_size == -1 else k // group_size
    scales = 2.0 ** (np.arange(groups * n).reshape(groups, n) % 13 - 9)
    scales = scales if weight_format == "mxfp4" else scales * 1.25
    numpy_type = activation_type(dtype).numpy
    w = pack(codes, scales.astype(numpy_type), group_size=group_size, format=weight_format)
    x = np.eye(k, dtype=np.float32)[:: k // 16].astype(numpy_type)
    out, _ = run_marlin(x, w, target=target, config=config_of(kernel, weight_format, group_size, dtype), processors=2)
    np.testing.assert_array_equal(out, w.dequantize(dtype=dtype)[:: k // 16])


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("weight_format", "group_size", "dtype"), CASES)
def test_dequantize(weight_format: str, group_size: int, dtype: str) -> None:
    random = np.random.default_rng(0).standard_normal((200, 136)).astype(np.float32)
    w = quantize(random, format=weight_format, group_size=group_size, dtype=dtype)
    dense = cudatma.dequantize(w, backend="emulator")
    np.testing.assert_array_equal(dense.view(np.uint16), w.dequantize(dtype=dtype).view(np.uint16))


@pytest.mark.parametrize(("weight_format", "group_size", "dtype"), CASES)
def test_a_config_exists_for_every_m(weight_format: str, group_size: int, dtype: str) -> None:
    layer = LinearShape(4096, 6144, group_size, False, dtype, weight_format)
    for m in (1, 8, 9, 64, 300, 5000):
        config = choose_untuned(Problem(layer, m), H200)
        assert config.format == weight_format
        assert config.entry.count(weight_format) == 1


def test_invalid_configs() -> None:
    with pytest.raises(ArgumentError, match="group_size"):
        replace(KERNELS["wgmma"], format="mxfp4")
    with pytest.raises(ArgumentError, match="has_zeros"):
        replace(KERNELS["wgmma"], format="fp8", has_zeros=True)
    with pytest.raises(ArgumentError, match="scale_form"):
        replace(KERNELS["wgmma"], format="fp8", scale_form="as_stored")
    with pytest.raises(ArgumentError, match="weight_load_path"):
        replace(KERNELS["mma_sync"], format="fp8", weight_load_path="cp_async")
    with pytest.raises(ArgumentError, match="scale_on"):
        replace(KERNELS["mma_sync"], format="nvfp4", group_size=16, scale_on="accumulator")
