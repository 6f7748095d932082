"""Tensor maps to bytes and back: round trips, and each field against the documented bit positions."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TensorMap, TiledSpec, codec
from cudatma.descriptor import driver as map_driver
from cudatma.descriptor.bits import ALLOCATION_BIT, Evidence, compare, explain, field_at
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import (
    ArgumentError,
    ArgumentTypeError,
    DescriptorError,
    DriverError,
    TargetError,
)
from cudatma.layout import Swizzle


@st.composite
def shared_fields(draw: st.DrawFn, rank: int) -> dict[str, Any]:
    """Draw fields that both kinds share: unpacked types and compatible modes."""
    dtype = draw(st.sampled_from([t for t in TMA_TYPES.values() if not t.packed]))
    interleave = draw(st.sampled_from([0, 1, 2])) if rank >= 3 else 0
    swizzle = 1 if interleave == 2 else draw(st.sampled_from(Swizzle))
    stride = st.integers(0, (1 << 35) - 1).map(lambda n: 32 * n)
    return {
        "dtype": dtype,
        "dims": tuple(draw(st.lists(st.integers(1, 1 << 32), min_size=rank, max_size=rank))),
        "strides_bytes": tuple(draw(st.lists(stride, min_size=rank - 1, max_size=rank - 1))),
        "element_strides": tuple(draw(st.lists(st.integers(1, 8), min_size=rank, max_size=rank))),
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": draw(st.integers(0, 3)),
        "oob_fill": draw(st.integers(0, 1)) if dtype.is_float else 0,
        "address": draw(st.integers(0, (1 << 59) - 1)) * 32,
    }


def inner_elems(draw: st.DrawFn, fields: dict[str, Any]) -> int:
    bits = fields["dtype"].element_bits
    most = 256 if fields["interleave"] else Swizzle(fields["swizzle"]).span_bytes * 8 // bits or 256
    return draw(st.integers(1, max(1, most * bits // 128))) * 128 // bits


@st.composite
def tiled_specs(draw: st.DrawFn) -> TiledSpec:
    rank = draw(st.integers(1, 5))
    fields = draw(shared_fields(rank))
    outer = draw(st.lists(st.integers(1, 256), min_size=rank - 1, max_size=rank - 1))
    return TiledSpec(**fields, box=(inner_elems(draw, fields), *outer))


@st.composite
def im2col_specs(draw: st.DrawFn) -> Im2colSpec:
    rank = draw(st.integers(3, 5))
    fields = draw(shared_fields(rank))
    low, high = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}[rank]
    fields["dims"] = tuple(min(max(dim, 70000), 1 << 30) for dim in fields["dims"])
    corner = st.lists(st.integers(low, high), min_size=rank - 2, max_size=rank - 2).map(tuple)
    return Im2colSpec(
        **fields,
        lower_corner=draw(corner),
        upper_corner=draw(corner),
        channels_per_pixel=inner_elems(draw, fields),
        pixels_per_column=draw(st.integers(1, 1024)),
    )


@given(spec=st.one_of(tiled_specs(), im2col_specs()), version=st.integers(0, 7))
def test_round_trip(spec: TiledSpec | Im2colSpec, version: int) -> None:
    raw = codec.encode(spec, version)
    decoded = codec.decode(raw)
    assert decoded.spec == spec
    assert (decoded.version, decoded.smem_bytes, decoded.unknown) == (version, spec.described_bytes % 2**32, 0)
    assert decoded.smem_pattern == {0: 16, 1: 256, 2: 512}.get(int(spec.swizzle), 1024)
    assert len(raw) == 128
    assert codec.encode(decoded.spec, version) == raw


BASE: dict[str, Any] = {
    "dtype": "uint8",
    "dims": (1, 1, 1, 1, 1),
    "strides_bytes": (0, 0, 0, 0),
    "box": (16, 1, 1, 1, 1),
}


def bits_that_change(change: dict[str, Any]) -> set[int]:
    raw = [int.from_bytes(codec.encode(TiledSpec(**fields)), "little") for fields in (BASE, BASE | change)]
    changed = raw[0] ^ raw[1]
    return {bit for bit in range(1024) if changed >> bit & 1}


#: Bits that change where the swizzle's pattern of 16 bytes (bit 580) becomes one of 256 or 1024.
PATTERN_256, PATTERN_1024 = {580, 584}, {580, 586}


# One field at a time against the published bit positions. The box is of 16 elements: bit 512 + 4 in bytes.
@pytest.mark.parametrize(
    ("change", "bits"),
    [
        ({"address": 16}, {4}),
        ({"address": 1 << 63}, {63}),
        ({"dtype": "uint16"}, {71, 516, 517}),
        ({"dtype": "float32_ftz"}, {74, 516, 518}),  # 8, although the driver's number is 10
        ({"dtype": "float64"}, {71, 74, 516, 519}),  # 9, although the driver's number is 8
        ({"dtype": "bfloat16"}, {72, 74, 516, 517}),  # 10, although the driver's number is 9
        ({"dtype": "tfloat32"}, {71, 72, 73, 80, 516, 518}),  # 7 and the tf32 bit
        ({"dtype": "tfloat32_ftz"}, {74, 80, 516, 518}),
        ({"dtype": "float16", "oob_fill": "nan"}, {72, 73, 79, 516, 517}),
        ({"interleave": "16B"}, {75}),
        ({"interleave": "32B", "swizzle": "32B"}, {76, 77, *PATTERN_256}),
        ({"swizzle": "64B"}, {78, 580, 585}),
        ({"swizzle": "128B"}, {77, 78, *PATTERN_1024}),
        ({"swizzle": "128B_ATOM_32B"}, {77, 78, 83, *PATTERN_1024}),
        ({"swizzle": "128B_ATOM_32B_FLIP_8B"}, {77, 78, 84, *PATTERN_1024}),
        ({"swizzle": "128B_ATOM_64B"}, {77, 78, 83, 84, *PATTERN_1024}),
        ({"l2_promotion": "64B"}, {81}),
        ({"l2_promotion": "256B"}, {81, 82}),
        ({"strides_bytes": (16, 0, 0, 0)}, {96}),
        ({"strides_bytes": (0, 0, 0, 32)}, {193}),
        ({"strides_bytes": (1 << 35, 0, 0, 0)}, {127}),
        ({"strides_bytes": (1 << 36, 0, 0, 0)}, {224}),
        ({"strides_bytes": (0, 0, 0, 1 << 39)}, {239}),
        ({"dims": (2, 1, 1, 1, 1)}, {256}),
        ({"dims": (1, 1, 1, 1, 1 + (1 << 31))}, {415}),
        ({"element_strides": (1, 2, 1, 1, 1)}, {419, 516}),  # one element is no whole step of two
        ({"element_strides": (1, 1, 1, 1, 5)}, {430, 516}),
        ({"box": (144, 1, 1, 1, 1)}, {447, 519}),
        ({"box": (16, 1, 1, 1, 2)}, {472, 516, 517}),
    ],
    ids=str,
)
def test_single_fields_stand_where_they_should(change: dict[str, Any], bits: set[int]) -> None:
    assert bits_that_change(change) == bits


def test_rank_and_im2col_fields() -> None:
    line = int.from_bytes(codec.encode(TiledSpec(dtype="uint8", dims=(1,), box=(1 * 16,))), "little")
    assert line == 15 << 440 | 16 << 512 | 16 << 576
    spec = Im2colSpec(
        dtype="uint8",
        dims=(1, 40, 40, 40, 40),
        strides_bytes=(0, 0, 0, 0),
        lower_corner=(-1, 2, -16),
        upper_corner=(1, -2, 15),
        channels_per_pixel=32,
        pixels_per_column=1024,
    )
    value = int.from_bytes(codec.encode(spec), "little")
    assert value >> 64 & 1 == 1
    assert value >> 68 & 7 == 4
    assert value >> 440 & 255 == 31
    assert value >> 448 & 0xFFFF == 0b0_10000_00010_11111
    assert value >> 464 & 0xFFFF == 0b0_01111_11110_00001
    assert value >> 480 & 1023 == 1023


def test_packed_formats() -> None:
    for name, number in (("16u4_align8b", 11), ("16u4_align16b", 12), ("16u6_align16b", 13)):
        spec = TiledSpec(dtype=name, dims=(128,), box=(128,))
        raw = codec.encode(spec)
        assert int.from_bytes(raw, "little") >> 71 & 15 == number
        assert codec.decode(raw).spec == spec


def test_derived_and_unknown_bits_are_shown() -> None:
    value = int.from_bytes(codec.encode(TiledSpec(**BASE)), "little") & (1 << 512) - 1
    value |= 5 << 65 | 4096 << 512 | 0x400 << 576 | 1 << 85 | 1 << 1023
    decoded = codec.decode(value.to_bytes(128, "little"))
    assert decoded.spec == TiledSpec(**BASE)
    assert (decoded.version, decoded.smem_bytes, decoded.smem_pattern) == (5, 4096, 0x400)
    assert decoded.unknown == 1 << 85 | 1 << 1023


def test_described_bytes_floor_each_step() -> None:
    spec = TiledSpec(**(BASE | {"dtype": "float16", "box": (64, 7, 8, 3, 1), "element_strides": (3, 2, 3, 8, 1)}))
    assert spec.described_bytes == 21 * 3 * 2 * 0 * 1 * 2
    spec = TiledSpec(**(BASE | {"dtype": "float16", "box": (64, 7, 8, 3, 1), "element_strides": (3, 2, 3, 1, 1)}))
    assert spec.described_bytes == 21 * 3 * 2 * 3 * 2
    assert spec.expected_bytes == 64 * 4 * 3 * 3 * 2


@pytest.mark.parametrize(
    ("bits", "field"),
    [
        (5 << 68, "rank"),
        (1 << 64 | 1 << 68, "rank"),
        (14 << 71, "format"),
        (1 << 80, "format"),
        (3 << 75 | 2 << 68, "interleave"),
        (1 << 83, "swizzle_atomicity"),
        (1 << 0 | 15 << 440, "address"),
        (1 << 79 | 15 << 440, "oob_fill"),
        (0, "box[0]"),
    ],
)
def test_bytes_that_are_no_tensor_map(bits: int, field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        codec.decode(bits.to_bytes(128, "little"))
    assert caught.value.field == field
    kind, fields = codec.read_fields(bits.to_bytes(128, "little"))
    assert fields["rank_minus_1"] == bits >> 68 & 7
    assert kind == ("im2col" if bits >> 64 & 1 else "tiled")


@pytest.mark.parametrize("length", [0, 64, 127, 129, 256])
def test_wrong_lengths(length: int) -> None:
    with pytest.raises(DescriptorError) as caught:
        codec.decode(bytes(length))
    assert caught.value.field == "data"


DERIVED_SIZES = 0xFFFFFFFF << 512 | 0xFFFF << 576


@given(data=st.binary(min_size=128, max_size=128))
def test_any_bytes_decode_or_raise(data: bytes) -> None:
    decodes_or_raises(data)


def decodes_or_raises(data: bytes) -> None:
    try:
        decoded = codec.decode(data)
    except DescriptorError:
        return
    value = int.from_bytes(codec.encode(decoded.spec, decoded.version), "little") & ~DERIVED_SIZES
    value ^= decoded.smem_bytes << 512 | decoded.smem_pattern << 576 | decoded.unknown
    assert value.to_bytes(128, "little") == data, "nothing may be lost"


@given(data=st.data(), spec=st.one_of(tiled_specs(), im2col_specs()))
def test_no_bit_is_lost(data: st.DataObject, spec: TiledSpec | Im2colSpec) -> None:
    value = int.from_bytes(codec.encode(spec), "little") ^ 1 << data.draw(st.integers(0, 1023))
    decodes_or_raises(value.to_bytes(128, "little"))


def test_encode_refuses() -> None:
    wide = Im2colWideSpec(
        dtype="float16", dims=(64, 14, 4), strides_bytes=(128, 1792), swizzle="128B",
        lower_corner_w=0, upper_corner_w=0, channels_per_pixel=64, pixels_per_column=8,
    )  # fmt: skip
    with pytest.raises(DescriptorError) as caught:
        codec.encode(wide)
    assert caught.value.field == "spec"
    with pytest.raises(DescriptorError) as caught:
        codec.encode(TiledSpec(**BASE), version=8)
    assert caught.value.field == "version"


CONFIG = TiledSpec(dtype="float16", dims=(256, 64), strides_bytes=(512,), box=(64, 8), swizzle="128B", address=4096)
COLUMN = Im2colSpec(
    dtype="bfloat16",
    dims=(64, 14, 9, 4),
    strides_bytes=(128, 1792, 16128),
    lower_corner=(-1, -2),
    upper_corner=(1, 2),
    channels_per_pixel=64,
    pixels_per_column=32,
)
WIDE = Im2colWideSpec(
    dtype="bfloat16",
    dims=(64, 14, 4),
    strides_bytes=(128, 1792),
    swizzle="64B",
    lower_corner_w=-3,
    upper_corner_w=3,
    channels_per_pixel=32,
    pixels_per_column=16,
)


def number(data: bytes) -> int:
    return int.from_bytes(data, "little")


# Every bit


@given(data=st.binary(min_size=128, max_size=128))
def test_every_bit_is_in_exactly_one_range(data: bytes) -> None:
    at = value = 0
    for part in explain(data):
        assert part.first == at
        assert 0 <= part.value < 1 << part.bits
        value |= part.value << part.first
        at += part.bits
    assert at == 1024
    assert value == number(data)


def test_ranges_of_a_map_have_the_names_of_the_codec() -> None:
    for spec, kind in ((CONFIG, "tiled"), (COLUMN, "im2col")):
        ranges = explain(codec.encode(spec))
        named = {part.name: (part.first, part.bits) for part in ranges if part.name != "unknown"}
        assert named == codec.FIELDS[kind]
        assert all(part.value == 0 for part in ranges if part.name == "unknown")
        assert {part.name for part in ranges if part.evidence is Evidence.DOCUMENTED} == {"swizzle_atomicity"}


def test_unknown_bits_are_raw_and_the_allocation_bit_stands_alone() -> None:
    raw = (number(codec.encode(CONFIG)) | 1 << 85 | 5 << 90 | 1 << 1023).to_bytes(128, "little")
    unknown = {part.place: part.value for part in explain(raw) if part.name == "unknown" and part.value}
    assert unknown == {"85": 1, "86-95": 5 << 4, "592-1023": 1 << (1023 - 592)}
    note = next(part.note for part in explain(raw) if part.first == ALLOCATION_BIT)
    assert "sm_100" in note


def test_packed_formats_and_dimensions_beyond_the_rank_are_said() -> None:
    packed = explain(codec.encode(TiledSpec(dtype="16u4_align8b", dims=(128,), box=(128,))))
    assert next(part for part in packed if part.name == "format").evidence is Evidence.DOCUMENTED
    two = {part.name: part.note for part in explain(codec.encode(CONFIG))}
    assert (two["dim_minus_1[1]"], two["dim_minus_1[2]"]) == ("", "beyond the rank")
    assert (two["stride_low[0]"], two["stride_low[1]"]) == ("", "beyond the rank")


def test_wrong_lengths_of_bits() -> None:
    with pytest.raises(DescriptorError):
        explain(bytes(127))
    with pytest.raises(DescriptorError) as caught:
        compare(bytes(128), bytes(64), ("one", "other"))
    assert caught.value.field == "other"


# Two maps


@given(left=st.binary(min_size=128, max_size=128), bits=st.sets(st.integers(0, 1023), max_size=40))
def test_exactly_the_flipped_bits_are_found(left: bytes, bits: set[int]) -> None:
    right = (number(left) ^ sum(1 << bit for bit in bits)).to_bytes(128, "little")
    found = compare(left, right)
    assert found.bits == tuple(sorted(bits))
    assert found.equal == (not bits)
    for field in found.fields:
        assert all(field.first <= bit < field.first + field.bits for bit in field.differing)
        mask = (1 << field.bits) - 1
        assert (field.left, field.right) == (number(left) >> field.first & mask, number(right) >> field.first & mask)
    assert json.loads(json.dumps(found.to_json()))["bits"] == sorted(bits)
    assert len(str(found).splitlines()) == 1 + len(found.fields)


def test_differences_have_the_names_of_their_fields() -> None:
    other = replace(CONFIG, dims=(256, 65), swizzle="64B", box=(32, 8))
    found = compare(codec.encode(CONFIG), codec.encode(other), ("A", "B"))
    assert [field.name for field in found.fields] == [
        "swizzle", "dim_minus_1[1]", "box_minus_1[0]", "smem_bytes", "smem_pattern",
    ]  # fmt: skip
    assert "dim_minus_1[1] (bits 288-319): 0x3f and 0x40" in str(found)
    unknown = (number(codec.encode(CONFIG)) | 7 << 700).to_bytes(128, "little")
    assert str(compare(codec.encode(CONFIG), unknown).fields[0]) == "unknown (bits 700-702): 0x0 and 0x7"
    assert field_at(700, "tiled") == ("unknown", 700, 1)


def test_maps_of_two_kinds_name_both_fields() -> None:
    found = compare(codec.encode(CONFIG), codec.encode(COLUMN))
    names = {field.name for field in found.fields}
    assert {"im2col", "rank_minus_1", "format"} <= names
    assert any(name.startswith("box_minus_1[") and name.endswith("/ lower_corner") for name in names)


# The driver's bytes against the codec's


def test_a_map_of_the_codec_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"flip": 0}
    monkeypatch.setattr(
        map_driver,
        "encode",
        lambda spec, device: (number(codec.encode(spec)) ^ answers["flip"]).to_bytes(128, "little"),
    )
    made = TensorMap.tiled(CONFIG, encoder="codec")
    assert made.compare().equal
    answers["flip"] = 1 << 85 | 1 << 256
    found = made.compare()
    assert (found.names, found.bits) == (("driver", "codec"), (85, 256))
    assert [field.name for field in found.fields] == ["unknown", "dim_minus_1[0]"]


def test_a_map_of_the_driver_is_compared_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TensorMap.tiled(CONFIG, encoder="codec")
    made.encoder = "driver"
    monkeypatch.setattr(map_driver, "encode", lambda spec, device: pytest.fail("the map has the driver's bytes"))
    assert made.compare().equal
    made.data[0] ^= 1
    assert made.compare().bits == (0,)


def test_without_a_driver_it_says_so() -> None:
    if map_driver.has_driver():
        pytest.skip("this machine has a driver")
    with pytest.raises(DriverError):
        TensorMap.tiled(CONFIG, encoder="codec").compare()


def test_im2col_wide_has_shared_fields_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = codec.encode_shared(WIDE)
    fields = codec.read_fields(shared)[1]
    assert (fields["rank_minus_1"], fields["dim_minus_1[1]"], fields["swizzle"]) == (2, 13, 2)
    assert number(shared) >> 440 & (1 << 72) - 1 == 0, "nothing of its own is made up"
    assert codec.encode_shared(CONFIG) == (number(codec.encode(CONFIG)) & ~(((1 << 40) - 1) << 440)).to_bytes(
        128, "little"
    )
    monkeypatch.setattr(map_driver, "encode", lambda spec, device: (number(shared) | 3 << 450).to_bytes(128, "little"))
    made = TensorMap.__new__(TensorMap)
    made._spec, made._address, made.encoder, made.device = WIDE, 0, "codec", None
    found = made.compare()
    assert found.bits == (450, 451)
    assert "assumed" in str(found)


ENCODED = TiledSpec(dtype="float16", dims=(256, 64), strides_bytes=(512,), box=(64, 8), swizzle="128B", address=4096)
TALL_COLUMN = Im2colSpec(
    dtype="bfloat16",
    dims=(64, 14, 9, 4),
    strides_bytes=(128, 1792, 16128),
    lower_corner=(-1, -2),
    upper_corner=(1, 2),
    channels_per_pixel=64,
    pixels_per_column=32,
)
WIDE_ARRAY = Im2colWideSpec(
    dtype="bfloat16",
    dims=(64, 14, 4),
    strides_bytes=(128, 1792),
    swizzle="64B",
    lower_corner_w=-3,
    upper_corner_w=3,
    channels_per_pixel=32,
    pixels_per_column=16,
    mode="W128",
)


def aligned(shape: tuple[int, ...], dtype: Any = np.float16, order: Any = "C") -> np.ndarray[Any, Any]:
    """Return a 128-byte aligned NumPy array."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + size].view(dtype).reshape(shape, order=order)


