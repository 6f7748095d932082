"""PTX and source text that reports quote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Maps file names and line numbers to the text of the line.
Lines = Mapping[str, Mapping[int, str]]

_ASM = re.compile(r"\b(?:asm|__asm__)\b")
_MANGLED = re.compile(r"_Z(\d+)(\w+)")


@dataclass(frozen=True, slots=True)
class Sources:
    """PTX text of a module and its source lines.

    Parameters
    ----------
    ptx : str
        PTX text.
    lines : mapping
        Source lines, as a mapping from file name to a mapping from line number to text.
    paths : mapping
        Mapping from the name of each file in the PTX to its path.
    """

    ptx: str = ""
    lines: Lines = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)

    def locate(self, source: str) -> tuple[str, int] | None:
        """Return the innermost (file, line) of "k.cu:12, inlined at k.cu:40" whose text is available, or None.

        The first file of `lines` takes precedence over included files, and the call to a function takes precedence over
        an asm statement inside the function.
        """
        known = [(name, line) for name, line in places(source) if line in self.lines.get(name, {})]
        known = [place for place in known if place[0] == next(iter(self.lines))] or known
        calls = [(name, line) for name, line in known if not _ASM.search(self.lines[name][line])]
        return next(iter(calls or known), None)

    def text(self, source: str) -> str:
        """Return the text of a source line, or "" if it is not available."""
        place = self.locate(source)
        return self.lines[place[0]][place[1]].strip() if place else ""

    def parameters(self, entry: str, count: int) -> list[str] | None:
        """Return the names of a kernel's parameters in its source, or None if its declaration is not found."""
        mangled = _MANGLED.match(entry)
        name = mangled[2][: int(mangled[1])] if mangled else entry
        declared = re.compile(rf"\b{re.escape(name)}\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*\{{")
        for lines in self.lines.values():
            text = re.sub(r"//.*", "", "\n".join(lines[number] for number in sorted(lines)))
            match = declared.search(text)
            if match is None:
                continue
            words = [re.findall(r"\w+", part) for part in match[1].split(",")]
            if len(words) == count and all(words):
                return [part[-1] for part in words]
        return None


def places(source: str) -> list[tuple[str, int]]:
    """Return the (file, line) pairs of "k.cu:12, inlined at k.cu:40", innermost first."""
    result = []
    for place in source.split(", inlined at "):
        name, _, number = place.rpartition(":")
        if number.isdigit():
            result.append((name, int(number)))
    return result
