"""Select a shadow's granule, which is the number of bytes that an entry describes.

The granule is the size of the kernel's narrowest access, up to a limit.
"""

from __future__ import annotations

from functools import lru_cache

from cudatma.emulator.machine.protocols import Launch

_MAX_BYTES = 16
#: Size in bytes of the narrowest access to shared memory by other instructions. Matrix rows and TMA copies consist of
#: 16-byte chunks.
_SHARED_BYTES = {"mbarrier": 8, "wmma": 4, "tensormap": 4}
_SPACES = {"shared", "global", "local", "param", "const"}
_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def granule_of(launch: Launch, space: str) -> int:
    """Return the number of bytes that an entry of a shadow of shared or global memory describes."""
    return _narrowest(launch.image.opcodes(launch.program.function.name), space)


@lru_cache(maxsize=1024)
def _narrowest(opcodes: frozenset[str], space: str) -> int:
    """Return the size of a lane's narrowest access to a state space, including generic accesses and cp.async."""
    width = _MAX_BYTES
    for opcode in opcodes:
        parts = opcode.split(".")
        if opcode.startswith("cp.async.ca"):
            width = min(width, 4)
        elif parts[0] in ("ld", "st", "atom", "red", "ldu") and not (_SPACES - {space}).intersection(parts):
            width = min(width, _width(parts))
        elif space == "shared":
            width = min(width, _SHARED_BYTES.get(parts[0], width))
    return width


def _width(parts: list[str]) -> int:
    """Return the number of bytes that an instruction accesses in each lane."""
    kind, _, packed = parts[-1].partition("x")
    digits = "".join(character for character in kind if character.isdigit())
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return _WIDTHS.get(digits, 1) * (2 if packed == "2" else 1) * count
