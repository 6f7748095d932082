"""Translator from a segment of PTX to the source of a Python function over vectors of 32 lanes.

Registers are immutable NumPy vectors of 32 elements (bool, unsigned integers or floats), and an assignment binds a new
vector. Each segment has two versions, one for 32 active lanes and one with a lane mask. In the masked version,
assignments to registers that are live across segments keep the values of inactive lanes. Immediates are constant
vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.flow import Flow, Segment, registers_of
from cudatma.emulator.ptx.forms import unknown_modifier
from cudatma.emulator.ptx.model import (
    Imm,
    Instruction,
    Mem,
    Module,
    Not,
    Operand,
    Reg,
    Sink,
    Sym,
    Vec,
)
from cudatma.emulator.ptx.types import BYTES, CODES, CONSTANTS, LANES, NUMPY, WIDTHS, Array, unsigned

Emitter = Callable[["SegmentWriter", Instruction], None]
Helper = TypeVar("Helper", bound=Callable[..., Any])

#: Maps each opcode root to the function that emits its Python code.
EMITTERS: dict[str, Emitter] = {}

#: Names available to generated code. Modules register their run-time helpers here.
RUNTIME: dict[str, Any] = {
    "where": np.where,
    "count": np.count_nonzero,
    **{name: dtype.type for name, dtype in NUMPY.items()},
}


def emitter(*opcodes: str) -> Callable[[Emitter], Emitter]:
    """Register an emitter for opcodes.

    An emitter for "st" also handles "st.async" unless "st.async" has its own emitter.
    """

    def register(function: Emitter) -> Emitter:
        for opcode in opcodes:
            EMITTERS[opcode] = function
        return function

    return register


def runtime(function: Helper) -> Helper:
    """Make a helper available to generated code under its name."""
    RUNTIME[function.__name__] = function
    return function


def storage_classes(flow: Flow) -> list[str]:
    """Return the emulator type of each register.

    The type is a float type if most instructions use the register as a float, otherwise an unsigned type.
    """
    function = flow.function
    votes = [0] * len(function.registers)
    for instruction in function.body:
        width = {"f32": 4, "f64": 8}.get(instruction.parts[-1], 0)
        for operand in instruction.operands:
            is_value = not isinstance(operand, Mem)
            for register in registers_of(operand):
                fits = is_value and width == BYTES[CODES[function.registers[register]]]
                votes[register] += 1 if fits else -1
    return [
        (
            "f32"
            if votes[i] > 0 and CODES[kind] in ("u32", "f32", "i32")
            else "f64"
            if votes[i] > 0 and CODES[kind] in ("u64", "f64", "i64")
            else unsigned(CODES[kind])
        )
        for i, kind in enumerate(function.registers)
    ]


#: Opcodes whose events require the mask of the lanes that the guard enables.
_WATCHED = {
    *("ld", "st", "atom", "red", "mbarrier", "cp", "fence", "membar", "griddepcontrol", "bar", "barrier", "tensormap"),
}


class SegmentWriter:
    """Writer of the Python source of a segment.

    Emitters call src(), dst() and line(). ``mask`` is an expression for the mask of active lanes, or "None".
    """

    def __init__(self, flow: Flow, segment: Segment, classes: list[str], module: Module, masked: bool) -> None:
        self.flow, self.segment, self.classes, self.module, self.masked = flow, segment, classes, module, masked
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._constant_names: dict[Any, str] = {}
        self.loaded: list[int] = []
        self.known: set[int] = set()
        self.written: set[int] = set()
        self.indent = 1
        self.temporaries = 0
        self.at = 0
        self.current: Instruction | None = None
        self.guarded = False
        self.base_mask = "m" if masked else "None"
        self.mask = self.base_mask

    # ---- writing

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def temporary(self, expression: str) -> str:
        """Bind an expression to a new local variable and return its name."""
        name = f"t{self.temporaries}"
        self.temporaries += 1
        self.line(f"{name} = {expression}")
        return name

    def constant(self, value: Any, key: Any = None) -> str:
        """Return a name for an object in generated code."""
        key = ("id", id(value)) if key is None else key
        if key not in self._constant_names:
            name = f"c{len(self._constant_names)}"
            self._constant_names[key], self.constants[name] = name, value
        return self._constant_names[key]

    def splat(self, value: int, code: str) -> str:
        """Return the name of a constant vector that contains the low bits of a value in every lane."""
        bits = value & ((1 << (8 * BYTES[code])) - 1)
        if ("splat", bits, code) not in self._constant_names:
            if code == "pred":
                vector: Array = np.full(LANES, bool(bits & 1))
            elif code == "b128":
                vector = np.array([[bits & (2**64 - 1)] * LANES, [bits >> 64] * LANES], np.uint64)
            else:
                vector = np.full(LANES, bits, NUMPY[unsigned(code)]).view(NUMPY[code])
            vector.flags.writeable = False
            return self.constant(vector, ("splat", bits, code))
        return self._constant_names["splat", bits, code]

    def error(self, message: str) -> PtxError:
        """Return a PtxError for the current instruction with its source location."""
        instruction = self.current
        if instruction is None:
            return PtxError(message)
        return PtxError(message, instruction.line, self.module.source_of(instruction), instruction.text)

    def need(self, condition: bool, message: str) -> None:
        if not condition:
            raise self.error(message)

    # ---- operands

    def _register(self, index: int) -> str:
        if index not in self.known:
            self.known.add(index)
            self.loaded.append(index)
        return f"r{index}"

    def src(self, operand: Operand, code: str) -> str:
        """Return an expression for a source operand as a vector of the given type."""
        if isinstance(operand, Reg):
            return self.convert(self._register(operand.index), self.classes[operand.index], code)
        if isinstance(operand, Imm):
            return self.splat(immediate_bits(operand, code), code)
        if isinstance(operand, Not):
            return f"(~{self.src(operand.reg, code)})"
        if isinstance(operand, Sym):
            return self.symbol(operand, code)
        if isinstance(operand, Sink):
            raise self.error("a source operand must not be `_`")
        if isinstance(operand, Vec) and len(operand.items) == 1:
            return self.src(operand.items[0], code)
        raise self.error(f"the operand must be a {code} value")

    def symbol(self, operand: Sym, code: str) -> str:
        """Return an expression for the value of a special register or the address of a variable."""
        name = operand.name
        if name.startswith("%"):
            return self.special(name[1:], code)
        if name in ("WARP_SZ",):
            return self.splat(LANES, code)
        reference = f"w.address({name!r}, {operand.offset})"
        return self.convert(reference, "u64", code)

    def special(self, name: str, code: str) -> str:
        if name in ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            return self.convert(f"w.clock({name!r})", "u64", code)
        if name in CONSTANTS:
            return self.splat(CONSTANTS[name], code)
        if name == "is_explicit_cluster":
            return "w.special['is_explicit_cluster']"
        if name not in WIDTHS:
            raise self.error(f"special register %{name} is not supported")
        return self.convert(f"w.special[{name!r}]", WIDTHS[name], code)

    def convert(self, expression: str, have: str, want: str) -> str:
        """Return an expression that converts to another type by reinterpretation, truncation or extension."""
        if have == want:
            return expression
        if have == "pred" or want == "pred":
            raise self.error("a predicate cannot be converted to or from another type")
        if have == "b128" or want == "b128":
            raise self.error("a 128-bit value cannot be converted to or from another width")
        if not expression.isidentifier():
            expression = f"({expression})"
        if BYTES[have] == BYTES[want]:
            return f"{expression}.view({want})"
        if have in ("f16", "f32", "f64"):
            expression, have = f"{expression}.view({unsigned(have)})", unsigned(have)
        if want in ("f16", "f32", "f64"):
            return f"{expression}.astype({unsigned(want)}).view({want})"
        return f"{expression}.astype({want})"

    def dst(self, operand: Operand, expression: str, code: str) -> None:
        """Emit an assignment of a vector of the given type to a destination operand.

        Inactive lanes keep their values.
        """
        if isinstance(operand, Sink):
            self.line(expression)
            return
        if isinstance(operand, Vec) and len(operand.items) == 1:
            operand = operand.items[0]
        if not isinstance(operand, Reg):
            raise self.error("the destination must be a register")
        index = operand.index
        if BYTES[code] > BYTES[self.classes[index]]:
            raise self.error(f"the destination register must not be narrower than {code}")
        value = self.convert(expression, code, self.classes[index])
        crossing = self.flow.crossing >> index & 1
        if (self.guarded or (self.masked and crossing)) and (crossing or index in self.known):
            value = f"where({self.mask}, {value}, {self._register(index)})"
        self.known.add(index)
        self.written.add(index)
        self.line(f"r{index} = {value}")

    def address(self, operand: Operand, code: str = "u64") -> str:
        """Return an expression for the address of a memory operand."""
        if not isinstance(operand, Mem):
            raise self.error("the operand must be an address in brackets")
        base = operand.base
        if isinstance(base, Sym):
            return self.src(Sym(base.name, base.offset + operand.offset), code)
        if isinstance(base, Imm):
            return self.splat(base.bits + operand.offset, code)
        text = self.src(base, code)
        return f"({text} + {self.splat(operand.offset, code)})" if operand.offset else text

    # ---- whole segment

    def write(self) -> str:
        """Return the source of the function ``segment`` that maps (warp, registers, mask) to the next segment.

        Raise PtxError if an instruction is unknown or its operands are invalid.
        """
        try:
            return self._write()
        except PtxError:
            raise
        except (IndexError, KeyError, ValueError, StopIteration, AttributeError) as error:
            raise self._misfit() from error

    def _misfit(self) -> PtxError:
        """Return the error for operands or modifiers that an emitter could not handle."""
        count = len(self.current.operands) if self.current else 0
        return self.error(f"{count} operands do not match the instruction and its modifiers")

    def try_one(self, at: int) -> PtxError | None:
        """Emit code for an instruction. Return the error, or None if the instruction is supported."""
        self.at, self.current = at, self.flow.function.body[at]
        self.guarded, self.mask = False, self.base_mask
        try:
            self._instruction(self.current)
        except PtxError as error:
            return error
        except (IndexError, KeyError, ValueError, StopIteration, AttributeError):
            return self._misfit()
        return None

    def _write(self) -> str:
        body = self.flow.function.body
        ended = False
        for at in range(self.segment.start, self.segment.stop):
            self.at, self.current = at, body[at]
            if self.masked and at == self.segment.start and body[at].guard is None and body[at].is_whole_warp:
                held = self.temporary(f"meet(w, {at})")
                self.line(f"if {held}: return {held}")
            ended = self._instruction(body[at])
        if not ended:
            following = self.segment.next[0] if self.segment.next else -1
            self._store_back()
            self.line(f"return {following}" if following >= 0 else "return leave(w, m)")
        loads = [f"    r{i} = R[{i}]" for i in self.loaded]
        return "\n".join(["def segment(w, R, m):", *loads, *self.lines, ""])

    def _instruction(self, instruction: Instruction) -> bool:
        """Emit code for an instruction, and return whether the code leaves the segment on every path."""
        root = instruction.parts[0]
        emit = EMITTERS.get(".".join(instruction.parts[:2])) or EMITTERS.get(root)
        if emit is None:
            raise self.error(f"instruction `{instruction.opcode}` is unknown")
        modifier = unknown_modifier(instruction)
        if modifier:
            raise self.error(f"modifier `.{modifier}` of `{root}` is unknown")
        if root in ("bra", "brx", "ret", "exit", "trap", "call"):
            self._track(instruction)
            self._store_back()
            emit(self, instruction)
            return True
        if instruction.guard is None:
            if self.masked:
                self._check_whole_warp(instruction)
            self._track(instruction)
            emit(self, instruction)
            return False
        register, negated = instruction.guard
        predicate = ("~" if negated else "") + self._register(register)
        for written in self.flow.accesses[self.at][0]:
            if self.flow.crossing >> written & 1:
                self._register(written)
            elif written not in self.known:
                self.known.add(written)
                self.line(f"r{written} = {self.zero(written)}")
        self.mask = self.temporary(f"m & {predicate}" if self.masked else predicate)
        self.line(f"if count({self.mask}):")
        self.indent, self.guarded = self.indent + 1, True
        before = len(self.lines)
        if root in _WATCHED:
            self.line(f"w.guard = {self.mask}")
        self._check_whole_warp(instruction)
        self._track(instruction)
        emit(self, instruction)
        if root in _WATCHED:
            self.line("w.guard = None")
        elif len(self.lines) == before:
            self.line("pass")
        self.indent, self.guarded = self.indent - 1, False
        self.mask = self.base_mask
        return False

    def _check_whole_warp(self, instruction: Instruction) -> None:
        """Emit a check that all threads of the warp execute an .aligned instruction together."""
        parts = instruction.parts
        # The check does not apply to barrier.sync, which counts threads.
        if "aligned" in parts and (parts[0] != "barrier" or parts[1] == "cluster"):
            self.line(f"check_whole_warp(w, {self.at}, {self.mask}, {instruction.opcode!r})")

    def _track(self, instruction: Instruction) -> None:
        """Emit code that propagates undefined shuffle results through an instruction (machine/undefined.py)."""
        if not self.masked or not self.flow.has_shuffles or instruction.parts[0] == "shfl":
            return
        if any(self.flow.accesses[self.at]):
            self.line(
                f"if w.split.frame.undefined: track(w, {self.at}, {self.mask}, {self._irrelevant_lanes(instruction)})"
            )

    def _irrelevant_lanes(self, instruction: Instruction) -> str:
        """Return an expression for the lanes in which each source does not affect the result, or "None"."""
        root, kind, operands = instruction.parts[0], instruction.parts[-1], instruction.operands
        if root == "selp":
            chosen = self.src(operands[3], "pred")
            return f"(~{chosen}, {chosen}, None)"
        is_logic = root == "and" or (root == "or" and kind == "pred")
        if is_logic and all(isinstance(operand, Reg) for operand in operands[1:]):
            a, b = (self.src(operand, CODES[kind]) for operand in operands[1:])
            decides = "== 0" if root == "and" else "!= 0"
            return f"({b} {decides}, {a} {decides})"
        return "None"

    def zero(self, register: int) -> str:
        return self.splat(0, self.classes[register])

    def _store_back(self) -> None:
        """Emit code that stores in the frame the registers that other segments may read."""
        for index in sorted(self.written):
            if self.segment.live_out >> index & 1:
                self.line(f"R[{index}] = r{index}")


def immediate_bits(value: Imm, code: str) -> int:
    """Return the bits of an immediate in a type. Floats are converted to the width of the type."""
    if value.kind == "int":
        if code in ("f32", "f64", "f16") and value.bits:
            kind = {"f16": "<e", "f32": "<f", "f64": "<d"}[code]
            return int.from_bytes(struct.pack(kind, float(value.bits)), "little")
        return value.bits
    if value.kind == "f32":
        if code != "f64":
            return value.bits
        single = struct.unpack("<f", value.bits.to_bytes(4, "little"))[0]
        return int.from_bytes(struct.pack("<d", single), "little")
    if code in ("f64", "u64", "i64"):
        return value.bits
    double = struct.unpack("<d", value.bits.to_bytes(8, "little"))[0]
    kind = "<e" if code == "f16" else "<f"
    return int.from_bytes(struct.pack(kind, double), "little")
