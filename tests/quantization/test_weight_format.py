"""Weight formats: decoding and rounding against ml_dtypes, storage, shards, experts, and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cudatma
from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import ArgumentTypeError, FieldError, QuantizationError, WeightFileError
from cudatma.quantization import (
    PackedExperts,
    PackedWeight,
    load_weights,
    pack,
    pack_experts,
    quantize,
    quantize_experts,
    save_weights,
    shard,
    unpack,
)
from cudatma.quantization.float_formats import from_mxfp4
from cudatma.quantization.weight_format import WEIGHT_FORMATS

FORMATS = ("mxfp4", "nvfp4", "fp8", "int8")
#: Types of an independent library with the values of codes.
TYPES = {"mxfp4": ml_dtypes.float4_e2m1fn, "nvfp4": ml_dtypes.float4_e2m1fn, "fp8": ml_dtypes.float8_e4m3fn}
K, N = 200, 100


def dense(k: int = K, n: int = N) -> Any:
    return np.random.default_rng(k).standard_normal((k, n)).astype(np.float32) * 0.05


def all_codes(name: str) -> Any:
    """Return codes (K, N) that contain every code of a format except NaN."""
    codes = np.resize(np.arange(2 ** WEIGHT_FORMATS[name].bits), (K, N)).astype(np.uint8)
    return np.where((codes & 127) == 127, 0, codes).astype(np.uint8) if name == "fp8" else codes


@pytest.mark.parametrize("dtype", ACTIVATION_TYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_have_the_values_of_another_library(name: str, dtype: str) -> None:
    kind = WEIGHT_FORMATS[name]
    size, codes = kind.default_group_size, all_codes(name)
    groups = -(-K // size)
    scales = (2.0 ** np.random.default_rng(1).integers(-6, 6, (groups, N))).astype(ACTIVATION_TYPES[dtype].numpy)
    factor = {"tensor_scale": 0.375} if name == "nvfp4" else {}
    w = pack(codes, scales, group_size=size, format=name, **factor)
    values = codes.astype(np.int16) - 128 if name == "int8" else codes.view(TYPES[name])
    expected = values.astype(np.float64) * np.repeat(scales.astype(np.float64), size, axis=0)[:K]
    np.testing.assert_array_equal(w.dequantize(), expected * factor.get("tensor_scale", 1))
    np.testing.assert_array_equal(unpack(w).q, codes)


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_rounding_is_that_of_another_library(name: str) -> None:
    kind, kind_of = WEIGHT_FORMATS[name], TYPES[name]
    finite = kind.values[np.isfinite(kind.values)]
    middles = (finite[1:] + finite[:-1]) / 2
    values = np.concatenate([finite, middles, np.linspace(-kind.largest, kind.largest, 9999, dtype=np.float32)])
    values = values[np.abs(values) <= kind.largest].astype(np.float32)
    codes = kind.nearest(values, np).astype(np.uint8)
    np.testing.assert_array_equal(codes.view(kind_of).astype(np.float32), values.astype(kind_of).astype(np.float32))


@pytest.mark.parametrize(("name", "limit"), [("mxfp4", 0.13), ("nvfp4", 0.1), ("fp8", 0.03), ("int8", 0.007)])
def test_quantization_error(name: str, limit: float) -> None:
    w = quantize(dense(), format=name, dtype="bfloat16")
    error = np.linalg.norm(w.dequantize() - dense()) / np.linalg.norm(dense())
    assert error < limit
    searched = quantize(dense(), format=name, dtype="bfloat16", clip_search=True)
    assert np.linalg.norm(searched.dequantize() - dense()) / np.linalg.norm(dense()) <= error


@pytest.mark.parametrize("name", FORMATS)
def test_zero_and_one_magnitude(name: str) -> None:
    values = np.zeros((64, 64), np.float32)
    values[:, 1], values[:, 2] = 1, -4
    np.testing.assert_allclose(quantize(values, format=name).dequantize(), values, rtol=0.07)


@pytest.mark.parametrize("name", FORMATS)
def test_files_shards_and_experts(name: str, tmp_path: Path) -> None:
    w = quantize(dense(256, 128), format=name, dtype="bfloat16")
    save_weights({"a": w, "b": quantize(dense())}, tmp_path / "w.safetensors")
    again = load_weights(tmp_path / "w.safetensors")
    assert again["b"].format == "int4"
    assert repr(again["a"]) == repr(w)
    np.testing.assert_array_equal(again["a"].dequantize(), w.dequantize())
    for by, axis in (("columns", 1), ("rows", 0)):
        parts = [shard(w, index, 2, by=by).dequantize() for index in range(2)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=axis), w.dequantize())
    odd = [shard(quantize(dense(256, 96), format=name), index, 3, by="columns") for index in range(3)]
    np.testing.assert_array_equal(
        np.concatenate([part.dequantize() for part in odd], axis=1), quantize(dense(256, 96), format=name).dequantize()
    )
    stacked = np.stack([dense(128, 64), 3 * dense(128, 64)])
    experts = quantize_experts(stacked, format=name, gated=True)
    assert experts.format == name
    assert np.linalg.norm(experts.dequantize() - stacked) < 0.13 * np.linalg.norm(stacked)


def test_experts_with_different_tensor_scales(tmp_path: Path) -> None:
    weights = [quantize(dense(128, 64) * factor, format="nvfp4", dtype="float16") for factor in (1, 7, 0.3)]
    for dtype in ("float64", "float16"):
        for packed, weight in zip(pack_experts(weights).dequantize(dtype=dtype), weights, strict=True):
            np.testing.assert_array_equal(packed, weight.dequantize().astype(dtype))
    gated = pack_experts([(weights[0], weights[1]), (weights[2], weights[0])], gated=True)
    gated.save(tmp_path / "w.safetensors")
    for experts in (gated, PackedExperts.load(tmp_path / "w.safetensors"), copy.copy(gated)):
        gate, up = np.split(experts.dequantize(), 2, axis=2)
        np.testing.assert_array_equal(gate, [weights[i].dequantize() for i in (0, 2)])
        np.testing.assert_array_equal(up, [weights[i].dequantize() for i in (1, 0)])


@pytest.mark.parametrize(
    ("scales", "match"),
    [
        (np.ones((2, 1), np.float32), r"an array with dtype float32 and shape \(2, 2\), got float32 \(2, 1\)"),
        (np.ones((2, 2)), r"an array with dtype float32 and shape \(2, 2\), got float64"),
        (np.array([[1, np.inf], [1, 1]], np.float32), "finite, got inf"),
    ],
)
def test_wrong_tensor_scales_of_experts(scales: Any, match: str) -> None:
    gated = quantize_experts(dense(32, 64)[None].repeat(2, 0), format="nvfp4", gated=True)
    with pytest.raises(QuantizationError, match=f"^tensor_scales must be {match}"):
        PackedExperts(gated.weight, 2, 64, True, scales)
    int4 = quantize_experts(np.ones((2, 32, 64), np.float32), group_size=32, gated=True)
    with pytest.raises(QuantizationError, match=r"^tensor_scales must be None for format 'int4'"):
        PackedExperts(int4.weight, 2, 64, True, scales)


def test_metadata_of_a_file_is_checked(tmp_path: Path) -> None:
    w = quantize(dense(), format="fp8")
    path = tmp_path / "w.safetensors"
    w.save(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'\\"fp8\\"', b'\\"fp9\\"'))
    with pytest.raises(WeightFileError, match="format"):
        PackedWeight.load(path)


CODES, SCALES = np.zeros((128, 64), np.uint8), np.ones((1, 64), np.float16)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": "fp9"}, "format"),
        ({"format": 4}, "format"),
        ({"format": "mxfp4", "group_size": 128}, "group_size"),
        ({"format": "nvfp4"}, "group_size"),
        ({"format": "fp8", "group_size": 32}, "group_size"),
        ({"format": "fp8", "q": CODES + 127}, "qweight"),
        ({"format": "fp8", "zeros": np.full((1, 64), 8)}, "zeros"),
        ({"format": "fp8", "tensor_scale": 2.0}, "tensor_scale"),
        ({"format": "mxfp4", "group_size": 32, "scales": np.ones((4, 64), np.float16), "q": CODES + 16}, "q"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], field: str) -> None:
    arguments = {"q": CODES, "scales": SCALES} | changes
    with pytest.raises(FieldError) as caught:
        pack(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), 0.1, 1, "1"])
def test_wrong_tensor_scale(scale: Any) -> None:
    with pytest.raises(QuantizationError) as caught:
        pack(CODES, np.ones((8, 64), np.float16), group_size=16, format="nvfp4", tensor_scale=scale)
    assert caught.value.field == "tensor_scale"


def test_scales_that_no_division_fits() -> None:
    scales = np.ones((4, 64), np.float16)
    scales[0, 0], scales[1, 1] = 2.0**15, 2.0**-14
    with pytest.raises(QuantizationError, match="pass bfloat16 scales"):
        pack(CODES, scales, group_size=32, format="mxfp4")
    assert pack(CODES, scales.astype(ml_dtypes.bfloat16), group_size=32, format="mxfp4").scale_fit.exponent > 0


@pytest.mark.parametrize(("kind", "group_size"), [("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_whose_products_underflow(kind: str, group_size: int, dtype: str) -> None:
    smallest = ml_dtypes.finfo(dtype).smallest_subnormal
    scales = np.zeros((128 // group_size, 64), smallest.dtype)
    pack(CODES, scales, group_size=group_size, format=kind)
    scales[0, 0] = 2 * smallest
    pack(CODES, scales, group_size=group_size, format=kind)
    for multiple in (1, 3):
        scales[1, 1] = multiple * smallest
        with pytest.raises(QuantizationError, match=f"no product with a code underflows in {dtype}"):
            pack(CODES, scales, group_size=group_size, format=kind)


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_nearly_dead_column(kind: str, dtype: str) -> None:
    values = dense()
    values[:, 3] = 1e-39 if dtype == "bfloat16" else 1e-7
    error = quantize(values, format=kind, dtype=dtype).dequantize()[:, 3] - values[:, 3]
    assert np.abs(error).max() <= max(values[0, 3], 2 * float(ml_dtypes.finfo(dtype).smallest_subnormal))


def test_options_that_a_format_lacks() -> None:
    with pytest.raises(QuantizationError, match="symmetric"):
        quantize(dense(), format="fp8", symmetric=False)
    with pytest.raises(ArgumentTypeError, match="format"):
        cudatma.quantize(dense(), format="int3")
    with pytest.raises(QuantizationError, match="finite"):
        quantize(np.full((16, 16), np.inf, np.float32), format="nvfp4")


def test_the_scale_of_a_group_of_zeros_is_zero() -> None:
    """e8m0 has no zero, and quantizers give groups of zeros the smallest scale, which no fp16 range holds."""
    codes = np.full((64, 4, 16), 0x22, np.uint8)
    scales = np.full((64, 4), 127, np.uint8)
    codes[:, 0], scales[:, 0] = 0x80, 0
    dense = from_mxfp4(codes, scales, dtype="float16").dequantize()
    np.testing.assert_array_equal(dense, np.repeat([0, 1, 1, 1], 32)[:, None] * np.ones(64))
