"""The 8 bytes of an mbarrier: what is known of them, in one place.

The PTX ISA calls them opaque. Two instructions give most of them away, because ptxas makes plain arithmetic of them:
for ``mbarrier.init`` with count n it stores ``(2**20 - n) << 1`` into the low word and ``(2**20 - n) << 11`` into the
high one, and ``mbarrier.pending_count`` is ``2**20 - (high >> 11 & 0xfffff)``. Both counters therefore count up to an
overflow, and that of the pending arrivals overflows into the highest bit, the phase. Where the pending bytes stand is
inferred from what is left; how a phase looks whose arrivals are complete while bytes are pending is not known.
``ptx_templates/probes/mbarrier_bits.cu.j2`` asks a card; ``tests/gpu/test_mbarrier_bits_gpu.py`` compares its answer
with encode().
"""

from __future__ import annotations

from dataclasses import dataclass

from cudatma.errors import ArgumentError

#: Most arrivals and bytes of a phase. [PTX ISA, mbarrier]
MAX_COUNT = (1 << 20) - 1
#: Field -> (first bit, bits, where it is known from).
FIELDS: dict[str, tuple[int, int, str]] = {
    "next_arrivals": (1, 20, "SASS of mbarrier.init, sm_90a to sm_121a: 2**20 - count"),
    "tx_bytes": (21, 22, "inferred: the bits between; signed, announced bytes that have not come"),
    "pending_arrivals": (43, 20, "SASS of mbarrier.init and mbarrier.pending_count: 2**20 - pending"),
    "parity": (63, 1, "inferred: what the pending arrivals overflow into"),
}
#: Compute capabilities of cards that answered the probe as encode() says.
VERIFIED_ON: tuple[tuple[int, int], ...] = ()
_FULL = 1 << 20


@dataclass(frozen=True, slots=True)
class BarrierBits:
    """A barrier's state.

    arrivals: of the next phase, as mbarrier.init said. pending_arrivals, tx_bytes: what the current phase waits for;
    tx_bytes below 0: more came than was announced. parity: of the current phase, as a wait for it names it. unknown:
    set bits of no field.
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
    """The state that 8 bytes, as a little-endian integer, stand for. Any 64 bits decode to something.

    Raises ArgumentError for what is no 64-bit number.
    """
    if not 0 <= raw < 1 << 64:
        raise ArgumentError("raw", raw, "64 bits")
    tx, bits = _field(raw, "tx_bytes"), FIELDS["tx_bytes"][1]
    return BarrierBits(
        _FULL - _field(raw, "next_arrivals"),
        (_FULL - _field(raw, "pending_arrivals")) % _FULL,
        tx - (1 << bits) if tx >> (bits - 1) else tx,
        _field(raw, "parity"),
        raw & 1,
    )


def encode(state: BarrierBits) -> int:
    """The 8 bytes of a state, as an integer. Counters that do not fit lose their upper bits, as in the hardware."""
    values = {
        "next_arrivals": _FULL - state.arrivals,
        "tx_bytes": state.tx_bytes,
        "pending_arrivals": _FULL - state.pending_arrivals,
        "parity": state.parity,
    }
    raw = state.unknown & 1
    for name, value in values.items():
        first, bits, _ = FIELDS[name]
        raw |= (value & ((1 << bits) - 1)) << first
    return raw


def is_verified(compute_capability: tuple[int, int]) -> bool:
    """Whether such a card has shown that the layout is right."""
    return compute_capability in VERIFIED_ON
