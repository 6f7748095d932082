"""Which instructions may follow or precede one, and what they touch: read off the PTX."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.model import Function, Instruction, Mem, Operand, Reg, Sym

_SHARED_ACCESS = {"ld", "st", "atom", "red", "ldmatrix", "stmatrix", "wgmma", "tensormap"}
_NOT_SHARED = {"global", "local", "param", "const"}
#: Instructions at which all lanes of a warp that it names come together.
_MEETINGS = {
    "shfl",
    "vote",
    "match",
    "redux",
    "elect",
    "movmatrix",
    "stmatrix",
    "ldmatrix",
    "mma",
    "wgmma",
    "tensormap",
}


def touches_memory(instruction: Instruction) -> bool:
    """Whether it reads, writes or copies what another thread may see: shared and global memory, not parameters.

    tensormap.cp_fenceproxy does not count: it releases what it writes.
    """
    parts = instruction.parts
    if "cp_fenceproxy" in parts or (parts[0] == "wgmma" and parts[1] != "mma_async"):
        return False
    if parts[0] in ("ld", "st") and {"local", "param", "const"} & {part.split("::")[0] for part in parts}:
        return False
    return parts[0] in _SHARED_ACCESS or is_copy(instruction)


def touches_shared(instruction: Instruction) -> bool:
    """Whether it reads or writes shared memory, itself or by a copy; mbarriers aside."""
    spaces = {part.split("::")[0] for part in instruction.parts}
    if is_copy(instruction):
        return True
    return instruction.parts[0] in _SHARED_ACCESS and not (_NOT_SHARED & spaces and "shared" not in spaces)


def is_copy(instruction: Instruction) -> bool:
    """cp.async in all its forms, without groups, arrivals and prefetches."""
    parts = set(instruction.parts)
    return instruction.parts[0] == "cp" and not parts & {"commit_group", "wait_group", "wait_all", "arrive", "prefetch"}


def is_bulk_copy(instruction: Instruction) -> bool:
    return is_copy(instruction) and "bulk" in instruction.parts


def is_load(instruction: Instruction) -> bool:
    """A copy into shared memory."""
    spaces = [part.split("::")[0] for part in instruction.parts if part.split("::")[0] in ("global", "shared")]
    return is_copy(instruction) and spaces[:1] == ["shared"]


def is_meeting(instruction: Instruction) -> bool:
    """A warp-wide instruction or a barrier: the lanes of the warp are together there, and see each other's writes. A
    relaxed barrier orders none."""
    parts = instruction.parts
    if parts[0] in ("bar", "barrier"):
        return "relaxed" not in parts
    return parts[0] in _MEETINGS and ("sync" in parts or "aligned" in parts)


def is_release(instruction: Instruction) -> bool:
    """An arrival or a strong write that publishes what came before it."""
    parts = instruction.parts
    if "relaxed" in parts:
        return False
    if parts[0] == "mbarrier":
        return parts[1] in ("arrive", "arrive_drop")
    return bool({"release", "acq_rel"} & set(parts)) and parts[0] in ("st", "atom", "red")


def loaded_parameters(function: Function) -> set[int]:
    """Positions of the parameters whose tensor maps a tensor load reads, as far as copies of addresses show it."""
    sources: dict[int, list[Operand]] = {}
    for instruction in function.body:
        if instruction.parts[0] in ("mov", "cvta", "cvt", "add") and isinstance(instruction.operands[0], Reg):
            sources.setdefault(instruction.operands[0].index, []).extend(instruction.operands[1:])
    names = {parameter.name: position for position, parameter in enumerate(function.params)}
    found: set[int] = set()
    for instruction in function.body:
        if is_load(instruction) and "tensor" in instruction.parts:
            operand = instruction.operands[1]
            if isinstance(operand, Mem):
                found |= {names[name] for name in _symbols(operand.base, sources) if name in names}
    return found


def _symbols(operand: Operand, sources: dict[int, list[Operand]]) -> set[str]:
    """Names that an address may be made of."""
    found: set[str] = set()
    todo, seen = [operand], set()
    while todo:
        here = todo.pop()
        if isinstance(here, Sym):
            found.add(here.name)
        elif isinstance(here, Reg) and here.index not in seen:
            seen.add(here.index)
            todo += sources.get(here.index, [])
    return found


class Graph:
    """Control flow of one function, instruction by instruction."""

    def __init__(self, function: Function) -> None:
        self.body = function.body
        flow = Flow(function)
        count = len(self.body)
        self.after: list[list[int]] = [[at + 1] for at in range(count)]
        begins = {segment.index: segment.start for segment in flow.segments}
        for segment in flow.segments:
            if segment.stop > segment.start:
                self.after[segment.stop - 1] = [begins[s] for s in segment.next if s >= 0 and begins[s] < count]
        self.before: list[list[int]] = [[] for _ in range(count)]
        for at, following in enumerate(self.after):
            self.after[at] = following = [other for other in following if other < count]
            for other in following:
                self.before[other].append(at)

    def walk(self, at: int, forward: bool, stop: Callable[[Instruction], bool]) -> Iterator[tuple[Instruction, bool]]:
        """(instruction, whether it stops the walk) of all that may come after (or before) one, up to the first stops
        on each path."""
        edges = self.after if forward else self.before
        seen: set[int] = set()
        todo = list(edges[at])
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            halts = stop(self.body[here])
            yield self.body[here], halts
            if not halts:
                todo += edges[here]

    def ends_on(self, at: int, forward: bool, wanted: Callable[[Instruction], bool]) -> Instruction | None:
        """The first wanted instruction, where every path comes to one before anything touches memory."""
        found: Instruction | None = None
        for instruction, halts in self.walk(at, forward, lambda i: wanted(i) or touches_memory(i)):
            if halts and not wanted(instruction):
                return None
            if halts:
                found = instruction
            elif forward and instruction.parts[0] in ("ret", "exit") and instruction.guard is None:
                return None
        return found

    def main_path_before(self, at: int) -> Iterator[Instruction]:
        """What runs before an instruction in its loop: back edges where there are any, the text's order elsewhere."""
        seen: set[int] = set()
        while self.before[at] and at not in seen:
            seen.add(at)
            backwards = [other for other in self.before[at] if other > at]
            at = max(backwards) if backwards else max(self.before[at])
            yield self.body[at]

    def places(self, wanted: Callable[[Instruction], bool]) -> list[int]:
        """The positions of these instructions."""
        return [at for at, instruction in enumerate(self.body) if wanted(instruction)]

    def reaches(self, at: int, other: int) -> bool:
        """Whether control may come from one instruction to the other."""
        target = self.body[other]
        return any(instruction is target for instruction, _ in self.walk(at, True, lambda _: False))

    def any_after(self, at: int, wanted: Callable[[Instruction], bool]) -> bool:
        return any(wanted(instruction) for instruction, _ in self.walk(at, True, lambda _: False))

    def any_before(self, at: int, wanted: Callable[[Instruction], bool]) -> bool:
        return any(wanted(instruction) for instruction, _ in self.walk(at, False, lambda _: False))
