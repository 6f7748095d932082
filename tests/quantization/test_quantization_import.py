"""Importers: files made by other tools' packers (tests/fixtures/make_quantization_fixtures.py), and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_folders import marlin_tensors
from safetensors.numpy import save_file

from cudatma.errors import ArgumentTypeError, QuantizationError, WeightFileError
from cudatma.quantization import (
    PackedWeight,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_marlin,
    load_awq,
    load_compressed_tensors,
    load_gptq,
    load_marlin,
    open_checkpoint,
    unpack,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantization"
BF16 = np.dtype(ml_dtypes.bfloat16)
Arrays = dict[str, Any]


def fixture(name: str, layer: str) -> Arrays:
    """A layer's tensors by their name without the layer."""
    checkpoint = open_checkpoint(FIXTURES / f"{name}.safetensors")
    return {key[len(layer) + 1 :]: checkpoint.read(key) for key in checkpoint.names if key.startswith(f"{layer}.")}


def expect(weight: PackedWeight, tensors: Arrays, group_size: int) -> None:
    """That a weight holds exactly the integers, scales and zero points that the other tool packed."""
    q, scales, zeros, group = (tensors[f"truth.{name}"] for name in ("q", "scales", "zeros", "group"))
    symmetric = bool((zeros == 8).all())
    sorted_already = bool((np.diff(group) >= 0).all())
    assert (weight.shape, weight.group_size, weight.symmetric) == (q.shape, group_size, symmetric)
    assert (weight.perm is None) == sorted_already
    found = unpack(weight)
    np.testing.assert_array_equal(found.q, q if sorted_already else q[weight.perm])
    np.testing.assert_array_equal(found.scales, scales, strict=True)
    if not symmetric:
        np.testing.assert_array_equal(found.zeros, zeros, strict=True)
    dense = (q.astype(np.float64) - zeros[group]) * scales[group].astype(np.float64)
    np.testing.assert_array_equal(weight.dequantize(), dense)


FILES: list[tuple[str, str, int, Callable[..., PackedWeight], dict[str, Any]]] = [
    ("gptq_v1", "sym", 32, load_gptq, {}),
    ("gptq_v1", "asym", 64, load_gptq, {}),
    ("gptq_v1", "act", 32, load_gptq, {"group_size": 32}),
    ("gptq_v1", "whole", -1, load_gptq, {"group_size": -1}),
    ("gptq_v2", "sym", 64, load_gptq, {"zero_point_format": "v2"}),
    ("gptq_v2", "asym", 32, load_gptq, {"zero_point_format": "v2"}),
    ("gptq_v2", "act", 64, load_gptq, {"zero_point_format": "v2"}),
    ("gptq_v2", "odd", 32, load_gptq, {"zero_point_format": "v2"}),
    ("awq", "asym", 64, load_awq, {}),
    ("awq", "sym", 32, load_awq, {"group_size": 32}),
    ("marlin", "grouped", 128, load_marlin, {}),
    ("marlin", "whole", -1, load_marlin, {}),
    ("compressed_tensors", "group", 32, load_compressed_tensors, {}),
    ("compressed_tensors", "asym", 64, load_compressed_tensors, {"group_size": 64}),
    ("compressed_tensors", "channel", -1, load_compressed_tensors, {"group_size": -1}),
    ("compressed_tensors", "channel_asym", -1, load_compressed_tensors, {}),
    ("actorder", "act", 32, load_compressed_tensors, {}),
]


