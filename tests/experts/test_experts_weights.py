"""PackedExperts: values against quantize() of each expert, the order of gate and up, and errors."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from cudatma.errors import ArgumentTypeError, QuantizationError, WeightFileError
from cudatma.quantization import (
    PackedExperts,
    PackedWeight,
    load_weights,
    pack,
    pack_experts,
    quantize,
    quantize_experts,
    save_weights,
)
from cudatma.quantization.safetensors_file import open_safetensors


def dense(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@given(
    experts=st.integers(1, 3),
    k=st.integers(1, 140),
    columns=st.integers(1, 10),
    group_size=st.sampled_from((32, 64, 128, -1)),
    symmetric=st.booleans(),
    gated=st.booleans(),
)
def test_the_values_are_those_of_each_expert(
    experts: int, k: int, columns: int, group_size: int, symmetric: bool, gated: bool
) -> None:
    weights = dense(experts, k, 16 * columns)
    packed = quantize_experts(weights, group_size=group_size, symmetric=symmetric, gated=gated)
    single = [quantize(weight, group_size=group_size, symmetric=symmetric) for weight in weights]
    expected = np.stack([weight.dequantize() for weight in single])
    assert packed.shape == expected.shape
    np.testing.assert_array_equal(packed.dequantize(), expected)
    np.testing.assert_array_equal(pack_experts(single, gated=gated).weight.qweight, packed.weight.qweight)
    np.testing.assert_array_equal(pack_experts(single, gated=gated).dequantize(), expected)


def test_gate_and_up_alternate_every_8_columns() -> None:
    stored = quantize_experts(np.tile(np.repeat([1.0, 2.0], 16), (1, 32, 1)), group_size=32, gated=True).weight
    np.testing.assert_array_equal(np.round(stored.dequantize()[0, :32]), np.repeat([1.0, 2.0, 1.0, 2.0], 8))


def test_copies_have_no_attachments() -> None:
    packed = quantize_experts(dense(2, 64, 32), group_size=64, gated=True)
    packed.attachments["launch"] = 1
    for twin in (copy.copy(packed), pickle.loads(pickle.dumps(packed))):
        assert twin.attachments == {}
        assert (twin.gated, twin.shape) == (True, (2, 64, 32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_file_keeps_the_weights(tmp_path: Path, dtype: str, gated: bool) -> None:
    path = tmp_path / "experts.safetensors"
    packed = quantize_experts(dense(3, 70, 48), group_size=32, gated=gated, symmetric=gated, dtype=dtype)
    packed.save(path)
    alone = PackedExperts.load(path)
    save_weights({"layers.0.experts": packed, "layers.0.dense": quantize(dense(64, 9))}, path)
    loaded = load_weights(path)
    assert [type(weight) for weight in loaded.values()] == [PackedExperts, PackedWeight]
    for other in (alone, loaded["layers.0.experts"]):
        assert isinstance(other, PackedExperts)
        assert (other.shape, other.gated, other.group_size, other.dtype) == (packed.shape, gated, 32, dtype)
        assert other.symmetric == gated
        np.testing.assert_array_equal(other.dequantize(), packed.dequantize())


def test_a_file_with_other_weights_or_wrong_facts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    quantize(dense(64, 64), group_size=64).save(path)
    with pytest.raises(WeightFileError, match=r"weight must be .*got a weight of shape \(64, 64\)"):
        PackedExperts.load(path)
    quantize_experts(dense(2, 64, 32), group_size=64, gated=True).save(path)
    with pytest.raises(WeightFileError, match=r"weight must be .*got expert weights of shape \(2, 64, 32\)"):
        PackedWeight.load(path)
    tensors, metadata = load_file(path), dict(open_safetensors(path).metadata)
    for change, says in (
        (
            {"shape": [2, 64, 65]},
            r"qweight must be an array with dtype uint8 and shape \(4, 2048\), got uint8 \(2, 2048\)",
        ),
        ({"shape": [2, 64, 40]}, "columns must be .*got 40"),
        ({"shape": [2, 64, 0]}, "positive sizes"),
        ({"gated": "yes"}, "gated 'yes'"),
        ({"gated": None}, "gated None"),
    ):
        facts = json.loads(metadata["weights"])
        facts["weight"] |= change
        save_file(tensors, path, {**metadata, "weights": json.dumps(facts)})
        with pytest.raises(WeightFileError, match=says):
            load_weights(path)


HOST, NARROW, SHUFFLED = (
    quantize(dense(64, 128)),
    quantize(dense(64, 64)),
    pack(np.full((64, 64), 9, np.uint8), np.ones((1, 64), np.float16), perm=np.arange(64)[::-1]),
)
#: What is wrong, the call, the error, and the field that it names.
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("no array", lambda: quantize_experts(None), ArgumentTypeError, "weights"),
    ("two axes", lambda: quantize_experts(dense(64, 64)), QuantizationError, "weights.shape"),
    ("no expert", lambda: quantize_experts(dense(0, 64, 64)), QuantizationError, "weights.shape"),
    ("no K", lambda: quantize_experts(dense(2, 0, 32)), QuantizationError, "weights.shape"),
    ("odd gate", lambda: quantize_experts(dense(2, 64, 24), group_size=64, gated=True), QuantizationError, "weights"),
    ("integers", lambda: quantize_experts(np.ones((2, 64, 32), np.int32)), QuantizationError, r"weights\[0\]"),
    ("NaN", lambda: quantize_experts(np.full((2, 64, 32), np.nan)), QuantizationError, r"weights\[0\]: weight\[0, 0\]"),
    ("too large", lambda: quantize_experts(dense(1, 64, 32) * 1e30), QuantizationError, r"weights\[0\]: weight\[.*\]"),
    *(
        (f"{name} {value}", lambda o={name: value}: quantize_experts(dense(2, 64, 32), **o), error, field)
        for name, value, error, field in (
            ("gated", 1, ArgumentTypeError, "gated"),
            ("symmetric", 1, ArgumentTypeError, "symmetric"),
            ("clip_search", "x", ArgumentTypeError, "clip_search"),
            ("dtype", "float32", ArgumentTypeError, "dtype"),
            ("format", "int3", ArgumentTypeError, "format"),
            ("group_size", 7, QuantizationError, r"weights\[0\]: group_size"),
            ("group_size", "64", QuantizationError, r"weights\[0\]: group_size"),
        )
    ),
    (
        "zero points of mxfp4",
        lambda: quantize_experts(dense(2, 64, 32), format="mxfp4", symmetric=False),
        QuantizationError,
        r"weights\[0\]: symmetric",
    ),
    *(
        (f"pack {what}", lambda w=weights, g=gated: pack_experts(w, gated=g), error, field)
        for what, weights, gated, error, field in (
            ("nothing", [], False, QuantizationError, "weights"),
            ("None", None, False, ArgumentTypeError, "weights"),
            ("one weight", NARROW, False, ArgumentTypeError, "weights"),
            ("an empty tuple", [()], True, QuantizationError, "weights"),
            ("a dense weight", [dense(64, 64)], False, ArgumentTypeError, r"weights\[0\]"),
            ("other shapes", [NARROW, HOST], False, QuantizationError, r"weights\[1\].shape"),
            (
                "other dtypes",
                [NARROW, quantize(dense(64, 64), dtype="bfloat16")],
                False,
                QuantizationError,
                r"weights\[1\].dtype",
            ),
            (
                "other groups",
                [NARROW, quantize(dense(64, 64), group_size=32)],
                False,
                QuantizationError,
                r"weights\[1\].group_size",
            ),
            (
                "other formats",
                [NARROW, quantize(dense(64, 64), format="mxfp4")],
                False,
                QuantizationError,
                r"weights\[1\].format",
            ),
            ("activation order", [SHUFFLED], False, QuantizationError, r"weights\[0\]"),
            ("pairs", [(NARROW, NARROW)], False, QuantizationError, "weights"),
            ("triples", [(NARROW, NARROW, NARROW)], True, QuantizationError, "weights"),
            ("gated", [NARROW], "yes", ArgumentTypeError, "gated"),
            ("an odd gate", [quantize(dense(64, 24))], True, QuantizationError, "weights"),
        )
    ),
    *(
        (f"{field} {arguments[1:]}", lambda a=arguments: PackedExperts(*a), error, field)
        for arguments, error, field in (
            ((HOST, 2, 65), QuantizationError, r"weight.shape\[1\]"),
            ((dense(64, 128), 2, 64), ArgumentTypeError, "weight"),
            ((HOST, 0, 64), QuantizationError, "experts"),
            ((HOST, True, 128), QuantizationError, "experts"),
            ((HOST, 2, 0), QuantizationError, "columns"),
            ((HOST, 2, 40, True), QuantizationError, "columns"),
            ((HOST, 2, 64, "yes"), ArgumentTypeError, "gated"),
            ((SHUFFLED, 1, 64), QuantizationError, "weight.perm"),
        )
    ),
]


@pytest.mark.parametrize(("make", "error", "field"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_an_error_names_the_field(make: Any, error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=f"^{field} must be .+, got .+"):
        make()


def test_tensor_scales_must_be_an_array() -> None:
    packed = quantize_experts(dense(2, 64, 64), format="nvfp4")
    with pytest.raises(ArgumentTypeError, match=r"^tensor_scales must be an array or None, got list"):
        replace(packed, tensor_scales=[[1.0], [1.0]])
