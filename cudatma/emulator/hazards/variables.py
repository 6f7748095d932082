"""Names of addresses in a CTA's shared memory, based on the PTX variables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.program import Image

#: Matches the mangled name of a function's variable, _ZZ<function>E<length><name>.
_LOCAL = re.compile(r"_ZZ.*E(\d+)([A-Za-z_]\w*)")
_MBARRIER = re.compile(r"\bmbarrier at (0x[0-9a-f]+)(?: of its block)?")
_BARRIER_BYTES = 8


@dataclass(frozen=True, slots=True)
class SharedVariables:
    """Shared variables of a kernel as (name, first address, end address).

    The end address of dynamic shared memory is None.
    """

    variables: tuple[tuple[str, int, int | None], ...] = ()

    @classmethod
    def of(cls, image: Image, entry: str, dynamic: Iterable[tuple[str, int, int]] = ()) -> SharedVariables:
        """Return the variables that a kernel can reach, and the (name, offset, bytes) parts of dynamic memory."""
        module = image.module
        sizes = {name: variable.size_bytes for name, variable in module.variables.items()}
        for function in module.functions.values():
            sizes.update((name, variable.size_bytes) for name, variable in function.variables.items())
        offsets, start = image.shared_layout(entry)
        start += SHARED_START
        variables: list[tuple[str, int, int | None]]
        variables = [(name, start + offset, start + offset + size) for name, offset, size in dynamic]
        for name, offset in offsets.items():
            first, size = SHARED_START + offset, sizes.get(name, 0)
            variables.append((_plain(name), first, first + size if size else None))
        return cls(tuple(variables))

    def byte(self, address: int) -> str:
        """Return a name such as "byte 64 of tile" for an address without the CTA rank, or "" outside variables."""
        name, offset = self._find(address)
        return f"byte {offset} of {name}" if name else ""

    def barrier(self, address: int) -> str:
        """Return the name of an mbarrier, such as "full[1]", or "" if no variable contains the mbarrier."""
        for name, first, end in self.variables:
            if first <= address and end is not None and address < end:
                is_array = end - first > _BARRIER_BYTES
                index, rest = divmod(address - first, _BARRIER_BYTES)
                return (f"{name}[{index}]" if is_array else name) if not rest else self.byte(address)
        return self.byte(address)

    def named(self, text: str) -> str:
        """Replace the addresses of mbarriers in a message with their names."""

        def name(match: re.Match[str]) -> str:
            known = self.barrier(int(match[1], 16))
            at = "at " if known.startswith("byte ") else ""
            return f"mbarrier {at}{known}" if known else match[0]

        return _MBARRIER.sub(name, text)

    def _find(self, address: int) -> tuple[str, int]:
        for name, first, end in sorted(self.variables, key=lambda variable: variable[2] is None):
            if first <= address and (end is None or address < end):
                return name, address - first
        return "", 0


def _plain(name: str) -> str:
    match = _LOCAL.match(name)
    return match[2][: int(match[1])] if match else name
