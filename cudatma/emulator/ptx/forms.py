"""Tables of the PTX instructions that the emulator supports, with their modifiers.

Each line of a table is an instruction form. ``{a,b}`` (without spaces) means each of a and b, ``{,.ftz}`` is an
optional part, and ``{r1..4}`` is the vector of r1, r2, r3, r4. The first letter of a register states its type: p
predicate, b 8 bits, h 16, r 32, d 64, q 128. The tables in forms_scalar, forms_memory and forms_warp follow the
chapters of the PTX ISA 9.1.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache

from cudatma.emulator.ptx import forms_memory, forms_scalar, forms_warp
from cudatma.emulator.ptx.model import Instruction

#: Maps each chapter to its forms, one per line.
FORMS: dict[str, str] = {**forms_scalar.FORMS, **forms_memory.FORMS, **forms_warp.FORMS}

_TEXTURE = "textures and surfaces require the filtering of the texture unit and objects that the driver creates"
#: Maps each unsupported opcode root to the reason.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("tex", "tld4", "txq", "istypep", "suld", "sust", "sured", "suq"), _TEXTURE),
    "tcgen05": "tensor memory and fifth-generation tensor cores (sm_100 and later)",
    "multimem": "multicast memory of several devices",
}

_VECTOR = re.compile(r"\{([bhrdpq])(\d+)\.\.(\d+)\}")
_CHOICE = re.compile(r"(\{[^{}\s]*\})")
_REGISTER = re.compile(r"(?<![\w.:%])([phrdqb]\d+)\b")
#: Matches shapes, counts and element types, which the emitters validate.
_PLAIN = re.compile(r"m\d+n\d+(k\d+)?$|\d+$|[1-5]d$|(b|u|s|f|bf|tf)\d+(x\d)?$")
#: Modifiers of opcodes without forms, namely branches, calls, and warp instructions without .sync.
_MORE = ("uni", "idx", "all", "any", "ballot", "pred")


def expand(line: str) -> Iterator[str]:
    """Yield all forms that a line of a table describes."""

    def whole(match: re.Match[str]) -> str:
        letter, first, last = match[1], int(match[2]), int(match[3])
        return "{" + ", ".join(f"{letter}{k}" for k in range(first, last + 1)) + "}"

    pieces = _CHOICE.split(_VECTOR.sub(whole, line))
    alone = re.compile(r"\{[bhrdpq]\d+\}$")
    options = [p[1:-1].split(",") if p.startswith("{") and not alone.match(p) else [p] for p in pieces]
    for chosen in itertools.product(*options):
        yield "".join(chosen)


def forms(chapter: str) -> Iterator[str]:
    for line in FORMS[chapter].strip().splitlines():
        yield from expand(line)


def module_of(form: str) -> str:
    """Return a PTX module with a kernel that contains the given form."""
    statement = _REGISTER.sub(r"%\1", form)
    registers = {"pred": "p", "b8": "b", "b16": "h", "b32": "r", "b64": "d", "b128": "q"}
    declared = " ".join(f".reg .{kind} %{letter}<10>;" for kind, letter in registers.items())
    return (
        f".version 9.1\n.target sm_90a\n.address_size 64\n.visible .entry k() {{\n{declared}\n{statement};\nret;\n}}\n"
    )


@lru_cache(maxsize=1)
def _modifiers() -> frozenset[str]:
    """Return all modifiers that occur in any form."""
    known = set(_MORE)
    for chapter in FORMS.values():
        for line in chapter.strip().splitlines():
            for opcode in expand(line.split(" ")[0]):
                known.update(opcode.split(".")[1:])
    return frozenset(known)


def unknown_modifier(instruction: Instruction) -> str:
    """Return the first modifier that does not occur in any form, or "" if all do or the opcode is not supported."""
    if instruction.parts[0] in REFUSED:
        return ""
    known = _modifiers()
    return next((part for part in instruction.parts[1:] if part not in known and not _PLAIN.match(part)), "")
