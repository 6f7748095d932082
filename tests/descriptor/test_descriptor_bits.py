"""Each bit by name, and two maps against each other: nothing is lost, nothing is named wrongly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.descriptor import Im2colSpec, Im2colWideSpec, TensorMap, TiledSpec, codec
from cudatma.descriptor import driver as map_driver
from cudatma.descriptor.bits import ALLOCATION_BIT, Evidence, compare, explain, field_at
from cudatma.errors import DescriptorError, DriverError

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


def test_wrong_lengths() -> None:
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
    assert "not verified" in str(found)