def test_the_codec_makes_the_bytes() -> None:
    made = TensorMap.tiled(ENCODED, encoder="codec", target="sm_90a")
    assert bytes(made) == codec.encode(ENCODED) == bytes(made.data)
    assert made.spec is ENCODED
    assert (made.encoder, made.device, made.owner) == ("codec", None, None)
    assert (made.expected_bytes, made.footprint_bytes, made.smem_alignment_bytes) == (1024, 1024, 1024)
    assert made.pointer % 128 == 0 == ctypes.addressof(made.data) % 128
    assert ctypes.sizeof(made.data) == 128
    assert repr(made).startswith("TensorMap(float16, shape=(64, 256), box=(8, 64)")
    assert bytes(TensorMap.im2col(TALL_COLUMN, encoder="codec")) == codec.encode(TALL_COLUMN)


def test_from_array_describes_what_numpy_shows() -> None:
    array = aligned((64, 256))
    made = TensorMap.from_array(array, (8, 64), swizzle="128B")
    assert made.spec == TiledSpec(
        dtype="float16", dims=(256, 64), strides_bytes=(512,), box=(64, 8), swizzle="128B", address=array.ctypes.data
    )
    assert made.owner is array
    assert made.encoder == "codec", "host memory never goes to the driver"
    window = array[8:40, 64:192]
    spec = TensorMap.from_array(window, (8, 64), element_strides=(2, 1)).spec
    assert (spec.dims, spec.strides_bytes, spec.element_strides) == ((128, 32), (512,), (1, 2))
    assert spec.address == array.ctypes.data + 8 * 512 + 128


