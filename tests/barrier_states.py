"""What ``probes/mbarrier_bits.cu.j2`` does to its barrier, step by step, and the state after each step."""

from __future__ import annotations

from cudatma.mbarrier_bits import BarrierBits

#: (barrier's arrivals, announced bytes); the probe needs 3 and more of the one and 17 and more of the other.
CASES = ((3, 1024), (4, 17), (32, 4096), (255, (1 << 20) - 1), ((1 << 20) - 1, 65536))
STEPS = (
    "init",
    "arrive",
    "expect_tx",
    "arrive count - 2",
    "complete_tx 16",
    "last arrive, bytes pending",
    "complete_tx rest",
    "arrive in the next phase",
    "complete_tx 32 unannounced",
    "expect_tx 48",
)


def states(count: int, size: int) -> list[BarrierBits]:
    """The PTX ISA's counters after each of STEPS. [PTX ISA, mbarrier]"""
    left = [
        (count, 0, 0),
        (count - 1, 0, 0),
        (count - 1, size, 0),
        (1, size, 0),
        (1, size - 16, 0),
        (0, size - 16, 0),
        (count, 0, 1),
        (count - 1, 0, 1),
        (count - 1, -32, 1),
        (count - 1, 16, 1),
    ]
    return [BarrierBits(count, pending, tx, parity) for pending, tx, parity in left]
