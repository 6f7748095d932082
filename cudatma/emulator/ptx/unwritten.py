"""Registers that are read where no path from the entry has written them."""

from __future__ import annotations

from cudatma.emulator.ptx.flow import Flow, bit_set

#: Opcodes that compilers let carry undefined values along: copies, packings, accumulators that are multiplied by 0.
_CARRIERS = {"mov", "wgmma", "mma", "selp", "prmt", "cvt", "bfi", "shfl"}


def unwritten_reads(flow: Flow) -> dict[int, list[tuple[int, int]]]:
    """Segment -> (index in the body, register) of unguarded reads that no definition on any path reaches."""
    body = flow.function.body
    written = []
    for segment in flow.segments:
        written.append(bit_set(r for written, _ in flow.accesses[segment.start : segment.stop] for r in written))
    before = [0] * len(flow.segments)
    changed = True
    while changed:
        changed = False
        for segment in flow.segments:
            after = before[segment.index] | written[segment.index]
            for following in segment.next:
                if following >= 0 and after & ~before[following]:
                    before[following] |= after
                    changed = True
    found: dict[int, list[tuple[int, int]]] = {}
    for segment in flow.segments:
        known = before[segment.index]
        for at in range(segment.start, segment.stop):
            targets, sources = flow.accesses[at]
            if body[at].guard is None and body[at].parts[0] not in _CARRIERS:
                for register in sources:
                    if not known >> register & 1:
                        found.setdefault(segment.index, []).append((at, register))
            known |= bit_set(targets)
    return found