def test_from_array_follows_the_order_of_the_array() -> None:
    spec = TensorMap.from_array(aligned((256, 64), order="F"), (64, 8)).spec
    assert (spec.dims, spec.strides_bytes) == ((256, 64), (512,))
    assert isinstance(spec, TiledSpec)
    assert spec.box == (64, 8)
    swapped = TensorMap.from_array(aligned((4, 8, 64)), (2, 4, 64), axes=(2, 0, 1)).spec
    assert (swapped.dims, swapped.strides_bytes) == ((64, 4, 8), (1024, 128))


def test_from_array_can_rename_the_type() -> None:
    array = aligned((64, 64), np.float32)
    assert TensorMap.from_array(array, (8, 32), dtype="tfloat32").spec.dtype.name == "tfloat32"
    for wrong in ("float16", "16u4_align8b"):
        with pytest.raises(DescriptorError) as caught:
            TensorMap.from_array(array, (8, 32), dtype=wrong)
        assert caught.value.field == "dtype"


def test_from_address() -> None:
    owner = object()
    made = TensorMap.from_address(
        1 << 40, (4, 64, 256), (1, 8, 64), dtype="bfloat16", owner=owner, device=1, encoder="codec", swizzle="128B"
    )
    assert made.spec == TiledSpec(
        dtype="bfloat16",
        dims=(256, 64, 4),
        strides_bytes=(512, 32768),
        box=(64, 8, 1),
        swizzle="128B",
        address=1 << 40,
    )
    assert (made.owner, made.device) == (owner, 1)
    strided = TensorMap.from_address(
        0, (4, 64), (1, 64), dtype="uint8", strides_bytes=(0, 1), encoder="codec", element_strides=(2, 1)
    )
    assert strided.spec.strides_bytes == (0,)
    with pytest.raises(DescriptorError) as caught:
        TensorMap.from_address(0, (4, 128), (1, 128), dtype="16u4_align8b", encoder="codec")
    assert caught.value.field == "dtype"


