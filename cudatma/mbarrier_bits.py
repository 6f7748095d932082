"""Known layout of the 8 bytes of an mbarrier.

The PTX ISA calls these bytes opaque. The layout was observed on an H200 (compute capability 9.0) and agrees with the
code that ptxas generates. ``mbarrier.init`` with count n stores ``(2**20 - n) << 1`` into the low word and ``(2**20 -
n) << 11`` into the high word, and ``mbarrier.pending_count`` is ``2**20 - (high >> 11 & 0xfffff)``. All counters count
up. The arrival counter starts at ``2**20 - count``, and the byte counter starts at minus the number of announced bytes.
If all arrivals of a phase are complete while bytes are pending, the number of pending arrivals is 0, and the parity
does not change yet.

While the barrier is active, memory does not contain its state. On the H200, an ordinary load and a bulk copy out of
shared memory return the 8 bytes from before ``mbarrier.init``. After ``mbarrier.inval``, an ordinary load returns the
state. ``ptx_templates/probes/mbarrier_bits.cu.j2`` reads the state in this way,
``tests/runtime/test_mbarrier_bits_gpu.py`` compares the result with encode(), and ``tests/shared/barrier_states.py``
contains the states that were read on the H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError

#: Maximum number of arrivals per phase, and of bytes per phase. [PTX ISA, mbarrier]
MAX_COUNT = (1 << 20) - 1
#: Maps each field to (first bit, number of bits, evidence).
FIELDS: dict[str, tuple[int, int, str]] = {
    "next_arrivals": (1, 20, "2**20 - count (H200; SASS of mbarrier.init for sm_90a to sm_121a)"),
    "tx_bytes": (21, 21, "signed; minus the number of announced bytes that have not arrived (H200)"),
    "pending_arrivals": (43, 20, "2**20 - pending, or 0 for none (H200; SASS of mbarrier.init and .pending_count)"),
    "parity": (63, 1, "parity of the current phase (H200)"),
}
#: Bits outside all fields. They were 0 in every state that was read on the H200.
UNKNOWN_BITS = 1 << 0 | 1 << 42
#: Compute capabilities on which the layout was verified.
VERIFIED_ON: tuple[tuple[int, int], ...] = ((9, 0),)
_FULL = 1 << 20


@dataclass(frozen=True, slots=True)
class BarrierBits:
    """State of an mbarrier.

    Attributes
    ----------
    arrivals : int
        Arrival count of the next phase, as passed to mbarrier.init.
    pending_arrivals : int
        Number of pending arrivals of the current phase.
    tx_bytes : int
        Number of pending bytes of the current phase, negative if more bytes arrived than were announced.
    parity : int
        Parity of the current phase. A wait for this phase passes this parity.
    unknown : int, default: 0
        Bits of UNKNOWN_BITS that are set.
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
    """Return the state that 8 bytes encode.

    ``raw`` is the little-endian integer of the bytes. Every 64-bit number encodes a state. Raises ArgumentError if the
    number has more than 64 bits.
    """
    if not 0 <= raw < 1 << 64:
        raise ArgumentError("raw", raw, "0 to 2**64 - 1")
    tx, bits = _field(raw, "tx_bytes"), FIELDS["tx_bytes"][1]
    return BarrierBits(
        _FULL - _field(raw, "next_arrivals"),
        (_FULL - _field(raw, "pending_arrivals")) % _FULL,
        (1 << bits) - tx if tx >> (bits - 1) else -tx,
        _field(raw, "parity"),
        raw & UNKNOWN_BITS,
    )


def encode(state: BarrierBits) -> int:
    """Return the 8 bytes of a state as an integer. Counters that do not fit lose their upper bits, as in hardware."""
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
    """Return whether the layout was verified on GPUs of this compute capability."""
    return compute_capability in VERIFIED_ON