@pytest.mark.parametrize(
    ("name", "layer", "group_size", "load", "options"), FILES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_files_of_other_packers(
    name: str, layer: str, group_size: int, load: Callable[..., PackedWeight], options: dict[str, Any]
) -> None:
    expect(load(FIXTURES / f"{name}.safetensors", layer, **options), fixture(name, layer), group_size)


def test_gptqmodels_borrowing_zero_points() -> None:
    tensors = fixture("gptq_v2", "asym")
    parts = (tensors["qweight"], tensors["qzeros_as_v1"], tensors["scales"], tensors["g_idx"])
    expect(from_gptq(*parts, zero_point_format="v1_borrow"), tensors, 32)
    plain = from_gptq(*parts, zero_point_format="v1")
    assert (plain.dequantize() != from_gptq(*parts, zero_point_format="v1_borrow").dequantize()).any()


def test_gptq_formats_differ_by_one() -> None:
    tensors = fixture("gptq_v1", "asym")
    parts = (tensors["qweight"], tensors["qzeros"], tensors["scales"])
    first, second = (unpack(from_gptq(*parts, zero_point_format=version)) for version in ("v1", "v2"))
    np.testing.assert_array_equal(first.zeros, second.zeros + 1)


def test_gptq_without_or_with_empty_g_idx() -> None:
    tensors = fixture("gptq_v1", "sym")
    for g_idx in (None, np.zeros(0, np.int32)):
        expect(from_gptq(tensors["qweight"], tensors["qzeros"], tensors["scales"], g_idx), tensors, 32)


@pytest.mark.parametrize("groups", [1, 3])
def test_marlin_against_a_packer_by_positions(groups: int) -> None:
    rng = np.random.default_rng(groups)
    q = rng.integers(0, 16, (96, 128), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (groups, 128)).astype(np.float16)
    tensors = marlin_tensors(q, scales)
    found = unpack(from_marlin(tensors["B"], tensors["s"]))
    np.testing.assert_array_equal(found.q, q)
    np.testing.assert_array_equal(found.scales, scales)


@pytest.mark.parametrize(("size", "packed"), [(256, 128), (1024, 128), (384, 128), (192, 64), (96, 32)])
def test_other_groups_become_several_that_share_a_scale(size: int, packed: int) -> None:
    depth, width = 2 * size + 32, 16
    rng = np.random.default_rng(size)
    qweight = rng.integers(-(2**31), 2**31, (depth // 8, width), dtype=np.int64).astype(np.int32)
    qzeros = rng.integers(-(2**31), 2**31, (3, width // 8), dtype=np.int64).astype(np.int32)
    scales = rng.uniform(0.01, 0.02, (3, width)).astype(np.float16)
    weight = from_gptq(qweight, qzeros, scales, zero_point_format="v2", group_size=size)
    assert weight.group_size == packed
    group = np.arange(depth) // size
    q = (qweight.view(np.uint32)[:, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None] & 15).reshape(depth, width)
    zeros = (qzeros.view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(3, width)
    dense = (q.astype(np.float64) - zeros[group]) * scales[group].astype(np.float64)
    np.testing.assert_array_equal(weight.dequantize(), dense)


def test_scales_are_converted_only_when_asked() -> None:
    tensors = fixture("awq", "asym")
    parts = [tensors[name] for name in ("qweight", "qzeros", "scales")]
    assert from_awq(*parts).dtype == "float16"
    weight = from_awq(*parts, dtype="bfloat16")
    np.testing.assert_array_equal(unpack(weight).scales, tensors["scales"].astype(BF16), strict=True)
    with pytest.raises(QuantizationError, match="pass dtype="):
        from_awq(*parts[:2], parts[2].astype(np.float32))
    assert from_awq(*parts[:2], parts[2].astype(np.float32), dtype="float16").dtype == "float16"


@pytest.mark.parametrize("value", [1e6, 1e-10])
def test_scales_that_fp16_cannot_hold(value: float) -> None:
    tensors = fixture("awq", "asym")
    scales = tensors["scales"].astype(np.float32)
    scales[1, 5] = value
    with pytest.raises(QuantizationError, match=r"scales\[1, 5\].*bfloat16"):
        from_awq(tensors["qweight"], tensors["qzeros"], scales, dtype="float16")


def test_one_scale_for_a_whole_tensor() -> None:
    tensors = fixture("compressed_tensors", "channel")
    weight = from_compressed_tensors(tensors["weight_packed"], np.float16([0.5]), (19, 44))
    np.testing.assert_array_equal(weight.dequantize(), (tensors["truth.q"].astype(float) - 8) * 0.5)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensors = load_file(FIXTURES / "compressed_tensors.safetensors")
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    assert tensors["asym.weight_scale"].dtype is torch.bfloat16
    weight = from_compressed_tensors(*(tensors[f"asym.{name}"] for name in names))
    expect(weight, fixture("compressed_tensors", "asym"), 64)


I32 = np.int32


def _gptq(**changes: Any) -> PackedWeight:
    tensors = fixture("gptq_v1", "act")
    names = ("qweight", "qzeros", "scales", "g_idx")
    return from_gptq(**{**{name: tensors[name] for name in names}, **changes})


def _awq(**changes: Any) -> PackedWeight:
    tensors = fixture("awq", "asym")
    return from_awq(**{**{name: tensors[name] for name in ("qweight", "qzeros", "scales")}, **changes})


def _compressed(**changes: Any) -> PackedWeight:
    tensors = fixture("compressed_tensors", "asym")
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    return from_compressed_tensors(**{**{name: tensors[name] for name in names}, **changes})


def _marlin(**changes: Any) -> PackedWeight:
    tensors = fixture("marlin", "grouped")
    return from_marlin(**{"b": tensors["B"], "s": tensors["s"], **changes})


_UNEQUAL = np.repeat(np.arange(4), [33, 31, 32, 32])
_NAN = np.full((4, 32), np.nan, np.float16)
REFUSALS: dict[str, tuple[Callable[..., PackedWeight], dict[str, Any], type[Exception], str]] = {
    "gptq 8 bits": (_gptq, {"bits": 8}, QuantizationError, "bits"),
    "gptq bits as a float": (_gptq, {"bits": 4.0}, QuantizationError, "bits"),
    "gptq values beyond fp16": (
        _gptq,
        {"scales": np.full((4, 32), 3e4, np.float16)},
        QuantizationError,
        "scales[0, 0]",
    ),
    "gptq 8-bit words": (_gptq, {"qzeros": np.zeros((4, 8), I32)}, QuantizationError, "qzeros"),
    "gptq 8-bit qweight": (_gptq, {"qweight": np.zeros((32, 32), I32)}, QuantizationError, "qweight"),
    "gptq 3-bit qweight": (_gptq, {"qweight": np.zeros((12, 32), I32)}, QuantizationError, "qweight"),
    "gptq int64 words": (_gptq, {"qweight": np.zeros((16, 32), np.int64)}, QuantizationError, "qweight"),
    "gptq words in one dimension": (_gptq, {"qweight": np.zeros(16, I32)}, QuantizationError, "qweight"),
    "gptq words as text": (_gptq, {"qweight": "words"}, ArgumentTypeError, "qweight"),
    "gptq no zeros": (_gptq, {"qzeros": None}, ArgumentTypeError, "qzeros"),
    "gptq scales of other width": (_gptq, {"scales": np.ones((4, 31), np.float16)}, QuantizationError, "qweight"),
    "gptq scales of other groups": (_gptq, {"scales": np.ones((3, 32), np.float16)}, QuantizationError, "qzeros"),
    "gptq integer scales": (_gptq, {"scales": np.ones((4, 32), I32)}, QuantizationError, "scales"),
    "gptq NaN scales": (_gptq, {"scales": _NAN}, QuantizationError, "scales[0, 0]"),
    "gptq unknown format": (_gptq, {"zero_point_format": "v3"}, QuantizationError, "zero_point_format"),
    "gptq other group size": (_gptq, {"group_size": 64}, QuantizationError, "scales"),
    "gptq two group sizes fit": (
        _gptq,
        {
            "qweight": np.zeros((24, 32), I32),
            "qzeros": np.zeros((2, 4), I32),
            "scales": np.ones((2, 32), np.float16),
            "g_idx": None,
        },
        QuantizationError,
        "group_size",
    ),
    "gptq two group sizes fit, neither without a shorter last group": (
        _gptq,
        {
            "qweight": np.zeros((20, 32), I32),
            "qzeros": np.zeros((2, 4), I32),
            "scales": np.ones((2, 32), np.float16),
            "g_idx": None,
        },
        QuantizationError,
        "group_size",
    ),
    "gptq no rows": (_gptq, {"qweight": np.zeros((0, 32), I32)}, QuantizationError, "qweight"),
    "gptq group size 16": (_gptq, {"group_size": 16}, QuantizationError, "group_size"),
    "gptq float g_idx": (_gptq, {"g_idx": np.zeros(128, np.float32)}, QuantizationError, "g_idx"),
    "gptq g_idx outside": (_gptq, {"g_idx": np.full(128, 4)}, QuantizationError, "g_idx"),
    "gptq g_idx negative": (_gptq, {"g_idx": np.full(128, -1)}, QuantizationError, "g_idx"),
    "gptq g_idx unequal": (_gptq, {"g_idx": _UNEQUAL}, QuantizationError, "g_idx"),
    "gptq g_idx in two dimensions": (_gptq, {"g_idx": np.zeros((16, 8), I32)}, QuantizationError, "g_idx"),
    "awq 8 bits": (_awq, {"bits": 8}, QuantizationError, "bits"),
    "awq 8-bit words": (_awq, {"qweight": np.zeros((128, 8), I32)}, QuantizationError, "qweight"),
    "awq 8-bit zeros": (_awq, {"qzeros": np.zeros((2, 8), I32)}, QuantizationError, "qzeros"),
    "awq no group size fits": (
        _awq,
        {"scales": np.ones((3, 32), np.float16), "qzeros": np.zeros((3, 4), I32)},
        QuantizationError,
        "scales",
    ),
    "compressed-tensors values beyond fp16, without zero points": (
        _compressed,
        {"weight_scale": np.full((20, 2), 1e4, np.float16), "weight_zero_point": None},
        QuantizationError,
        "scales[0, 0]",
    ),
    "compressed-tensors 8 bits": (_compressed, {"bits": 8}, QuantizationError, "bits"),
    "compressed-tensors 8-bit words": (
        _compressed,
        {"weight_packed": np.zeros((20, 32), I32)},
        QuantizationError,
        "weight_packed",
    ),
    "compressed-tensors other shape": (_compressed, {"weight_shape": (20, 64)}, QuantizationError, "weight_packed"),
    "compressed-tensors shape of one": (_compressed, {"weight_shape": (20,)}, QuantizationError, "weight_shape"),
    "compressed-tensors shape of lists": (
        _compressed,
        {"weight_shape": [[20], [128, 1]]},
        QuantizationError,
        "weight_shape",
    ),
    "compressed-tensors shape of floats": (
        _compressed,
        {"weight_shape": (20.0, 128.0)},
        QuantizationError,
        "weight_shape",
    ),
    "compressed-tensors scale transposed": (
        _compressed,
        {"weight_scale": np.ones((2, 20), np.float16)},
        QuantizationError,
        "weight_scale",
    ),
    "compressed-tensors zeros along K": (
        _compressed,
        {"weight_zero_point": np.zeros((20, 1), I32)},
        QuantizationError,
        "weight_zero_point",
    ),
    "compressed-tensors zeros of five bits": (
        _compressed,
        {"weight_zero_point": np.full((20, 2), 9, np.int8)},
        QuantizationError,
        "weight_zero_point",
    ),
    "marlin 8-bit words": (_marlin, {"b": np.zeros((16, 1024), I32)}, QuantizationError, "B"),
    "marlin odd width": (_marlin, {"s": np.ones((2, 96), np.float16)}, QuantizationError, "B"),
    "marlin other groups": (_marlin, {"s": np.ones((5, 256), np.float16)}, QuantizationError, "scales"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_importers_refuse(case: str) -> None:
    importer, changes, error, field = REFUSALS[case]
    with pytest.raises(error) as caught:
        importer(**changes)
    assert caught.value.field == field  # type: ignore[attr-defined]


@pytest.mark.parametrize("load", [load_gptq, load_awq, load_compressed_tensors, load_marlin])
def test_a_layer_that_is_not_there(load: Callable[..., PackedWeight]) -> None:
    with pytest.raises(WeightFileError, match="no such tensor"):
        load(FIXTURES / "gptq_v1.safetensors", "model.layers.0")


def test_a_wrong_prefix_shows_the_right_ones() -> None:
    with pytest.raises(WeightFileError, match=r"use a name such as act\.qweight, asym\.qweight"):
        load_gptq(FIXTURES / "gptq_v1.safetensors", "missing")


FORMATS = {
    load_gptq: ("gptq_v1", "GPTQ"),
    load_awq: ("awq", "AWQ"),
    load_compressed_tensors: ("compressed_tensors", "compressed-tensors"),
    load_marlin: ("marlin", "the original Marlin"),
}


@pytest.mark.parametrize("load", FORMATS)
@pytest.mark.parametrize("right", FORMATS)
def test_the_wrong_importer_names_the_right_one(load: Callable[..., Any], right: Callable[..., Any]) -> None:
    file, title = FORMATS[right]
    layer = {"awq": "asym", "gptq_v1": "sym", "compressed_tensors": "group", "marlin": "whole"}[file]
    if load is right:
        assert load(FIXTURES / f"{file}.safetensors", layer).shape[0] > 0
        return
    with pytest.raises(WeightFileError) as caught:
        load(FIXTURES / f"{file}.safetensors", layer)
    assert f"looks like {title}" in str(caught.value)
    assert caught.value.remedy == f"read the layer with {right.__name__}"


def test_arrays_of_the_wrong_importer_name_the_right_one() -> None:
    gptq, awq = fixture("gptq_v1", "sym"), fixture("awq", "asym")
    with pytest.raises(QuantizationError, match=r"look like AWQ.*pass the tensors to from_awq"):
        from_gptq(awq["qweight"], awq["qzeros"], awq["scales"])
    with pytest.raises(QuantizationError, match=r"look like GPTQ.*pass the tensors to from_gptq"):
        from_awq(gptq["qweight"], gptq["qzeros"], gptq["scales"])


def test_a_weight_that_is_not_quantized_is_named(tmp_path: Path) -> None:
    save_file({"layer.weight": np.ones((4, 4), np.float16)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightFileError, match=r"unquantized weight: weight \(4, 4\).*cudatma\.quantize"):
        load_gptq(tmp_path, "layer")


@pytest.mark.parametrize("file", ["quantize_config.json", "config.json"])
def test_the_format_of_zero_points_is_what_the_configuration_says(tmp_path: Path, file: str) -> None:
    """The tensors of both formats are alike: a file of the second would be imported one off, and silently."""

    def configure(form: Any, name: str = file) -> None:
        said = {"bits": 4, "checkpoint_format": form}
        (tmp_path / name).write_text(json.dumps({"quantization_config": said} if name == "config.json" else said))

    shutil.copy(FIXTURES / "gptq_v2.safetensors", tmp_path)
    tensors = fixture("gptq_v2", "asym")
    configure("gptq_v2")
    for path in (tmp_path, tmp_path / "gptq_v2.safetensors", open_checkpoint(tmp_path)):
        expect(load_gptq(path, "asym"), tensors, 32)
    wrong = load_gptq(tmp_path, "asym", zero_point_format="v1").dequantize()
    assert (wrong != load_gptq(tmp_path, "asym").dequantize()).any()
    configure("gptq")
    np.testing.assert_array_equal(load_gptq(tmp_path, "asym").dequantize(), wrong)
    configure([4])
    with pytest.raises(WeightFileError, match="checkpoint_format"):
        load_gptq(tmp_path, "asym")
    configure("exllama_v3")
    with pytest.raises(
        WeightFileError, match=r"gptq, gptq_v2.*exllama_v3.*zero_point_format \('v1', 'v1_borrow' or 'v2'\)"
    ):
        load_gptq(tmp_path, "asym")
    expect(load_gptq(tmp_path, "asym", zero_point_format="v2"), tensors, 32)
    configure("gptq_v2")
    configure("gptq", "config.json" if file == "quantize_config.json" else "quantize_config.json")
    with pytest.raises(WeightFileError, match=r"gptq\S* in quantize_config\.json, gptq\S* in config\.json.*\('v1' or"):
        load_gptq(tmp_path, "asym")


def test_zero_points_of_gptqmodel_borrow_where_its_first_format_is_asymmetric(tmp_path: Path) -> None:
    zeros = np.array([[0, 8, 3, 15, 1, 0, 0, 7]] * 2, np.uint8)
    whole = np.bitwise_or.reduce(zeros.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32)), axis=1)
    tensors = {
        "layer.qweight": np.zeros((8, 8), np.int32),
        "layer.qzeros": (whole - np.uint32(0x11111111)).view(np.int32).reshape(2, 1),
        "layer.scales": np.ones((2, 8), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    said = {"bits": 4, "checkpoint_format": "gptq", "sym": False, "meta": {"quantizer": ["gptqmodel:5.6.0"]}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    np.testing.assert_array_equal(unpack(load_gptq(tmp_path, "layer")).zeros, zeros)
    (tmp_path / "quantize_config.json").write_text(json.dumps(said))
    for meta in ({}, {"quantizer": ["optimum:1.23.3"]}):  # another tool wrote config.json
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said | {"meta": meta}}))
        np.testing.assert_array_equal(unpack(load_gptq(tmp_path, "layer")).zeros, zeros)
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said | {"sym": True}}))
    with pytest.raises(QuantizationError, match=r"layer\.qzeros must be 7 everywhere.*got stored values from 0 to 15"):
        load_gptq(tmp_path, "layer")


def test_symmetric_zero_points_stored_as_8_under_the_first_format_are_8() -> None:
    tensors = fixture("gptq_v2", "sym")
    parts = (tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"])
    expect(from_gptq(*parts), tensors, 64)
    assert set(unpack(from_gptq(*parts, zero_point_format="v1")).zeros.flat) == {9}


@pytest.mark.parametrize(
    ("load", "file", "layer", "section", "says"),
    [
        (load_awq, "awq", "asym", {"version": "gemv"}, "version must be .*got gemv"),
        (load_awq, "awq", "asym", {"zero_point": False}, r"asym\.qzeros must be .*got stored values"),
        (
            load_compressed_tensors,
            "compressed_tensors",
            "group",
            {"quant_method": "awq"},
            "read the layer with load_awq",
        ),
        (load_marlin, "marlin", "grouped", {"group_size": 64, "is_marlin_format": True}, "specifies group_size 64"),
    ],
)
def test_a_layer_is_compared_with_the_configuration_beside_it(
    tmp_path: Path, load: Callable[..., Any], file: str, layer: str, section: dict[str, Any], says: str
) -> None:
    shutil.copy(FIXTURES / f"{file}.safetensors", tmp_path)
    assert load(tmp_path, layer).shape[0] > 0
    (tmp_path / "quant_config.json").write_text(json.dumps({"bits": 4, **section}))
    with pytest.raises((QuantizationError, WeightFileError), match=says):
        load(tmp_path, layer)


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"quantization_config": null}', '{"quantization_config": {"bits": 4}}']
)
def test_a_configuration_that_says_nothing_means_the_first_format(tmp_path: Path, content: str) -> None:
    shutil.copy(FIXTURES / "gptq_v1.safetensors", tmp_path)
    for name in ("config.json", "quantize_config.json"):
        (tmp_path / name).write_text(content)
    expect(load_gptq(tmp_path, "asym"), fixture("gptq_v1", "asym"), 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightFileError, match=r"config\.json.*JSON"):
        load_gptq(tmp_path, "asym")


def test_a_checkpoint_is_shown_in_one_line() -> None:
    """Not each tensor with all tensors of its file."""
    checkpoint = open_checkpoint(FIXTURES / "gptq_v1.safetensors")
    assert repr(checkpoint) == f"Checkpoint('{checkpoint.path}', {len(checkpoint.names)} tensors in 1 file)"
    assert len(repr(next(iter(checkpoint.files.values())))) < 200
