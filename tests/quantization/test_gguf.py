"""load_gguf against the decoder of the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudatma import load_gguf
from cudatma.errors import ArgumentError, ArgumentTypeError, WeightFileError
from cudatma.quantization import pack_experts

gguf = pytest.importorskip("gguf")
K, N, EXPERTS = 96, 80, 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with matrices and experts of several types."""
    return write(tmp_path / "model.gguf")


def write(path: Path, endianess: Any = gguf.GGUFEndian.LITTLE) -> Path:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    for kind in ("Q4_0", "Q8_0", "F16"):
        number = gguf.GGMLQuantizationType[kind]
        for name, shape in (
            (f"{kind}.weight", (N, K)),
            (f"{kind}_exps.weight", (EXPERTS, N, K)),
            (f"{kind}_vector", (1, K)),
            (f"{kind}_4d", (2, EXPERTS, N, K)),
        ):
            values = gguf.quants.quantize(rng.standard_normal(shape, np.float32), number)
            if endianess == gguf.GGUFEndian.BIG and kind != "F16":  # As gguf_convert_endian, swap the scales of blocks.
                blocks = values.reshape(-1, gguf.GGML_QUANT_SIZES[number][1])
                blocks[:, :2] = blocks[:, 1::-1]
            writer.add_tensor(name, values[0] if name.endswith("vector") else values, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def decoded(path: Path, name: str) -> Any:
    (tensor,) = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize(("kind", "form"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_values_are_those_of_the_package(path: Path, kind: str, form: str) -> None:
    weight = load_gguf(path, f"{kind}.weight")
    assert (weight.format, weight.group_size, weight.dtype) == (form, 32, "float16")
    np.testing.assert_array_equal(weight.dequantize(dtype=np.float32), decoded(path, f"{kind}.weight").T)
    experts = pack_experts([load_gguf(path, f"{kind}_exps.weight", expert=index) for index in range(EXPERTS)])
    expected = decoded(path, f"{kind}_exps.weight").transpose(0, 2, 1)
    np.testing.assert_array_equal(experts.dequantize(dtype=np.float32), expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_big_endian_file_has_the_same_values(path: Path, tmp_path: Path, kind: str) -> None:
    swapped = write(tmp_path / "big.gguf", gguf.GGUFEndian.BIG)
    values = (load_gguf(file, f"{kind}.weight").dequantize() for file in (path, swapped))
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize(
    ("name", "expert", "error", "says"),
    [
        ("Q4_0.wieght", None, WeightFileError, "no such tensor"),
        ("F16.weight", None, WeightFileError, "must be of type Q4_0 or Q8_0, got F16"),
        ("Q4_0.weight", 0, ArgumentError, "expert must be None for a tensor with 2 dimensions, got 0"),
        (
            "Q4_0_exps.weight",
            None,
            ArgumentError,
            "expert must be from 0 to 2 for a tensor with 3 dimensions, got None",
        ),
        ("Q4_0_exps.weight", 3, ArgumentError, "expert must be from 0 to 2 for .*, got 3"),
        ("Q4_0_exps.weight", "a", ArgumentTypeError, "expert must be an int or None, got 'a'"),
        ("Q4_0_exps.weight", 1.0, ArgumentTypeError, r"expert must be an int or None, got 1\.0"),
        ("Q4_0_4d", 1, WeightFileError, "got a tensor with 4 dimensions"),
        ("Q8_0_vector", None, WeightFileError, "got a tensor with 1 dimension$"),
        (5, None, ArgumentTypeError, "name must be a str, got 5"),
        (["Q4_0.weight"], None, ArgumentTypeError, "name must be a str"),
    ],
)
def test_wrong_arguments(path: Path, name: Any, expert: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_gguf(path, name, expert=expert)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for name in ("x.gguf", "missing.gguf"):
        with pytest.raises(WeightFileError, match=name):
            load_gguf(tmp_path / name, "a")
