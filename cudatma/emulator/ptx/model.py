"""A parsed PTX module: plain data, no behaviour.

Source: PTX ISA, chapters "Syntax", "State Spaces, Types, and Variables", "Directives".
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reg:
    """A register operand: its index in Function.registers."""

    index: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate. bits: the value as written (a Python int); kind: "int", "f32" or "f64" (bits hold the float's)."""

    bits: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Sym:
    """A named variable, function, label or special register (``%tid.x``), plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """``[base+offset]`` or ``[base, {coordinates}]`` with further comma-separated parts in ``extra``."""

    base: Reg | Imm | Sym
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """``!p`` as a source operand."""

    reg: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination that is thrown away."""


@dataclass(frozen=True, slots=True)
class Part:
    """``%r1.b0``: bytes (b) or half-words (h) of a register, as video instructions select them."""

    reg: Reg
    selector: str


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not | Sink | Part


#: Instructions whose last operand is a member mask, where they say .sync.
MEMBERS = {"shfl", "vote", "match", "redux", "elect"}


@dataclass(slots=True)
class Instruction:
    """One statement. parts: the opcode split at its dots; guard: predicate register and whether it is negated.

    file, source_line: the .loc in force, 0 where there is none. inlined_at: (file, line) of the calls through which it
    was inlined, innermost first.
    """

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: int
    text: str
    guard: tuple[int, bool] | None = None
    file: int = 0
    source_line: int = 0
    inlined_at: tuple[tuple[int, int], ...] = ()

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)

    @property
    def members(self) -> Operand | None:
        """The member mask: the operand that names the lanes which execute the instruction together."""
        parts = self.parts
        if parts[:2] == ("bar", "warp") or (parts[0] in MEMBERS and "sync" in parts):
            return self.operands[-1] if self.operands else None
        return None

    @property
    def names_all(self) -> bool:
        """Whether the member mask is the constant of all lanes."""
        mask = self.members
        return isinstance(mask, Imm) and mask.bits & 0xFFFFFFFF == 0xFFFFFFFF

    @property
    def is_whole_warp(self) -> bool:
        """Whether all lanes of a warp have to execute this very instruction."""
        if self.parts[0] == "bar":
            return self.parts[:2] != ("bar", "warp")
        return "aligned" in self.parts


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space. size_bytes 0: an extern array. init: bytes, with symbols to patch in. kind: its
    PTX type."""

    name: str
    space: str
    align: int
    size_bytes: int
    init: bytes = b""
    relocations: tuple[tuple[int, str, int], ...] = ()
    is_extern: bool = False
    kind: str = ""


@dataclass(slots=True)
class Function:
    """An entry or a .func.

    registers: PTX type of each register ("b32", "pred", ...); register_names likewise. body: instructions; labels:
    name -> index in the body. params, returns: in order, with sizes. variables: .shared and .local ones of the body.
    used_bytes: of a load, by its index, the bytes that the program uses, as bits.
    """

    name: str
    is_entry: bool
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    registers: list[str] = field(default_factory=list)
    register_names: list[str] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    param_locals: dict[str, Variable] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    used_bytes: dict[int, int] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_defined: bool = True


@dataclass(slots=True)
class Module:
    """A PTX module. files: number of .file -> path."""

    version: tuple[int, int] = (0, 0)
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    def source_of(self, instruction: Instruction) -> str:
        """ "name.cu:12" of the .loc in force, followed by ", inlined at name.cu:30"; "" where there is none."""
        if not instruction.source_line:
            return ""
        places = ((instruction.file, instruction.source_line), *instruction.inlined_at)
        return ", inlined at ".join(f"{self._file_name(file)}:{line}" for file, line in places)

    def _file_name(self, file: int) -> str:
        return self.files.get(file, f"file {file}").rsplit("/", 1)[-1]
