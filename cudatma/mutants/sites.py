"""The position of each instruction in a PTX text, to the character, and how its operands are spelled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.model import Function, Instruction
from cudatma.emulator.ptx.parser import parse

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_GUARD = re.compile(r"@\s*!?\s*[\w$%]+\s*$")


@dataclass(frozen=True, slots=True)
class Site:
    """One instruction. at: its index in the function's body. start, end: its characters, guard and semicolon included.

    guard: ``"@%p1 "`` or "". operands: as written.
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
        """The statement with other operands, and another opcode."""
        return f"{self.guard}{opcode or self.opcode} {', '.join(operands)};"


def without_comments(ptx: str) -> str:
    """The text with blanks for its comments: every other character stays where it is."""
    return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), ptx)


def sites_of(ptx: str) -> list[Site]:
    """Every instruction of the functions that a module defines, in the order of the text. Raises PtxError."""
    text = without_comments(ptx)
    begins = [0] + [found.end() for found in re.finditer("\n", text)]
    searched: dict[int, int] = {}
    found: list[Site] = []
    for function in parse(ptx).functions.values():
        for at, instruction in enumerate(function.body):
            found.append(_locate(text, begins, searched, function, at, instruction))
    return sorted(found, key=lambda site: site.start)


def _locate(
    text: str, begins: list[int], searched: dict[int, int], function: Function, at: int, instruction: Instruction
) -> Site:
    """The parser knows the line; instructions of one line come in the order of the text."""
    line, opcode = instruction.line, instruction.opcode
    pattern = re.compile(rf"(?<![\w$%.:]){re.escape(opcode)}(?![\w$.:])")
    found = pattern.search(text, searched.get(line, begins[line - 1]))
    end = text.find(";", found.end()) if found else -1
    if found is None or end < 0:
        raise PtxError(f"`{opcode}` is not found where the parser saw it", line, text=instruction.text)
    searched[line] = end + 1
    guard = _GUARD.search(text, max(0, found.start() - 200), found.start()) if instruction.guard else None
    start = guard.start() if guard else found.start()
    operands = tuple(split_operands(text[found.end() : end]))
    return Site(function, at, instruction, start, end + 1, text[start : found.start()], operands)


def split_operands(text: str) -> Iterator[str]:
    """Operands between the commas that are in no bracket."""
    depth, begin = 0, 0
    for position, character in enumerate(text):
        depth += character in "[{(" or -(character in "]})")
        if character == "," and not depth:
            yield text[begin:position].strip()
            begin = position + 1
    if text[begin:].strip():
        yield text[begin:].strip()
