"""The layout of an mbarrier's 8 bytes: what ptxas computes, what an H200 held, and encode() against decode()."""

from __future__ import annotations

import pytest
from barrier_states import H200, STEPS, states
from hypothesis import given
from hypothesis import strategies as st

from cudatma.errors import ArgumentError
from cudatma.mbarrier_bits import FIELDS, MAX_COUNT, UNKNOWN_BITS, BarrierBits, decode, encode, is_verified

COUNTS = st.integers(1, MAX_COUNT)


@given(COUNTS)
def test_a_fresh_barrier_is_what_ptxas_stores(count: int) -> None:
    """SASS of mbarrier.init: (2**20 - count) << 1 in the low word, << 11 in the high one."""
    low, high = (0x100000 - count) << 1 & 0xFFFFFFFF, (0x100000 - count) << 11 & 0xFFFFFFFF
    assert encode(BarrierBits(count, count, 0, 0)) == high << 32 | low


def test_32_arrivals_as_others_have_read_them() -> None:
    assert encode(BarrierBits(32, 32, 0, 0)) == 0x7FFF0000_001FFFC0


@given(COUNTS, COUNTS)
def test_pending_is_what_ptxas_takes_out_of_a_token(arrivals: int, pending: int) -> None:
    """SASS of mbarrier.pending_count: 2**20 - (high >> 11 & 0xfffff)."""
    high = encode(BarrierBits(arrivals, pending, 0, 0)) >> 32
    assert 0x100000 - (high >> 11 & 0xFFFFF) == pending


@pytest.mark.parametrize(("count", "size"), H200)
def test_what_an_h200_held(count: int, size: int) -> None:
    *high_words, last = H200[count, size]
    wanted = states(count, size)
    for step, high, state in zip(STEPS, high_words, wanted, strict=False):
        assert encode(state) >> 32 == high, step
    state = wanted[len(high_words) - 1]
    assert encode(state) == last
    assert decode(last) == state


@given(
    COUNTS,
    st.integers(0, MAX_COUNT),
    st.integers(-MAX_COUNT, MAX_COUNT),
    st.integers(0, 1),
    st.sampled_from([0, 1, 1 << 42, UNKNOWN_BITS]),
)
def test_decode_reads_what_encode_wrote(arrivals: int, pending: int, tx: int, parity: int, unknown: int) -> None:
    state = BarrierBits(arrivals, pending, tx, parity, unknown)
    assert decode(encode(state)) == state


@given(st.integers(0, (1 << 64) - 1))
def test_any_64_bits_decode_and_come_back(raw: int) -> None:
    assert encode(decode(raw)) == raw


def test_fields_do_not_overlap_and_lie_in_64_bits() -> None:
    taken = [set(range(first, first + bits)) for first, bits, _ in FIELDS.values()]
    assert sum(map(len, taken)) == len(set().union(*taken)) == 62
    assert sum(1 << bit for bits in taken for bit in bits) == ((1 << 64) - 1) & ~UNKNOWN_BITS


def test_what_is_no_64_bit_number_is_refused() -> None:
    for raw in (-1, 1 << 64):
        with pytest.raises(ArgumentError, match=r"2\*\*64"):
            decode(raw)


def test_only_the_gpu_that_answered_is_verified() -> None:
    assert is_verified((9, 0)) is True
    assert is_verified((12, 0)) is False
