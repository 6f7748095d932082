"""Steps of ``probes/mbarrier_bits.cu.j2``, the barrier's state after each step, and its bits on an H200."""

from __future__ import annotations

from cudatma.mbarrier_bits import BarrierBits

#: Pairs of arrival count and announced bytes. The probe needs at least 3 arrivals and 17 bytes.
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
    "last arrives, bytes pending",
    "complete_tx 16 rest",
)
#: Value that the probe writes to memory before it initializes a barrier there.
UNTOUCHED = 0x1122334455667788


def states(count: int, size: int) -> list[BarrierBits]:
    """Return the counters that the PTX ISA specifies after each of STEPS. [PTX ISA, mbarrier]"""
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
        (0, 16, 1),
        (count, 0, 0),
    ]
    return [BarrierBits(count, pending, tx, parity) for pending, tx, parity in left]


# Measured on an H200 in November 2026.
_ANSWERS = """
3 1024 7fffe800 7ffff000 7ffff3ff 7ffffbff 7ffffbff 000003ff ffffe800 fffff000 fffff000 fffff3ff fffff3fffe1ffffa
4 17 7fffe000 7fffe800 7fffebff 7ffffbff 7ffffbff 000003ff ffffe000 ffffe800 ffffe800 ffffebff ffffebfffe1ffff8
32 4096 7fff0000 7fff0800 7fff0bfe 7ffffbfe 7ffffbfe 000003fe ffff0000 ffff0800 ffff0800 ffff0bff ffff0bfffe1fffc0
255 1048475 7ff80800 7ff81000 7ff81200 7ffffa00 7ffffa00 00000200 fff80800 fff81000 fff81000 fff813ff fff813fffe1ffe02
1048575 65536 00000800 00001000 000013e0 7ffffbe0 7ffffbe0 000003e0 80000800 80001000 80001000 800013ff 800013fffe000002
"""
#: Maps (arrivals, bytes) to the high words after each of the first ten STEPS, and to all 64 bits after the tenth. The
#: high words were returned by an arrive with count 0, which PTX does not allow. It changed nothing, and the low word of
#: its result had no meaning. The 64 bits were read by an ordinary load after mbarrier.inval.
H200: dict[tuple[int, int], list[int]] = {
    (int(count), int(size)): [int(word, 16) for word in words]
    for count, size, *words in map(str.split, _ANSWERS.strip().splitlines())
}
