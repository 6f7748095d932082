"""Shared-memory arithmetic: swizzles against the PTX ISA's tables, footprints and banks by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudatma.errors import ArgumentError, DescriptorError
from cudatma.layout import (
    Interleave,
    Swizzle,
    bank_conflicts,
    box_layout,
    interleaved_layout,
    required_alignment,
    swizzle,
    to_tma_order,
    traversed,
    wavefronts,
)

# PTX ISA 5.5.7: which 16-byte chunk of a 128-byte line stands at each place, line by line until the pattern repeats.
CHUNK_TABLES = {
    Swizzle.NONE: ["01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        *("01234567", "10325476", "23016745", "32107654"),
        *("45670123", "54761032", "67452301", "76543210"),
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_32B_FLIP_8B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}


def place_by_table(address: int, mode: Swizzle) -> int:
    """The byte's place looked up in the printed table instead of computed by XOR."""
    line, offset = divmod(address, 128)
    chunk, byte = divmod(offset, 16)
    table = CHUNK_TABLES[mode]
    if mode is Swizzle.B128_ATOM_32B_FLIP_8B and line % 2:
        byte = byte + 8 if byte < 8 else byte - 8
    return line * 128 + table[line % len(table)].index(str(chunk)) * 16 + byte


@pytest.mark.parametrize("mode", list(Swizzle))
def test_swizzle_matches_the_printed_tables(mode: Swizzle) -> None:
    addresses = np.arange(4096, dtype=np.int64)
    expected = np.array([place_by_table(int(a), mode) for a in addresses])
    np.testing.assert_array_equal(swizzle(addresses, mode), expected)
    assert [swizzle(int(a), mode) for a in addresses] == expected.tolist()


@given(address=st.integers(0, 1 << 40), mode=st.sampled_from(Swizzle))
def test_swizzle_is_its_own_inverse_and_stays_in_its_line(address: int, mode: Swizzle) -> None:
    there = swizzle(address, mode)
    assert swizzle(there, mode) == address
    assert there // 128 == address // 128


def test_swizzle_counts_from_absolute_addresses() -> None:
    # A buffer that starts on an odd line begins with the second line of the pattern.
    assert swizzle(128, Swizzle.B128) == 128 + 16
    assert swizzle(128 + 16, Swizzle.B32) == 128


@pytest.mark.parametrize(
    ("mode", "span", "alignment"),
    [
        (Swizzle.NONE, 0, 128),
        (Swizzle.B32, 32, 256),
        (Swizzle.B64, 64, 512),
        (Swizzle.B128, 128, 1024),
        (Swizzle.B128_ATOM_32B, 128, 1024),
        (Swizzle.B128_ATOM_32B_FLIP_8B, 128, 1024),
        (Swizzle.B128_ATOM_64B, 128, 1024),
    ],
)
def test_spans_and_alignment(mode: Swizzle, span: int, alignment: int) -> None:
    assert mode.span_bytes == span
    assert required_alignment(mode) == alignment
    assert mode.is_atom == ("ATOM" in mode.label)


# Worked by hand: 16 fp16 are 32 bytes, padded to a 128-byte pitch; 64 fp16 fill it.
@pytest.mark.parametrize(
    ("counts", "bits", "mode", "expected", "footprint"),
    [
        ((64, 8), 16, Swizzle.B128, 1024, 1024),
        ((16, 8), 16, Swizzle.B128, 256, 1024),
        ((16, 8), 16, Swizzle.NONE, 256, 256),
        ((8, 3, 5), 32, Swizzle.B64, 480, 960),
        ((256, 4), 64, Swizzle.NONE, 8192, 8192),
        ((32, 2), 4, Swizzle.NONE, 32, 32),
        ((16,), 8, Swizzle.B32, 16, 32),
    ],
)
def test_box_layout(counts: tuple[int, ...], bits: int, mode: Swizzle, expected: int, footprint: int) -> None:
    layout = box_layout(counts, bits, mode)
    assert (layout.expected_bytes, layout.footprint_bytes) == (expected, footprint)


