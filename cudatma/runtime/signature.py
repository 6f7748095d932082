"""The parameters of a kernel, read from its PTX: how many, how wide, integer or floating point. Pure.

Source: PTX ISA, "Kernel Function Parameters" and ".entry".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cudatma.errors import CompileError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
#: Anchored at the line's start: a whole PTX is searched in a millisecond, and a comment is not mistaken for a kernel.
_ENTRY = re.compile(r"^(?:[ \t]*\.(?:visible|weak))?[ \t]*\.entry[ \t]+([\w$%]+)\s*(?:\(([^)]*)\))?", re.MULTILINE)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z])(\d+)\s+"
    r"(?:\.ptr\s+(?:\.(?:global|shared|const|local|param)\s+)?(?:\.align\s+\d+\s+)?)?"
    r"([\w$%]+)\s*(?:\[\s*(\d+)\s*\])?\s*$"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    kind: "int" (integers, booleans and pointers), "float", or "bytes" for a structure or array passed by value, such as
    a tensor map or a __half. size_bytes: its width. name: as in the PTX.
    """

    name: str
    kind: str
    size_bytes: int

    @property
    def is_pointer_wide(self) -> bool:
        return self.kind == "int" and self.size_bytes == 8


def entries(ptx: str) -> dict[str, tuple[Parameter, ...]]:
    """The kernels of a PTX text and their parameters, in the order of the text. Raises CompileError for a parameter
    list that it cannot read."""
    return {found[1]: _parameters(found[1], _COMMENT.sub(" ", found[2] or "")) for found in _ENTRY.finditer(ptx)}


def _parameters(entry: str, text: str) -> tuple[Parameter, ...]:
    return tuple(_parameter(entry, part) for part in text.split(",") if part.strip())


def _parameter(entry: str, text: str) -> Parameter:
    found = _PARAMETER.search(text.strip())
    if found is None:
        raise CompileError(f"the PTX of {entry} has a parameter that cannot be read: {text.strip()}")
    letter, bits, name, count = found.groups()
    if count is not None:
        return Parameter(name, "bytes", int(count) * int(bits) // 8)
    return Parameter(name, "float" if letter == "f" else "int", int(bits) // 8)
