"""Parser of the body of a PTX function: scopes, registers, labels and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from cudatma.emulator.errors import PtxError
from cudatma.emulator.ptx.declarations import read_variable
from cudatma.emulator.ptx.lexer import TYPE_BYTES, Cursor, Token, number
from cudatma.emulator.ptx.model import (
    Function,
    Imm,
    Instruction,
    Mem,
    Module,
    Not,
    Operand,
    Pair,
    Part,
    Reg,
    Sink,
    Sym,
    Variable,
    Vec,
)

#: Matches a register followed by the bytes or half-words that a video instruction selects.
_SELECTED = re.compile(r"(.+)\.([bh]\d{1,4})$")
_RANGED = re.compile(r"(.*?)(0|[1-9]\d*)$")
_MAX_REGISTERS = 1 << 20
#: Replacements that remove blanks around punctuation from tokens joined by blanks.
_SPACING = (
    *((f" {mark}", mark) for mark in ",;]})"),
    *((f"{mark} ", mark) for mark in ";]})[{(@!"),
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)\s*(.*)")
#: Matches an attribute of .loc: the name of the inlined function, or the place of the call.
_LOC_ATTRIBUTE = re.compile(
    r",\s*(?:function_name\s+[\w$]+\s*(?:\+\s*\d+)?|inlined_at\s+(\d+)\s+(\d+)\s+(\d+))\s*(?=,|$)"
)
#: Maximum number of inlined calls in a source location. Further calls are dropped.
_MAX_INLINED = 32
#: Matches the pragma that states which bytes of the next load the program uses. Bit i corresponds to byte i.
_USED_BYTES = re.compile(r"used_bytes_mask\s+(0[xX][\da-fA-F]{1,8}|0|[1-9]\d{0,9})")


@dataclass(slots=True)
class _Scope:
    """Names that are declared inside a pair of braces.

    ``ranges`` maps the prefix of a declaration such as ``%r<10>`` to its type and count. ``operands`` contains the
    registers that instructions in this scope have used.
    """

    number: int
    parent: _Scope | None
    registers: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    operands: dict[str, Reg] = field(default_factory=dict)

    def mangle(self, name: str) -> str:
        return name if self.number == 0 else f"{name}@{self.number}"


@lru_cache(maxsize=4096)
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple(opcode.split("."))


class BodyParser:
    """Parser that fills a Function from the ``{`` of its body to the matching ``}``."""

    def __init__(self, cursor: Cursor, function: Function, module: Module) -> None:
        self.cursor, self.function, self.module = cursor, function, module
        self.scopes = 0
        self.file, self.source_line = 0, 0
        self.inlined_at: tuple[tuple[int, int], ...] = ()
        self._callers: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self.used_bytes: int | None = None
        self.branches: list[tuple[int, _Scope]] = []

    def read(self) -> None:
        """Parse the body and resolve its labels."""
        self._scope(None)
        for index, scope in self.branches:
            instruction = self.function.body[index]
            instruction.operands = tuple(self._resolve(o, scope, instruction) for o in instruction.operands)

    def _resolve(self, operand: Operand, scope: _Scope | None, instruction: Instruction) -> Operand:
        if not isinstance(operand, Sym):
            return operand
        inner = scope
        while inner is not None:
            if operand.name in inner.labels:
                return Sym(inner.labels[operand.name])
            inner = inner.parent
        raise PtxError(f"unknown label `{operand.name}`", instruction.line, text=instruction.text)

    def _scope(self, parent: _Scope | None) -> None:
        cursor = self.cursor
        cursor.expect("{")
        scope = _Scope(self.scopes, parent)
        self.scopes += 1
        while not cursor.accept("}"):
            token = cursor.token
            if token.text == "{":
                self._scope(scope)
            elif token.kind == "directive":
                self._directive(scope)
            elif token.kind == "word" and cursor.peek().text == ":":
                self._label(scope)
            elif not cursor.accept(";"):
                self._instruction(scope)

    def _label(self, scope: _Scope) -> None:
        token = self.cursor.next()
        self.cursor.expect(":")
        mangled = scope.mangle(token.text)
        if self.cursor.token.text == ".branchtargets":
            self.cursor.next()
            targets = [self.cursor.expect_kind("word").text]
            while self.cursor.accept(","):
                targets.append(self.cursor.expect_kind("word").text)
            self.cursor.expect(";")
            self.function.branch_targets[mangled] = tuple(targets)
        elif self.cursor.token.text in (".callprototype", ".calltargets"):
            self.cursor.skip_statement()
        else:
            if token.text in scope.labels:
                raise PtxError(f"label `{token.text}` is declared twice", token.line)
            self.function.labels[mangled] = len(self.function.body)
        scope.labels[token.text] = mangled

    def _directive(self, scope: _Scope) -> None:
        cursor = self.cursor
        token = cursor.next()
        name = token.text[1:]
        if name == "reg":
            self._registers(scope)
        elif name in ("local", "shared", "param", "const", "global"):
            for variable in read_variable(cursor, name):
                self._variable(scope, variable)
            cursor.expect(";")
        elif name.startswith("loc"):
            self._location(token)
        elif name == "pragma":
            self._pragma()
        else:
            raise PtxError(f"directive `.{name}` is not supported in a function", token.line)

    def _pragma(self) -> None:
        cursor = self.cursor
        while not cursor.accept(";"):
            used = _USED_BYTES.fullmatch(cursor.next().text[1:-1].strip())
            if used:
                self.used_bytes = int(used[1], 0)

    def _location(self, token: Token) -> None:
        """Parse ``.loc file line column``. For inlined code, the directive also refers to the .loc of the call."""
        directive = _LOC.fullmatch(token.text)
        if directive is None or _LOC_ATTRIBUTE.sub("", directive[4]):
            raise PtxError(f"`{token.text[:80]}` is not a valid .loc directive", token.line)
        place = int(directive[1]), int(directive[2]), int(directive[3])
        self.file, self.source_line = place[:2]
        self.inlined_at = ()
        for attribute in _LOC_ATTRIBUTE.finditer(directive[4]):
            if attribute[1]:
                caller = int(attribute[1]), int(attribute[2]), int(attribute[3])
                self.inlined_at = (caller[:2], *self._callers.get(caller, ()))[:_MAX_INLINED]
        self._callers[place] = self.inlined_at

    def _registers(self, scope: _Scope) -> None:
        cursor = self.cursor
        scope.operands.clear()
        kind = cursor.expect_kind("directive").text[1:]
        lanes = ""
        if kind in ("v2", "v4"):
            lanes = "xyzw"[: int(kind[1])]
            kind = cursor.expect_kind("directive").text[1:]
        if kind not in TYPE_BYTES:
            raise cursor.error(f"register type `.{kind}` is unknown")
        while True:
            name = cursor.expect_kind("word").text
            if cursor.accept("<"):
                count = cursor.integer()
                cursor.expect(">")
                if not 0 <= count <= _MAX_REGISTERS:
                    raise cursor.error(f"the number of registers must be from 0 to {_MAX_REGISTERS}, got {count}")
                if name in scope.ranges:
                    raise cursor.error(f"registers `{name}` are declared twice")
                scope.ranges[name] = (kind, count)
            else:
                for full in [f"{name}.{lane}" for lane in lanes] or [name]:
                    if full in scope.registers:
                        raise cursor.error(f"register `{full}` is declared twice")
                    self._new_register(scope, full, kind)
            if not cursor.accept(","):
                break
        cursor.expect(";")

    def _new_register(self, scope: _Scope, name: str, kind: str) -> int:
        index = len(self.function.registers)
        self.function.registers.append(kind)
        self.function.register_names.append(name)
        scope.registers[name] = index
        return index

    def _variable(self, scope: _Scope, variable: Variable) -> None:
        if variable.name in scope.variables:
            raise self.cursor.error(f"variable `{variable.name}` is declared twice")
        renamed = scope.mangle(variable.name)
        scope.variables[variable.name] = renamed
        variable = replace(variable, name=renamed)
        if variable.space == "param":
            self.function.param_locals[renamed] = variable
        elif variable.space in ("const", "global"):
            self.module.variables[renamed] = variable
        else:
            self.function.variables[renamed] = variable

    def _find_register(self, scope: _Scope, name: str) -> int | None:
        ranged = _RANGED.match(name)
        inner: _Scope | None = scope
        while inner is not None:
            if name in inner.registers:
                return inner.registers[name]
            if ranged and ranged[1] in inner.ranges:
                kind, count = inner.ranges[ranged[1]]
                if len(ranged[2]) < 9 and int(ranged[2]) < count:
                    return self._new_register(inner, name, kind)
            inner = inner.parent
        return None

    def _instruction(self, scope: _Scope) -> None:
        cursor = self.cursor
        start = cursor.at
        guard = None
        if cursor.accept("@"):
            negated = cursor.accept("!")
            token = cursor.expect_kind("word")
            index = self._find_register(scope, token.text)
            if index is None or self.function.registers[index] != "pred":
                raise PtxError(f"`@{token.text}` is not a predicate register", token.line)
            guard = (index, negated)
        opcode = cursor.expect_kind("word")
        operands: list[Operand] = []
        if not cursor.accept(";"):
            while True:
                operands.append(self._operand(scope))
                if cursor.accept(";"):
                    break
                cursor.expect(",")
        text = self._text(start)
        parts = _parts(opcode.text)
        instruction = Instruction(
            parts, tuple(operands), opcode.line, text, guard, self.file, self.source_line, self.inlined_at
        )
        if guard is not None and instruction.members is not None:
            self._branch_around(instruction, guard)
            return
        self.function.body.append(instruction)
        if self.used_bytes is not None and parts[0] in ("ld", "ldu"):
            self.function.used_bytes[len(self.function.body) - 1] = self.used_bytes
        self.used_bytes = None
        if parts[0] in ("bra", "brx"):
            self.branches.append((len(self.function.body) - 1, scope))

    def _branch_around(self, instruction: Instruction, guard: tuple[int, bool]) -> None:
        """Replace the guard of an instruction that has a member mask with a branch around the instruction.

        The lanes reconverge after the instruction.
        """
        body, (register, negated) = self.function.body, guard
        past = f"past instruction {len(body)}"
        branch = replace(instruction, parts=("bra",), operands=(Sym(past),), guard=(register, not negated))
        body += [branch, replace(instruction, guard=None)]
        self.function.labels[past] = len(body)

    def _text(self, start: int) -> str:
        text = " ".join([token.text for token in self.cursor.tokens[start : min(self.cursor.at - 1, start + 40)]])
        for spaced, compact in _SPACING:
            text = text.replace(spaced, compact)
        return text

    def _operand(self, scope: _Scope) -> Operand:
        cursor = self.cursor
        known = scope.operands.get(cursor.token.text)
        if known is not None and cursor.peek().text != "|":
            cursor.at += 1
            return known
        if cursor.accept("["):
            return self._memory(scope)
        if cursor.token.text in ("{", "("):
            close = "}" if cursor.next().text == "{" else ")"
            items: list[Operand] = []
            while not cursor.accept(close):
                items.append(self._operand(scope))
                cursor.accept(",")
            return Vec(tuple(items))
        if cursor.accept("!"):
            return Not(self._operand(scope))
        first = self._simple(scope)
        return Pair(first, self._simple(scope)) if cursor.accept("|") else first

    def _simple(self, scope: _Scope) -> Reg | Imm | Sym | Sink | Part:
        cursor = self.cursor
        known = scope.operands.get(cursor.token.text)
        if known is not None:
            cursor.at += 1
            return known
        if cursor.token.text in ("-", "+"):
            negative = cursor.next().text == "-"
            return number(cursor.expect_kind("number"), negative)
        if cursor.token.kind == "number":
            return number(cursor.next())
        token = cursor.expect_kind("word")
        if token.text == "_":
            return Sink()
        register = self._find_register(scope, token.text)
        if register is not None:
            operand = scope.operands[token.text] = Reg(register)
            return operand
        selected = _SELECTED.match(token.text)
        if selected:
            register = self._find_register(scope, selected[1])
            if register is not None:
                return Part(Reg(register), selected[2])
        name = token.text
        inner: _Scope | None = scope
        while inner is not None:
            if name in inner.variables:
                name = inner.variables[name]
                break
            inner = inner.parent
        offset = 0
        while cursor.token.text in ("+", "-"):
            offset += cursor.integer() if cursor.token.text == "-" or cursor.accept("+") else 0
        return Sym(name, offset)

    def _memory(self, scope: _Scope) -> Mem:
        cursor = self.cursor
        base = self._simple(scope)
        if isinstance(base, Sink | Part):
            raise cursor.error("an address must not be `_` or a part of a register")
        offset = 0
        while cursor.token.text in ("+", "-"):
            offset += cursor.integer() if cursor.token.text == "-" or cursor.accept("+") else 0
        extra: list[Operand] = []
        while cursor.accept(","):
            extra.append(self._operand(scope))
        cursor.expect("]")
        return Mem(base, offset, tuple(extra))
