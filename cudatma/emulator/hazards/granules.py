"""How many bytes one entry of a shadow stands for: as many as the narrowest access of a kernel takes."""

from __future__ import annotations

from collections.abc import Iterable

from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.ptx.model import Instruction

#: State space -> the most bytes of one entry.
_MOST = {"shared": 4, "global": 16}
_SPACES = {"shared", "global", "local", "param", "const"}
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def granule_of(launch: Launch, space: str) -> int:
    """Return the bytes of one entry of a shadow of shared or global memory."""
    key = f"granule of {space}"
    known: int | None = launch.setup.extra.get(key)
    if known is None:
        functions = launch.image.module.functions
        names = launch.image.reachable(launch.program.function.name)
        body = (instruction for name in names for instruction in functions[name].body)
        known = launch.setup.extra[key] = _narrowest(body, space)
    return known


def _narrowest(body: Iterable[Instruction], space: str) -> int:
    """Return the least bytes that a lane accesses in a state space, with a generic address, or with cp.async."""
    least = _MOST[space]
    for instruction in body:
        parts = instruction.parts
        if parts[0] == "cp" and "bulk" not in parts and len(instruction.operands) > 2:
            least = min(least, int(getattr(instruction.operands[2], "bits", 4)) or 4)
        if parts[0] in ("ld", "st", "atom", "red", "ldu") and not (_SPACES - {space}).intersection(parts):
            least = min(least, _width(parts))
    return least


def _width(parts: tuple[str, ...]) -> int:
    """Return the bytes that an instruction accesses in each lane."""
    kind, _, packed = parts[-1].partition("x")
    digits = "".join(character for character in kind if character.isdigit())
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return _WIDTHS.get(digits, 1) * (2 if packed == "2" else 1) * count