def test_targets_are_checked() -> None:
    big = TiledSpec(dtype="float16", dims=(256, 256), strides_bytes=(512,), box=(256, 256))
    assert TensorMap.tiled(big, encoder="codec", target="sm_90a").target is not None
    with pytest.raises(DescriptorError, match="sm_120a"):
        TensorMap.tiled(big, encoder="codec", target="sm_120a")
    with pytest.raises(TargetError):
        TensorMap.tiled(ENCODED, encoder="codec", target="sm_80")


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda: TensorMap.tiled(ENCODED, encoder="gpu"), ArgumentError, "encoder"),
        (lambda: TensorMap.tiled(TALL_COLUMN), ArgumentTypeError, "spec"),  # type: ignore[arg-type]
        (lambda: TensorMap.im2col(ENCODED), ArgumentTypeError, "spec"),  # type: ignore[arg-type]
        (lambda: TensorMap.im2col_wide(TALL_COLUMN), ArgumentTypeError, "spec"),  # type: ignore[arg-type]
        (lambda: TensorMap.from_array(aligned((8, 64)), (8, 64), encoder="driver"), ArgumentError, "array"),
        (lambda: TensorMap.from_array(aligned((8, 64))[:, ::2], (8, 32)), DescriptorError, "strides_bytes[1]"),
        (lambda: TensorMap.from_array(aligned((8, 64))[::-1], (8, 64)), DescriptorError, "strides_bytes[0]"),
        (lambda: TensorMap.from_array(aligned((8, 64))[:, 1:], (8, 64)), DescriptorError, "address"),
        (lambda: TensorMap.from_array(aligned((8, 60)), (8, 32)), DescriptorError, "strides_bytes[0]"),
        (lambda: TensorMap.from_array(aligned((0, 64)), (8, 64)), DescriptorError, "shape[0]"),
        (lambda: TensorMap.from_array(aligned((8, 64)), (8, 64), swizzle="1B"), DescriptorError, "swizzle"),
        (lambda: TensorMap.from_array(aligned((8, 64)), (8,)), DescriptorError, "box"),
        (lambda: TensorMap.from_array(np.float16(1), ()), (DescriptorError, ArgumentTypeError), None),
        (lambda: TensorMap.from_array([1, 2, 3], (3,)), ArgumentTypeError, "array"),
        (lambda: TensorMap.from_array(aligned((8, 64), np.complex128), (8, 64)), DescriptorError, "dtype"),
        (lambda: TensorMap.from_array(aligned((8, 64), np.complex64), (8, 64)), DescriptorError, "dtype"),
        # Axes as the array counts them, in any order that they lie in memory.
        (lambda: TensorMap.from_array(aligned((512, 64)), (257, 64)), DescriptorError, "box[0]"),
        (lambda: TensorMap.from_array(aligned((512, 64)), (8, 60)), DescriptorError, "box[1]"),
        (lambda: TensorMap.from_array(aligned((512, 64)).T, (60, 8)), DescriptorError, "box[0]"),
        (lambda: TensorMap.from_array(aligned((4, 512, 64)), (1, 257, 64)), DescriptorError, "box[1]"),
        (
            lambda: TensorMap.from_array(aligned((4, 8, 64)), (1, 8, 64), element_strides=(9, 1, 1)),
            DescriptorError,
            "element_strides[0]",
        ),
        (lambda: TensorMap.from_array(aligned((4, 8, 60)), (1, 8, 64)), DescriptorError, "strides_bytes[1]"),
        (lambda: TensorMap.from_address(4096, (8, 0), (8, 64), dtype="float16"), DescriptorError, "shape[1]"),
        (
            lambda: TensorMap.from_address(
                4096, (2, 9, 3, 4, 8), (1, 9, 1, 1, 8), dtype="float16", strides_bytes=(4096, 256, 64, 16, 2),
                interleave="16B", target="sm_90a",
            ),
            DescriptorError,
            "box[1]",
        ),
    ],
)  # fmt: skip
def test_wrong_calls(call: Any, error: Any, field: str | None) -> None:
    with pytest.raises(error) as caught:
        call()
    assert field is None or caught.value.field == field


