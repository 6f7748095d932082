"""Data structures for a parsed PTX module.

Source: PTX ISA, chapters "Syntax", "State Spaces, Types, and Variables", "Directives".
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Maximum number of places in a source location of inlined code.
_MAX_PLACES = 4


@dataclass(frozen=True, slots=True)
class Reg:
    """A register operand: an index into Function.registers."""

    index: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate operand.

    ``kind`` is "int", "f32" or "f64". ``bits`` is the value of an int, or the bit pattern of a float.
    """

    bits: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable, function, label or special register (``%tid.x``), plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Mem:
    """A memory operand, ``[base+offset]`` or ``[base, {coordinates}]``. ``extra`` contains any further parts."""

    base: Reg | Imm | Sym
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """A vector operand, ``{a, b, ...}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair of destinations, ``a|b``."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate source, ``!p``."""

    reg: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """The sink ``_``, a destination operand that discards the value."""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes (``%r1.b0``) or half-words (``%r1.h1``) of a register that a video instruction selects."""

    reg: Reg
    selector: str


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not | Sink | Part


#: Opcodes whose last operand is a member mask if the instruction has the modifier .sync.
MEMBERS = {"shfl", "vote", "match", "redux", "elect"}


@dataclass(slots=True)
class Instruction:
    """A PTX instruction.

    ``parts`` is the opcode split at its dots. ``guard`` is the predicate register and whether the predicate is negated.
    ``file`` and ``source_line`` come from the preceding .loc directive. Without such a directive, ``source_line`` is 0.
    ``inlined_at`` lists the (file, line) of each call through which the code was inlined, innermost first.
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
        """Return the member mask, which selects the participating lanes, or None if there is none."""
        parts = self.parts
        if parts[:2] == ("bar", "warp") or (parts[0] in MEMBERS and "sync" in parts):
            return self.operands[-1] if self.operands else None
        return None

    @property
    def names_all(self) -> bool:
        """Return whether the member mask is constant and selects all lanes."""
        mask = self.members
        return isinstance(mask, Imm) and mask.bits & 0xFFFFFFFF == 0xFFFFFFFF

    @property
    def is_whole_warp(self) -> bool:
        """Return whether all lanes of a warp must execute this instruction together."""
        if self.parts[0] == "bar":
            return self.parts[:2] != ("bar", "warp")
        return "aligned" in self.parts


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in a state space.

    ``kind`` is the PTX type. ``size_bytes`` is 0 for an extern array. ``init`` is the initial value as bytes. Each
    entry of ``relocations`` is a (byte position, symbol, offset) whose address replaces bytes of ``init``.
    """

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
    """A kernel (.entry) or a function (.func).

    ``registers`` and ``register_names`` list the PTX type and the name of each register. ``labels`` maps each label to
    an index into ``body``. ``params`` and ``returns`` are in declaration order. ``variables`` are the .shared and
    .local variables of the body. ``used_bytes`` maps the index of a load to a bit mask of the bytes that the program
    uses.
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
    """A PTX module. ``files`` maps each file number of a .file directive to a path."""

    version: tuple[int, int] = (0, 0)
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    def source_of(self, instruction: Instruction) -> str:
        """Return the source location of an instruction, such as "name.cu:12, inlined at name.cu:30", or "" if unknown.

        A long chain of calls is shortened to the innermost place and the places in the file of the outermost place,
        which contains the kernel.
        """
        if not instruction.source_line:
            return ""
        places = ((instruction.file, instruction.source_line), *instruction.inlined_at)
        if len(places) > _MAX_PLACES:
            places = (places[0], *(place for place in places[1:] if place[0] == places[-1][0]))
        return ", inlined at ".join(f"{self._file_name(file)}:{line}" for file, line in places)

    def _file_name(self, file: int) -> str:
        return self.files.get(file, f"file {file}").rsplit("/", 1)[-1]
