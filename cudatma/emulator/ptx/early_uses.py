"""Search for registers that are used too early: reads before any write, and wgmma operands without a fence.

A wgmma.fence must precede the first wgmma.mma_async, and every wgmma.mma_async whose registers (accumulators, fragments
of A) other instructions have written. Compilers sometimes move such writes after the fence of a group. The assembler
repairs such code unless the group has no fence. Source: PTX ISA, "wgmma.fence".
"""

from __future__ import annotations

from cudatma.emulator.ptx.flow import Flow, Segment, bit_set, registers_of
from cudatma.emulator.ptx.model import Instruction, Reg, Vec

#: Opcodes to which compilers pass undefined values: copies, packing, and accumulators that are multiplied by 0.
_CARRIERS = {"mov", "wgmma", "mma", "selp", "prmt", "cvt", "bfi", "shfl"}


def unwritten_reads(flow: Flow) -> dict[int, list[tuple[int, int]]]:
    """Map each segment to its unguarded reads that no write reaches, as (index in the body, register)."""
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
    early: dict[int, list[tuple[int, int]]] = {}
    for segment in flow.segments:
        defined = before[segment.index]
        for at in range(segment.start, segment.stop):
            targets, sources = flow.accesses[at]
            if body[at].guard is None and body[at].parts[0] not in _CARRIERS:
                for register in sources:
                    if not defined >> register & 1:
                        early.setdefault(segment.index, []).append((at, register))
            defined |= bit_set(targets)
    return early


def unfenced_wgmmas(flow: Flow) -> dict[int, int]:
    """Map the index of each wgmma to the bit set of its registers that some path writes without a fence.

    A copy counts as fenced if its source is fenced, because compilers rename accumulators by copying them. Constants
    always count as fenced.
    """
    if not any(instruction.parts[:2] == ("wgmma", "mma_async") for instruction in flow.function.body):
        return {}
    before: list[_State | None] = [None] * len(flow.segments)
    before[0] = (0, True)
    todo = [0]
    unfenced: dict[int, int] = {}
    while todo:
        segment = flow.segments[todo.pop()]
        state = before[segment.index]
        dirty, bare = _through(flow, segment, state or (0, True), unfenced)
        for following in segment.next:
            if following < 0:
                continue
            known = before[following]
            joined = (dirty, bare) if known is None else (dirty | known[0], bare or known[1])
            if joined != known:
                before[following] = joined
                todo.append(following)
    return unfenced


#: Registers that may have been written since the last fence, and whether a path has no fence since the last commit.
_State = tuple[int, bool]


def _through(flow: Flow, segment: Segment, state: _State, unfenced: dict[int, int]) -> _State:
    """Return the state after a segment, and record the wgmmas that use unfenced registers in ``unfenced``."""
    dirty, bare = state
    for at in range(segment.start, segment.stop):
        instruction = flow.function.body[at]
        if instruction.parts[0] != "wgmma":
            dirty = _written(instruction, *flow.accesses[at], dirty)
        elif instruction.parts[1] == "fence":
            dirty, bare = 0, False
        elif instruction.parts[1] == "commit_group":
            bare = True
        elif instruction.parts[1] == "mma_async":
            accumulators = bit_set(registers_of(instruction.operands[0]))
            fragment = instruction.operands[1]
            used = accumulators | (bit_set(registers_of(fragment)) if isinstance(fragment, Vec) else 0)
            if bare and dirty & used:
                unfenced[at] = unfenced.get(at, 0) | (dirty & used)
            dirty &= ~accumulators
    return dirty, bare


def _written(instruction: Instruction, written: list[int], read: list[int], dirty: int) -> int:
    """Return the unfenced registers after an instruction other than wgmma."""
    targets = bit_set(written)
    is_copy = instruction.parts[0] == "mov" and all(isinstance(operand, Reg) for operand in instruction.operands[:1])
    if not is_copy or any(dirty >> register & 1 for register in read):
        return dirty | targets
    return dirty if instruction.guard else dirty & ~targets