@pytest.mark.parametrize(("swizzle", "has_wider"), [("32B", True), ("64B", True), ("128B", False)])
def test_a_wider_swizzle_is_suggested_where_there_is_one(swizzle: str, has_wider: bool) -> None:
    with pytest.raises(DescriptorError, match=r"box\[1\] must be .* elements\).*got 256 bytes") as caught:
        TensorMap.from_array(aligned((8, 128)), (8, 128), swizzle=swizzle)
    assert ("wider swizzle" in str(caught.value)) is has_wider
    assert "use several boxes" in str(caught.value)


def test_complex_numbers_are_described_only_where_it_is_said() -> None:
    array = aligned((8, 64), np.complex64)
    with pytest.raises(DescriptorError, match='dtype="uint64"'):
        TensorMap.from_array(array, (8, 32))
    assert TensorMap.from_array(array, (8, 32), dtype="uint64").spec.dtype.name == "uint64"


def test_replace_address_with_the_codec() -> None:
    first, second = aligned((64, 256)), aligned((64, 256))
    made = TensorMap.from_array(first, (8, 64))
    made.replace_address(second)
    assert made.owner is second
    assert made.address == second.ctypes.data
    assert made.spec.address == second.ctypes.data
    assert bytes(made) == codec.encode(TensorMap.from_array(second, (8, 64)).spec)
    made.replace_address(1 << 33)
    assert made.owner is None
    assert codec.decode(bytes(made)).spec == made.spec