def test_interleaved_rows_have_no_gaps_and_end_with_a_whole_span() -> None:
    layout = interleaved_layout(2, 5, Interleave.B16, Swizzle.B128)
    assert (layout.expected_bytes, layout.footprint_bytes) == (160, 256)
    layout = interleaved_layout(3, 5, Interleave.B32, Swizzle.B32)
    assert (layout.expected_bytes, layout.footprint_bytes) == (480, 480)
    layout = interleaved_layout(3, 5, Interleave.B16)
    assert (layout.expected_bytes, layout.footprint_bytes) == (240, 240)


def test_traversed_rounds_up_and_ignores_the_inner_step() -> None:
    assert traversed((64, 7, 8), (4, 2, 3), Interleave.NONE) == (64, 4, 3)
    assert traversed((64, 7, 8), (4, 2, 3), Interleave.B16) == (16, 4, 3)


def test_tma_order_is_numpy_order_reversed() -> None:
    assert to_tma_order((5, 6, 7)) == (7, 6, 5)


def brute_wavefronts(addresses: list[int | None], access_bytes: int) -> int:
    """Serve the lanes greedily: count, bank by bank, the different words that a group of lanes wants from it."""
    group = {16: 8, 8: 16}.get(access_bytes, 32)
    total = 0
    for start in range(0, len(addresses), group):
        wanted: dict[int, set[int]] = {}
        for address in addresses[start : start + group]:
            for byte in range(access_bytes) if address is not None else ():
                word = (address + byte) // 4
                wanted.setdefault(word % 32, set()).add(word)
        total += max((len(words) for words in wanted.values()), default=0)
    return total


def test_bank_conflicts_by_hand() -> None:
    assert bank_conflicts([4 * lane for lane in range(32)], 4) == 0
    assert bank_conflicts([128 * lane for lane in range(32)], 4) == 31
    assert bank_conflicts([8 * lane for lane in range(32)], 4) == 1
    assert bank_conflicts([0] * 32, 4) == 0, "one word is broadcast"
    assert bank_conflicts([16 * lane for lane in range(32)], 16) == 0
    assert wavefronts([16 * lane for lane in range(32)], 16) == (4, 4)
    # Eight rows of 128 bytes read at the same column: 8-way conflict, which the 128B swizzle removes.
    column = [128 * row for row in range(8)]
    assert bank_conflicts(column, 16) == 7
    assert bank_conflicts([swizzle(address, Swizzle.B128) for address in column], 16) == 0
    assert bank_conflicts([None] * 32, 4) == 0


@given(data=st.data(), access_bytes=st.sampled_from([1, 2, 4, 8, 16]))
def test_wavefronts_against_brute_force(data: st.DataObject, access_bytes: int) -> None:
    lane = st.one_of(st.none(), st.integers(0, 4096 // access_bytes).map(lambda n: n * access_bytes))
    addresses = data.draw(st.lists(lane, max_size=32))
    total, least = wavefronts(addresses, access_bytes)
    assert total == brute_wavefronts(addresses, access_bytes)
    assert 0 <= least <= total


@pytest.mark.parametrize(
    ("addresses", "access_bytes", "field"),
    [([0], 3, "access_bytes"), ([2], 4, "addresses[0]"), ([0, -4], 4, "addresses[1]"), ([0] * 33, 4, "addresses")],
)
def test_bank_conflicts_refuses(addresses: list[int], access_bytes: int, field: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        bank_conflicts(addresses, access_bytes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("128B", Swizzle.B128),
        ("128b", Swizzle.B128),
        ("none", Swizzle.NONE),
        (" 128b_atom_32b_flip_8b ", Swizzle.B128_ATOM_32B_FLIP_8B),
        (6, Swizzle.B128_ATOM_64B),
        (Swizzle.B64, Swizzle.B64),
    ],
)
def test_modes_parse(value: object, mode: Swizzle) -> None:
    assert Swizzle.parse(value, "swizzle") is mode


def test_labels() -> None:
    assert [mode.label for mode in Swizzle] == [
        *("none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B"),
    ]
    assert [mode.label for mode in Interleave] == ["none", "16B", "32B"]


@pytest.mark.parametrize("value", ["256B", 7, -1, True, None, 1.0, Interleave.B16, b"128B"])
def test_modes_refuse(value: object) -> None:
    with pytest.raises(DescriptorError) as caught:
        Swizzle.parse(value, "swizzle")
    assert caught.value.field == "swizzle"
