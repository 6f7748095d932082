"""Instructions in PTX source: their positions, the control flow between them, and their memory accesses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.model import Function, Instruction, Mem, Operand, Reg, Sym
from cudatma.emulator.ptx.parser import parse

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_GUARD = re.compile(r"@\s*!?\s*[\w$%]+\s*$")


@dataclass(frozen=True, slots=True)
class Site:
    """An instruction and its position in the text.

    Parameters
    ----------
    instruction : Instruction
        The parsed instruction.
    at : int
        Index of the instruction in the function's body.
    start, end : int
        Index of the statement's first character, including the guard, and of the character after the semicolon.
    guard : str
        ``"@%p1 "`` or "".
    operands : tuple of str
        Operands as written in the text.
    """

    function: Function
    at: int
    instruction: Instruction
    start: int
    end: int
    guard: str
    operands: tuple[str, ...]

    @property
    def opcode(self) -> str:
        return self.instruction.opcode

    @property
    def parts(self) -> tuple[str, ...]:
        return self.instruction.parts

    @property
    def line(self) -> int:
        return self.instruction.line

    def spelled(self, operands: tuple[str, ...], opcode: str = "") -> str:
        """Return the statement with other operands and, optionally, another opcode."""
        return f"{self.guard}{opcode or self.opcode} {', '.join(operands)};"


def without_comments(ptx: str) -> str:
    """Return the text with comments replaced by blanks. All other characters keep their positions."""
    return _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment.group()), ptx)


def sites_of(ptx: str) -> list[Site]:
    """Return all instructions of a module in the order of the text. Raises PtxError if the PTX is invalid."""
    text = without_comments(ptx)
    begins = [0] + [newline.end() for newline in re.finditer("\n", text)]
    searched: dict[int, int] = {}
    sites: list[Site] = []
    for function in parse(ptx).functions.values():
        for at, instruction in enumerate(function.body):
            sites.append(_locate(text, begins, searched, function, at, instruction))
    return sorted(sites, key=lambda site: site.start)


def _locate(
    text: str, begins: list[int], searched: dict[int, int], function: Function, at: int, instruction: Instruction
) -> Site:
    """Find an instruction in its source line. Instructions of the same line must be located in order."""
    line, opcode = instruction.line, instruction.opcode
    pattern = re.compile(rf"(?<![\w$%.:]){re.escape(opcode)}(?![\w$.:])")
    match = pattern.search(text, searched.get(line, begins[line - 1]))
    end = text.find(";", match.end()) if match else -1
    if match is None or end < 0:
        raise PtxError(f"`{opcode}` is not on the line that the parser reported", line, text=instruction.text)
    searched[line] = end + 1
    guard = _GUARD.search(text, max(0, match.start() - 200), match.start()) if instruction.guard else None
    start = guard.start() if guard else match.start()
    operands = tuple(split_operands(text[match.end() : end]))
    return Site(function, at, instruction, start, end + 1, text[start : match.start()], operands)


def split_operands(text: str) -> Iterator[str]:
    """Yield the operands of an operand list. Commas inside brackets do not separate operands."""
    depth, begin = 0, 0
    for position, character in enumerate(text):
        depth += character in "[{(" or -(character in "]})")
        if character == "," and not depth:
            yield text[begin:position].strip()
            begin = position + 1
    if text[begin:].strip():
        yield text[begin:].strip()


_SHARED_ACCESS = {"ld", "st", "atom", "red", "ldmatrix", "stmatrix", "wgmma", "tensormap"}
_NOT_SHARED = {"global", "local", "param", "const"}
#: Instructions that synchronize the lanes of a warp.
_WARP_SYNCHRONIZING = {
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
    """Return whether an instruction reads, writes or copies shared or global memory other than parameters.

    tensormap.cp_fenceproxy, which releases its own write, does not count.
    """
    parts = instruction.parts
    if "cp_fenceproxy" in parts or (parts[0] == "wgmma" and parts[1] != "mma_async"):
        return False
    if parts[0] in ("ld", "st") and {"local", "param", "const"} & {part.split("::")[0] for part in parts}:
        return False
    return parts[0] in _SHARED_ACCESS or is_copy(instruction)


def touches_shared(instruction: Instruction) -> bool:
    """Return whether an instruction reads or writes shared memory other than mbarriers, directly or by a copy."""
    spaces = {part.split("::")[0] for part in instruction.parts}
    if is_copy(instruction):
        return True
    return instruction.parts[0] in _SHARED_ACCESS and not (_NOT_SHARED & spaces and "shared" not in spaces)


def is_copy(instruction: Instruction) -> bool:
    """Return whether this is a cp.async that copies data, as opposed to a commit, wait, arrive or prefetch."""
    parts = set(instruction.parts)
    return instruction.parts[0] == "cp" and not parts & {"commit_group", "wait_group", "wait_all", "arrive", "prefetch"}


def is_bulk_copy(instruction: Instruction) -> bool:
    return is_copy(instruction) and "bulk" in instruction.parts


def is_load(instruction: Instruction) -> bool:
    """Return whether an instruction is a copy into shared memory."""
    spaces = [part.split("::")[0] for part in instruction.parts if part.split("::")[0] in ("global", "shared")]
    return is_copy(instruction) and spaces[:1] == ["shared"]


def synchronizes_warp(instruction: Instruction) -> bool:
    """Return whether an instruction synchronizes the lanes of a warp and makes their writes visible to each other.

    A relaxed barrier synchronizes the lanes but does not make writes visible.
    """
    parts = instruction.parts
    if parts[0] in ("bar", "barrier"):
        return "relaxed" not in parts
    return parts[0] in _WARP_SYNCHRONIZING and ("sync" in parts or "aligned" in parts)


def is_release(instruction: Instruction) -> bool:
    """Return whether an instruction publishes earlier writes (an arrival or a strong write)."""
    parts = instruction.parts
    if "relaxed" in parts:
        return False
    if parts[0] == "mbarrier":
        return parts[1] in ("arrive", "arrive_drop")
    return bool({"release", "acq_rel"} & set(parts)) and parts[0] in ("st", "atom", "red")


def loaded_parameters(function: Function) -> set[int]:
    """Return the positions of the parameters that tensor loads use as tensor maps, directly or through copies."""
    sources: dict[int, list[Operand]] = {}
    for instruction in function.body:
        if instruction.parts[0] in ("mov", "cvta", "cvt", "add") and isinstance(instruction.operands[0], Reg):
            sources.setdefault(instruction.operands[0].index, []).extend(instruction.operands[1:])
    names = {parameter.name: position for position, parameter in enumerate(function.params)}
    positions: set[int] = set()
    for instruction in function.body:
        if is_load(instruction) and "tensor" in instruction.parts:
            operand = instruction.operands[1]
            if isinstance(operand, Mem):
                positions |= {names[name] for name in _symbols(operand.base, sources) if name in names}
    return positions


def _symbols(operand: Operand, sources: dict[int, list[Operand]]) -> set[str]:
    """Return the names of all symbols from which an address may be computed."""
    names: set[str] = set()
    todo, seen = [operand], set()
    while todo:
        here = todo.pop()
        if isinstance(here, Sym):
            names.add(here.name)
        elif isinstance(here, Reg) and here.index not in seen:
            seen.add(here.index)
            todo += sources.get(here.index, [])
    return names


class Graph:
    """Control-flow graph of a function with one node per instruction."""

    def __init__(self, function: Function) -> None:
        self.function, self.body = function, function.body
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
        """Yield the instructions that may follow or precede ``at``, each with the result of ``stop``.

        Paths end at instructions for which ``stop`` returns True.
        """
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

    def ends_on(self, at: int, forward: bool, matches: Callable[[Instruction], bool]) -> Instruction | None:
        """Return a matching instruction if every path reaches one before any memory access, otherwise None."""
        last: Instruction | None = None
        for instruction, halts in self.walk(at, forward, lambda i: matches(i) or touches_memory(i)):
            if halts and not matches(instruction):
                return None
            if halts:
                last = instruction
            elif forward and instruction.parts[0] in ("ret", "exit") and instruction.guard is None:
                return None
        return last

    def main_path_before(self, at: int) -> Iterator[Instruction]:
        """Yield the instructions before another one, nearest first. Inside a loop, follow the loop's back edge."""
        seen: set[int] = set()
        while self.before[at] and at not in seen:
            seen.add(at)
            backwards = [other for other in self.before[at] if other > at]
            at = max(backwards) if backwards else max(self.before[at])
            yield self.body[at]

    def places(self, matches: Callable[[Instruction], bool]) -> list[int]:
        """Return the indices of all matching instructions."""
        return [at for at, instruction in enumerate(self.body) if matches(instruction)]

    def reaches(self, at: int, other: int) -> bool:
        """Return whether control may flow from one instruction to another."""
        target = self.body[other]
        return any(instruction is target for instruction, _ in self.walk(at, True, lambda _: False))

    def any_after(self, at: int, matches: Callable[[Instruction], bool]) -> bool:
        return any(matches(instruction) for instruction, _ in self.walk(at, True, lambda _: False))

    def any_before(self, at: int, matches: Callable[[Instruction], bool]) -> bool:
        return any(matches(instruction) for instruction, _ in self.walk(at, False, lambda _: False))