@pytest.mark.parametrize(
    ("other", "error", "field"),
    [
        (lambda: aligned((64, 128)), ArgumentError, "array"),
        (lambda: aligned((64, 512))[:, :256], ArgumentError, "array"),
        (lambda: aligned((64, 256), np.float32), ArgumentError, "array"),
        (lambda: aligned((64, 264)).reshape(-1)[4 : 4 + 64 * 256].reshape(64, 256), DescriptorError, "address"),
        (lambda: 8, DescriptorError, "address"),
        (lambda: -16, DescriptorError, "address"),
        (lambda: aligned((16384,)), ArgumentError, "array"),
        (lambda: ArrayInfo(4096, (64, 256), (512, 2), np.dtype("float16"), 1, None, "cai"), ArgumentError, "array"),
        (lambda: "4096", ArgumentTypeError, "array"),
    ],
)
def test_replace_address_refuses_and_changes_nothing(other: Any, error: Any, field: str) -> None:
    made = TensorMap.from_array(aligned((64, 256)), (8, 64))
    before, owner = bytes(made), made.owner
    with pytest.raises(error) as caught:
        made.replace_address(other())
    assert caught.value.field == field
    assert bytes(made) == before
    assert made.owner is owner


class FakeDriver(SimpleNamespace):
    """A driver that records encode calls. The enumerations and integer types come from cuda.bindings."""

    def __init__(self) -> None:
        real = pytest.importorskip("cuda.bindings.driver", reason="the CUDA bindings are not installed")
        names = [name for name in dir(real) if name.startswith(("CUtensorMap", "cuuint"))]
        super().__init__(**{name: getattr(real, name) for name in names})
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def _answer(self, *args: Any) -> tuple[Any, ...]:
        self.calls.append(args)
        made = self.CUtensorMap()
        made.opaque = [7] * 16
        return (self.code, made)

    cuTensorMapEncodeTiled = cuTensorMapEncodeIm2col = cuTensorMapEncodeIm2colWide = _answer  # noqa: N815


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(map_driver, "_driver", lambda: made)
    return made


