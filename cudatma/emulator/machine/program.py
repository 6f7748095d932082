"""Modules in memory, and the compilation of their functions' segments to Python on first use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

import numpy as np

from cudatma.emulator.errors import PtxError
from cudatma.emulator.machine.memory import GlobalMemory, address_of
from cudatma.emulator.ptx.early_uses import unfenced_wgmmas, unwritten_reads
from cudatma.emulator.ptx.flow import Flow, bit_set
from cudatma.emulator.ptx.model import (
    Function,
    Imm,
    Instruction,
    Mem,
    Module,
    Operand,
    Pair,
    Part,
    Reg,
    Sink,
    Sym,
    Variable,
    Vec,
)
from cudatma.emulator.ptx.names import find_name
from cudatma.emulator.ptx.types import Array, unwritten
from cudatma.emulator.ptx.writer import RUNTIME, SegmentWriter, storage_classes

SegmentFunction = Callable[[Any, list[Array], Any], int]


def lay_out(variables: list[Variable], start: int = 0) -> tuple[dict[str, int], int]:
    """Place variables consecutively according to their alignments. Return their offsets and the end offset."""
    offsets, at = {}, start
    for variable in variables:
        at = -(-at // max(1, variable.align)) * max(1, variable.align)
        offsets[variable.name] = at
        at += variable.size_bytes
    return offsets, at


class Program:
    """A function of a module in executable form.

    ``local_bytes`` is the size of local memory per lane, a multiple of 16. ``param_offsets`` contains the offsets of a
    kernel's parameters.
    """

    def __init__(self, function: Function, module: Module) -> None:
        self.function, self.module = function, module
        self.is_entry = function.is_entry
        self.flow = Flow(function)
        self.classes = storage_classes(self.flow)
        self.initial_registers = [unwritten(code) for code in self.classes]
        local = [v for v in function.variables.values() if v.space == "local"]
        self.local_offsets, local_end = lay_out(local)
        self.local_bytes = -(-local_end // 16) * 16
        self.param_offsets, self.param_bytes = lay_out(function.params)
        count = len(self.flow.segments)
        self.full: list[SegmentFunction | None] = [None] * count
        self.masked: list[SegmentFunction | None] = [None] * count
        self.unwritten = unwritten_reads(self.flow)
        self._accesses: dict[int, tuple[int, int]] = {}
        self._live: dict[int, list[int]] = {}
        self.touched = [segment.touched for segment in self.flow.segments]

    @cached_property
    def unfenced(self) -> dict[int, int]:
        """Return a map from the index of each wgmma to its registers that are written without a fence."""
        return unfenced_wgmmas(self.flow)

    def compile_full(self, index: int) -> SegmentFunction:
        """Compile the version of a segment for 32 active lanes."""
        function = self.full[index] = self._compile(index, masked=False)
        return function

    def compile_masked(self, index: int) -> SegmentFunction:
        """Compile the version of a segment that takes a lane mask."""
        function = self.masked[index] = self._compile(index, masked=True)
        return function

    def source(self, index: int, masked: bool) -> str:
        """Return the Python source of a segment, for debugging the emulator."""
        writer = SegmentWriter(self.flow, self.flow.segments[index], self.classes, self.module, masked)
        return writer.write()

    def check(self) -> None:
        """Raise PtxError for the first instruction that is not supported."""
        checked: set[Any] = set()
        for segment in self.flow.segments:
            writer = SegmentWriter(self.flow, segment, self.classes, self.module, True)
            for at in range(segment.start, segment.stop):
                instruction = self.function.body[at]
                form = (instruction.parts, instruction.guard is None, tuple(map(self._form, instruction.operands)))
                if form not in checked:
                    checked.add(form)
                    if (error := writer.try_one(at)) is not None:
                        raise error

    def _form(self, operand: Operand) -> Any:
        """Return an operand in which each register is replaced by its type."""
        if isinstance(operand, Reg):
            return self.classes[operand.index]
        if isinstance(operand, Imm | Sym | Sink):
            return operand
        if isinstance(operand, Mem):
            return self._form(operand.base), operand.offset, tuple(map(self._form, operand.extra))
        if isinstance(operand, Vec):
            return tuple(map(self._form, operand.items))
        if isinstance(operand, Pair):
            return self._form(operand.first), "|", self._form(operand.second)
        if isinstance(operand, Part):
            return self._form(operand.reg), operand.selector
        return "!", self._form(operand.reg)

    def instruction(self, at: int) -> Instruction:
        return self.function.body[at]

    def live_registers(self, segment: int) -> list[int]:
        """Return the registers that a segment or its successors read before they write them."""
        registers = self._live.get(segment)
        if registers is None:
            live = self.flow.segments[segment].live_in
            registers = self._live[segment] = [index for index in range(live.bit_length()) if live >> index & 1]
        return registers

    def accesses(self, at: int) -> tuple[int, int]:
        """Return the registers that an instruction reads and writes, as bit sets."""
        accesses = self._accesses.get(at)
        if accesses is None:
            written, read = self.flow.accesses[at]
            accesses = self._accesses[at] = (bit_set(read), bit_set(written))
        return accesses

    def _compile(self, index: int, masked: bool) -> SegmentFunction:
        writer = SegmentWriter(self.flow, self.flow.segments[index], self.classes, self.module, masked)
        source = writer.write()
        names = {**RUNTIME, **writer.constants}
        exec(_code(source, f"<ptx {self.function.name} segment {index}>"), names)
        function: SegmentFunction = names["segment"]
        return function


@lru_cache(maxsize=4096)
def _code(source: str, name: str) -> CodeType:
    """Compile a segment. The cache speeds up reloaded kernels and mutants, which share most segments."""
    return compile(source, name, "exec")


MAX_VARIABLES_BYTES = 1 << 28


class Image:
    """A module in memory. Programs are created on first use. Variables exist as long as the image exists."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._programs: dict[str, Program] = {}
        self._checked: set[str] = set()
        self._reachable: dict[str, list[str]] = {}
        self._opcodes: dict[str, frozenset[str]] = {}
        self._reads: dict[tuple[str, str], bool] = {}
        self._splits: dict[str, bool] = {}
        self._layouts: dict[str, tuple[dict[str, int], int]] = {}
        self._numbers = {name: 16 + 16 * k for k, name in enumerate(module.functions)}
        self._place_variables()

    def twin(self) -> Image:
        """Return an image of the same module that shares the programs and has separate variables."""
        twin = copy.copy(self)
        twin._place_variables()
        return twin

    def _place_variables(self) -> None:
        self.variables: dict[str, Array] = {}
        self.addresses: dict[str, int] = {}
        self.const_spans: list[tuple[int, int]] = []
        placed = [v for v in self.module.variables.values() if v.space in ("global", "const")]
        total = sum(v.size_bytes + v.align for v in placed)
        if total > MAX_VARIABLES_BYTES:
            raise PtxError(
                f"global and constant variables must occupy at most {MAX_VARIABLES_BYTES} bytes, got {total}"
            )
        for variable in placed:
            self._place(variable)
        for variable in self.module.variables.values():
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
                raise PtxError(f"`{variable.name}` refers to `{name}`, which the module does not define")
            self.variables[variable.name][position : position + 8].view(np.uint64)[0] = target + offset

    def map_into(self, memory: GlobalMemory) -> None:
        """Map the variables into the memory of a launch."""
        for name, data in self.variables.items():
            memory.add(data, f"variable {name}")

    def function_number(self, name: str) -> int:
        """Return the number that is used as the address of a function."""
        return self._numbers[name]

    def function_at(self, number: int) -> str | None:
        """Return the name of the function with this number, or None if there is none."""
        return next((name for name, value in self._numbers.items() if value == number), None)

    def entry(self, name: str) -> Program:
        """Return the kernel that matches a name, or raise ArgumentError as find_name() does."""
        entries = [f.name for f in self.module.functions.values() if f.is_entry]
        return self.program(find_name(name, entries, "entry", "kernels"))

    def check(self, entry: str) -> None:
        """Raise PtxError for the first unsupported instruction that is reachable from a kernel."""
        for name in self.reachable(entry):
            if name not in self._checked and self.module.functions[name].is_defined:
                self.program(name).check()
                self._checked.add(name)

    def program(self, name: str) -> Program:
        """Return the program of a function in the module."""
        program = self._programs.get(name)
        if program is None:
            function = self.module.functions.get(name)
            if function is None or not function.is_defined:
                raise PtxError(f"function `{name}` is called but not defined in this module")
            program = self._programs[name] = Program(function, self.module)
        return program

    def reachable(self, name: str) -> list[str]:
        """Return a function and all functions that it may call, directly or through an address."""
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

    def opcodes(self, entry: str) -> frozenset[str]:
        """Return the opcodes of all instructions that are reachable from a kernel."""
        opcodes = self._opcodes.get(entry)
        if opcodes is None:
            bodies = (self.module.functions[name].body for name in self.reachable(entry))
            opcodes = self._opcodes[entry] = frozenset(instruction.opcode for body in bodies for instruction in body)
        return opcodes

    def reads(self, entry: str, register: str) -> bool:
        """Return whether a kernel reads a special register whose name starts with ``register``."""
        known = self._reads.get((entry, register))
        if known is None:
            known = self._reads[entry, register] = any(
                getattr(operand, "name", "").startswith(register)
                for name in self.reachable(entry)
                for instruction in self.module.functions[name].body
                if instruction.parts[0] == "mov"
                for operand in instruction.operands
            )
        return known

    def splits_warps(self, entry: str) -> bool:
        """Return whether a kernel can reach an instruction whose member mask may omit lanes of a warp."""
        known = self._splits.get(entry)
        if known is None:
            bodies = (self.module.functions[name].body for name in self.reachable(entry))
            known = self._splits[entry] = any(
                instruction.members is not None and not instruction.names_all for body in bodies for instruction in body
            )
        return known

    def shared_layout(self, entry: str) -> tuple[dict[str, int], int]:
        """Return the offsets of the shared variables that a kernel can reach, and the offset of dynamic shared memory.

        Static variables are placed first, in order of decreasing alignment, and are followed by all extern arrays.
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
        variables = [v for v in self.module.variables.values() if v.space == "shared" and v.name in used]
        for name in names:
            variables += [v for v in self.module.functions[name].variables.values() if v.space == "shared"]
        static = sorted((v for v in variables if v.size_bytes), key=lambda v: -v.align)
        dynamic = [v for v in variables if not v.size_bytes]
        offsets, end = lay_out(static)
        align = max([v.align for v in dynamic], default=1)
        start = -(-end // align) * align
        offsets.update((v.name, start) for v in dynamic)
        self._layouts[entry] = offsets, start
        return offsets, start
