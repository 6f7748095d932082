"""A module loaded into memory: addresses of its variables and runnable functions."""

from __future__ import annotations

import numpy as np

from cudatma.emulator.errors import PtxError
from cudatma.emulator.machine.memory import GlobalMemory, address_of
from cudatma.emulator.machine.program import Program, lay_out
from cudatma.emulator.ptx.model import Module, Variable
from cudatma.emulator.ptx.names import find_name
from cudatma.emulator.ptx.types import Array

#: Most bytes of all global and constant variables of a module.
MAX_VARIABLES_BYTES = 1 << 28


class Image:
    """Programs are made when they are first asked for; variables live as long as the image."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.variables: dict[str, Array] = {}
        self.addresses: dict[str, int] = {}
        self.const_spans: list[tuple[int, int]] = []
        self._programs: dict[str, Program] = {}
        self._checked: set[str] = set()
        self._reachable: dict[str, list[str]] = {}
        self._layouts: dict[str, tuple[dict[str, int], int]] = {}
        self._numbers = {name: 16 + 16 * k for k, name in enumerate(module.functions)}
        placed = [v for v in module.variables.values() if v.space in ("global", "const")]
        total = sum(v.size_bytes + v.align for v in placed)
        if total > MAX_VARIABLES_BYTES:
            raise PtxError(f"{total} bytes of global and constant variables; at most {MAX_VARIABLES_BYTES} are held")
        for variable in placed:
            self._place(variable)
        for variable in module.variables.values():
            self._patch(variable)

    def _place(self, variable: Variable) -> None:
        size = max(variable.size_bytes, 1)
        align = max(16, variable.align)
        raw = np.zeros(size + align, np.uint8)
        skip = -address_of(raw) % align
        data = raw[skip : skip + size]
        data[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
        self.variables[variable.name] = data
        self.addresses[variable.name] = address_of(data)
        if variable.space == "const":
            self.const_spans.append((address_of(data), address_of(data) + size))

    def _patch(self, variable: Variable) -> None:
        for position, name, offset in variable.relocations:
            target = self.addresses.get(name, self._numbers.get(name))
            if target is None:
                raise PtxError(f"`{variable.name}` refers to `{name}`, which is not in the module")
            self.variables[variable.name][position : position + 8].view(np.uint64)[0] = target + offset

    def map_into(self, memory: GlobalMemory) -> None:
        """Make the variables accessible to a launch."""
        for name, data in self.variables.items():
            memory.add(data, f"variable {name}")

    def function_number(self, name: str) -> int:
        """The number that represents the address of a function."""
        return self._numbers[name]

    def function_at(self, number: int) -> str | None:
        """The function that a number of function_number() names."""
        return next((name for name, value in self._numbers.items() if value == number), None)

    def entry(self, name: str) -> Program:
        """An entry by its name, or the only one that the name matches: find_name(). ArgumentError where there is
        none."""
        entries = [f.name for f in self.module.functions.values() if f.is_entry]
        return self.program(find_name(name, entries, "entry"))

    def check(self, entry: str) -> None:
        """Raise PtxError at the first instruction, of all functions that an entry reaches, that cannot be emulated."""
        for name in self.reachable(entry):
            if name not in self._checked and self.module.functions[name].is_defined:
                self.program(name).check()
                self._checked.add(name)

    def program(self, name: str) -> Program:
        """A function of the module made runnable."""
        found = self._programs.get(name)
        if found is None:
            function = self.module.functions.get(name)
            if function is None or not function.is_defined:
                raise PtxError(f"function `{name}` is called but not defined in this module")
            found = self._programs[name] = Program(function, self.module)
        return found

    def reachable(self, name: str) -> list[str]:
        """The function and everything it may call, directly or through a name taken as an address."""
        known = self._reachable.get(name)
        if known is not None:
            return known
        seen, todo = [name], [name]
        while todo:
            for instruction in self.module.functions[todo.pop()].body:
                for operand in instruction.operands:
                    called = getattr(operand, "name", None)
                    if called in self.module.functions and called not in seen:
                        seen.append(called)
                        todo.append(called)
        self._reachable[name] = seen
        return seen

    def reads(self, entry: str, register: str) -> bool:
        """Whether a kernel, or what it calls, reads a special register whose name begins with ``register``."""
        return any(
            getattr(operand, "name", "").startswith(register)
            for name in self.reachable(entry)
            for instruction in self.module.functions[name].body
            if instruction.parts[0] == "mov"
            for operand in instruction.operands
        )

    def shared_layout(self, entry: str) -> tuple[dict[str, int], int]:
        """Offsets of the shared variables that an entry can reach, and where the dynamic part begins.

        Static variables come first, the widest aligned in front; every extern array begins after them.
        """
        if entry in self._layouts:
            return self._layouts[entry]
        names = self.reachable(entry)
        used = {
            getattr(part, "name", None)
            for name in names
            for instruction in self.module.functions[name].body
            for operand in instruction.operands
            for part in (operand, getattr(operand, "base", None))
        }
        found = [v for v in self.module.variables.values() if v.space == "shared" and v.name in used]
        for name in names:
            found += [v for v in self.module.functions[name].variables.values() if v.space == "shared"]
        static = sorted((v for v in found if v.size_bytes), key=lambda v: -v.align)
        dynamic = [v for v in found if not v.size_bytes]
        offsets, end = lay_out(static)
        align = max([v.align for v in dynamic], default=1)
        start = -(-end // align) * align
        offsets.update((v.name, start) for v in dynamic)
        self._layouts[entry] = offsets, start
        return offsets, start