def plain(value: Any) -> Any:
    return [int(item) for item in value] if isinstance(value, list) else int(value)


def test_arguments_of_the_tiled_call(fake: FakeDriver) -> None:
    raw = map_driver.encode(ENCODED)
    assert raw == b"\7\0\0\0\0\0\0\0" * 16
    assert [plain(value) for value in fake.calls[0]] == [6, 2, 4096, [256, 64], [512], [64, 8], [1, 1], 0, 3, 0, 0]


def test_rank_1_passes_a_stride_that_is_not_needed(fake: FakeDriver) -> None:
    map_driver.encode(TiledSpec(dtype="float32", dims=(1 << 32,), box=(256,)))
    assert len(fake.calls[0][4]) == 1, "an empty list would become a null pointer"
    assert plain(fake.calls[0][3]) == [1 << 32]


def test_arguments_of_the_im2col_calls(fake: FakeDriver) -> None:
    map_driver.encode(TALL_COLUMN)
    assert [plain(value) for value in fake.calls[0]] == [
        *(9, 4, 0, [64, 14, 9, 4], [128, 1792, 16128], [-1, -2], [1, 2], 64, 32, [1, 1, 1, 1], 0, 0, 0, 0),
    ]
    map_driver.encode(WIDE_ARRAY)
    assert [plain(value) for value in fake.calls[1]] == [
        *(9, 3, 0, [64, 14, 4], [128, 1792], -3, 3, 32, 16, [1, 1, 1], 0, 1, 2, 0, 0),
    ]


