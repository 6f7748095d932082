"""The granule of a shadow: an entry describes the bytes of a kernel's narrowest access."""

from __future__ import annotations

from functools import lru_cache

from cudatma.emulator.machine.protocols import Launch

#: State space -> largest entry in bytes.
_MOST = {"shared": 4, "global": 16}
_SPACES = {"shared", "global", "local", "param", "const"}
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def granule_of(launch: Launch, space: str) -> int:
    """Return the bytes of one entry of a shadow of shared or global memory."""
    return _narrowest(launch.image.opcodes(launch.program.function.name), space)


@lru_cache(maxsize=1024)
def _narrowest(opcodes: frozenset[str], space: str) -> int:
    """Return the smallest number of bytes that a lane accesses in a state space, also generically or with cp.async."""
    least = _MOST[space]
    for opcode in opcodes:
        parts = opcode.split(".")
        if opcode.startswith("cp.async.ca"):
            least = min(least, 4)
        elif parts[0] in ("ld", "st", "atom", "red", "ldu") and not (_SPACES - {space}).intersection(parts):
            least = min(least, _width(parts))
    return least


def _width(parts: list[str]) -> int:
    """Return the bytes that an instruction accesses in each lane."""
    kind, _, packed = parts[-1].partition("x")
    digits = "".join(character for character in kind if character.isdigit())
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return _WIDTHS.get(digits, 1) * (2 if packed == "2" else 1) * count
