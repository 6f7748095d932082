"""The 8 bytes of an mbarrier: what is known of them, in one place.

The PTX ISA calls them opaque. The layout is what an H200 (compute capability 9.0) showed, and it agrees with what
ptxas computes: for ``mbarrier.init`` with count n it stores ``(2**20 - n) << 1`` into the low word and ``(2**20 - n)
<< 11`` into the high one, and ``mbarrier.pending_count`` is ``2**20 - (high >> 11 & 0xfffff)``. All counters count up:
arrivals from ``2**20 - count``, bytes from minus what was announced. A phase whose arrivals are complete while bytes
are pending has 0 in their field, and its parity as before.

The state is not in memory while the barrier lives. On the H200 a plain load, and a bulk copy out of shared memory, saw
what the 8 bytes held before ``mbarrier.init``, whatever had been done to the barrier since; after ``mbarrier.inval`` a
plain load sees the state. ``ptx_templates/probes/mbarrier_bits.cu.j2`` asks a GPU that way, and
``tests/runtime/test_mbarrier_bits_gpu.py`` compares its answers with encode(); ``tests/shared/barrier_states.py`` has
the H200's.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError

#: Most arrivals and bytes of a phase. [PTX ISA, mbarrier]
MAX_COUNT = (1 << 20) - 1
#: Field -> (first bit, bits, where it is known from).
FIELDS: dict[str, tuple[int, int, str]] = {
    "next_arrivals": (1, 20, "H200, and SASS of mbarrier.init from sm_90a to sm_121a: 2**20 - count"),
    "tx_bytes": (21, 21, "H200: signed, minus the announced bytes that have not come"),
    "pending_arrivals": (43, 20, "H200, and SASS of mbarrier.init and .pending_count: 2**20 - pending; 0: none"),
    "parity": (63, 1, "H200: of the current phase"),
}
#: Bits 0 and 42 are in no field; they were 0 in every state that the H200 showed.
UNKNOWN_BITS = 1 << 0 | 1 << 42
#: Compute capabilities of GPUs that have shown this layout.
VERIFIED_ON: tuple[tuple[int, int], ...] = ((9, 0),)
_FULL = 1 << 20


@dataclass(frozen=True, slots=True)
class BarrierBits:
    """A barrier's state.

    arrivals: of the next phase, as mbarrier.init said. pending_arrivals, tx_bytes: what the current phase waits for;
    tx_bytes below 0: more came than was announced. parity: of the current phase, as a wait for it names it. unknown:
    set bits of UNKNOWN_BITS.
    """

    arrivals: int
    pending_arrivals: int
    tx_bytes: int
    parity: int
    unknown: int = 0


def _field(raw: int, name: str) -> int:
    first, bits, _ = FIELDS[name]
    return raw >> first & ((1 << bits) - 1)


def decode(raw: int) -> BarrierBits:
    """The state that 8 bytes, as a little-endian integer, encode. Any 64 bits decode to something.

    Raises ArgumentError for what is no 64-bit number.
    """
    if not 0 <= raw < 1 << 64:
        raise ArgumentError("raw", raw, "64 bits")
    tx, bits = _field(raw, "tx_bytes"), FIELDS["tx_bytes"][1]
    return BarrierBits(
        _FULL - _field(raw, "next_arrivals"),
        (_FULL - _field(raw, "pending_arrivals")) % _FULL,
        (1 << bits) - tx if tx >> (bits - 1) else -tx,
        _field(raw, "parity"),
        raw & UNKNOWN_BITS,
    )


def encode(state: BarrierBits) -> int:
    """The 8 bytes of a state, as an integer. Counters that do not fit lose their upper bits, as in the hardware."""
    values = {
        "next_arrivals": _FULL - state.arrivals,
        "tx_bytes": -state.tx_bytes,
        "pending_arrivals": _FULL - state.pending_arrivals,
        "parity": state.parity,
    }
    raw = state.unknown & UNKNOWN_BITS
    for name, value in values.items():
        first, bits, _ = FIELDS[name]
        raw |= (value & ((1 << bits) - 1)) << first
    return raw


def is_verified(compute_capability: tuple[int, int]) -> bool:
    """Whether such a GPU has shown that the layout is right."""
    return compute_capability in VERIFIED_ON