def test_driver_results_are_checked(fake: FakeDriver) -> None:
    fake.code = 1
    with pytest.raises(DriverError) as caught:
        map_driver.encode(ENCODED)
    assert (caught.value.call, caught.value.code) == ("cuTensorMapEncodeTiled", 1)


def test_an_old_cuda_python_lacks_wide_maps(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeDriver, "cuTensorMapEncodeIm2colWide")
    with pytest.raises(DriverError) as caught:
        map_driver.encode(WIDE_ARRAY)
    assert (caught.value.call, caught.value.code) == ("cuTensorMapEncodeIm2colWide", None)


@pytest.mark.skipif(map_driver.has_driver(), reason="this machine has a driver")
def test_without_a_driver() -> None:
    assert TensorMap.tiled(ENCODED).encoder == "codec"
    for call in (lambda: TensorMap.tiled(ENCODED, encoder="driver"), lambda: TensorMap.im2col_wide(WIDE_ARRAY)):
        with pytest.raises(DriverError) as caught:
            call()
        assert caught.value.code is None


def test_the_driver_writes_addresses_in_place() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="the CUDA bindings are not installed")
    made = TensorMap.tiled(ENCODED, encoder="codec")
    assert driver.CUtensorMap(made.pointer).getPtr() == made.pointer
