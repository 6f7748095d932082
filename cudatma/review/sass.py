"""Parse SASS into instructions with their scoreboards, source lines and classes.

An instruction on Hopper and Blackwell has 128 bits, printed as two 64-bit words. These bits control scheduling:

- 105-108: stall cycles
- 109: yield flag
- 110-112: scoreboard that is cleared when the result is available (7: none)
- 113-115: scoreboard that is cleared when the operands have been read (7: none)
- 116-121: mask of the scoreboards that must be clear before the instruction is issued

NVIDIA documents the disassemblers and the mnemonics (CUDA Binary Utilities, "Instruction Set Reference"), but not these
bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cudatma.errors import ArgumentError

#: Instructions that a report counts, by class, with their meanings. A report also lists absent instructions.
CLASSES: dict[str, dict[str, str]] = {
    "TMA": {
        "UTMALDG": "tensor tile, global to shared",
        "UTMASTG": "tensor tile, shared to global",
        "UTMAREDG": "tensor tile, reduced into global",
        "UTMAPF": "tensor tile prefetch to L2",
        "UTMACCTL": "tensor map prefetch or fence",
        "UTMACMDFLUSH": "bulk group commit",
        "UBLKCP": "bulk copy",
        "UBLKRED": "bulk reduction",
        "UBLKPF": "bulk prefetch to L2",
    },
    "global": {
        "LDG": "load",
        "STG": "store",
        "LDGSTS": "cp.async, global to shared",
        "LDGDEPBAR": "cp.async commit",
        "RED": "reduction",
        "REDG": "reduction",
        "ATOM": "atomic",
        "ATOMG": "atomic",
    },
    "shared": {
        "LDS": "load",
        "STS": "store",
        "LDSM": "ldmatrix",
        "STSM": "stmatrix",
        "MOVM": "movmatrix",
        "ATOMS": "atomic",
    },
    "local": {"LDL": "load (spill or indexed array)", "STL": "store (spill or indexed array)"},
    "tensor core": {
        "HMMA": "mma.sync, 16-bit floats",
        "IMMA": "mma.sync, integers",
        "QMMA": "mma.sync, 8-bit floats",
        "OMMA": "mma.sync, 4-bit floats",
        "DMMA": "mma.sync, doubles",
        "HGMMA": "wgmma, 16-bit floats",
        "IGMMA": "wgmma, integers",
        "QGMMA": "wgmma, 8-bit floats",
        "WARPGROUP": "wgmma fence and wait",
        "UTCHMMA": "tcgen05, 16-bit floats",
    },
    "barrier": {
        "SYNCS": "mbarrier",
        "ARRIVES": "mbarrier arrive by cp.async",
        "BAR": "CTA barrier",
        "DEPBAR": "wait for bulk or cp.async groups",
        "UTMADEPBAR": "wait for bulk groups",
        "FENCE": "proxy fence",
        "MEMBAR": "memory fence",
        "ELECT": "elect one lane",
        "WARPSYNC": "warp barrier",
        "UCGABAR_ARV": "cluster barrier arrive",
        "UCGABAR_WAIT": "cluster barrier wait",
        "ACQBULK": "wait for the previous kernel (griddepcontrol.wait)",
        "PREEXIT": "allow the next kernel to start (griddepcontrol.launch_dependents)",
        "USETMAXREG": "setmaxnreg",
    },
    "arithmetic": {
        "LOP3": "logic",
        "PRMT": "byte permute",
        "SHF": "shift",
        "HADD2": "packed half add",
        "HMUL2": "packed half multiply",
        "HFMA2": "packed half fma",
        "FADD": "float add",
        "FMUL": "float multiply",
        "FFMA": "float fma",
        "MUFU": "special function",
        "F2FP": "float to half or bfloat",
        "IMAD": "integer multiply-add, move, address",
        "IADD": "integer add, address",
        "IADD3": "integer add, address",
        "LEA": "shift and add, address",
        "ISETP": "integer compare",
        "BRA": "branch",
    },
}

_CLASS_OF = {mnemonic: name for name, members in CLASSES.items() for mnemonic in members}

#: Number of scoreboards per warp, and the value of a field that specifies no scoreboard.
SCOREBOARDS = 6
_NO_SCOREBOARD = 7
#: First bit of each field in the upper word.
_WRITE_AT, _READ_AT, _WAIT_AT = 110 - 64, 113 - 64, 116 - 64

_LABEL = re.compile(r"^(?P<name>[.$\w]+):\s*$")
_LOWER = re.compile(
    r"^\s*/\*(?P<address>[0-9a-fA-F]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);\s*/\*\s*0x[0-9a-fA-F]{16}\s*\*/\s*$"
)
_UPPER = re.compile(r"^\s*/\*\s*0x(?P<word>[0-9a-fA-F]{16})\s*\*/\s*$")
_PLAIN = re.compile(r"\s*/\*[0-9a-fA-F]{4,}\*/\s+\S")
_WAITED = re.compile(r"SB(\d)\s*,\s*0x0\b|\{([\d,\s]+)\}")
_FUNCTION = re.compile(r"^\s*(?:Function\s*:\s*(?P<cuobjdump>\S+)|\.section\s+\.text\.(?P<nvdisasm>[^,\s]+))")
_PLACE = re.compile(r'^\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_ENCODING = re.compile(r"\s*/\*\s*0x[0-9a-f]{16}\s*\*/\s*$")

#: A place in the source: file without its folder, and line.
Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction and the fields of its encoding.

    Attributes
    ----------
    predicate : str
        Guard predicate, or "".
    write_scoreboard, read_scoreboard : int or None
        Scoreboard that is cleared when the result is available, or when the operands have been read, or None.
    waits : int
        Mask of the scoreboards for which the instruction waits.
    places : tuple of Place
        Place in the source, followed by the places of the calls through which the instruction was inlined.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    write_scoreboard: int | None
    read_scoreboard: int | None
    waits: int
    places: tuple[Place, ...] = ()

    @property
    def mnemonic(self) -> str:
        """Opcode without modifiers, for example ``"UTMALDG"`` for ``"UTMALDG.2D"``."""
        return self.opcode.partition(".")[0]


@dataclass(slots=True)
class Code:
    """Steps of a function in order of address, and the index of the step after each label."""

    function: str
    steps: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse_sass(text: str) -> tuple[Code, ...]:
    """Return the functions of an encoded disassembly.

    ``text`` is the output of ``nvdisasm --print-code --print-instruction-encoding`` or ``cuobjdump --dump-sass``.
    Raises ArgumentError if the encodings of instructions are missing.
    """
    codes: list[Code] = []
    lines = iter(text.splitlines())
    places: list[Place] = []
    is_new_place = True
    for line in lines:
        if heading := _FUNCTION.match(line):
            codes.append(Code(heading["cuobjdump"] or heading["nvdisasm"]))
            places = []
        elif codes and (label := _LABEL.match(line)):
            codes[-1].labels[label["name"]] = len(codes[-1].steps)
        elif place := _PLACE.match(line):
            places = [] if is_new_place else places
            places.append((place["file"].rsplit("/", 1)[-1], int(place["line"])))
            is_new_place = False
        elif part := _LOWER.match(line):
            if not codes:
                codes.append(Code(""))
            upper = _UPPER.match(next(lines, ""))
            if upper is None:
                raise ArgumentError(
                    "text",
                    line.strip(),
                    "SASS with two encoding words per instruction",
                    "check whether the text is truncated",
                )
            codes[-1].steps.append(_step(part, int(upper["word"], 16), tuple(places)))
            is_new_place = True
        elif _PLAIN.match(line):
            remedy = "disassemble with nvdisasm --print-code --print-instruction-encoding"
            raise ArgumentError("text", line.strip(), "SASS that includes the encodings of instructions", remedy)
    return tuple(codes)


def _step(part: re.Match[str], upper: int, places: tuple[Place, ...]) -> Step:
    write, read = upper >> _WRITE_AT & 7, upper >> _READ_AT & 7
    waits = upper >> _WAIT_AT & (1 << SCOREBOARDS) - 1
    operands = part["operands"].strip()
    if part["opcode"].startswith("DEPBAR"):
        # DEPBAR also waits for its operands: `DEPBAR.LE SB0, 0x0, {3,2}`. With `SB0, 0x1`, one may stay pending.
        for whole, listed in _WAITED.findall(operands):
            for scoreboard in [whole] if whole else listed.split(","):
                waits |= 1 << int(scoreboard)
    return Step(
        int(part["address"], 16),
        part["predicate"] or "",
        part["opcode"],
        operands,
        None if write == _NO_SCOREBOARD else write,
        None if read == _NO_SCOREBOARD else read,
        waits,
        places,
    )


def count_mnemonics(steps: Iterable[Step]) -> dict[str, int]:
    """Return the number of steps with each mnemonic except NOP, in descending order, then by name."""
    counts = Counter(step.mnemonic for step in steps if step.mnemonic != "NOP")
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def class_of(mnemonic: str) -> str:
    """Return the class of a mnemonic, or "". Forms for the uniform datapath (ULOP3) count as ordinary forms (LOP3)."""
    return _CLASS_OF.get(mnemonic) or _CLASS_OF.get(mnemonic.removeprefix("U"), "")


def by_class(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Group counts by CLASSES, including zeros. Forms for the uniform datapath (ULOP3) count as ordinary forms."""
    return {
        name: {mnemonic: counts.get(mnemonic, 0) + counts.get(f"U{mnemonic}", 0) for mnemonic in members}
        for name, members in CLASSES.items()
    }


def uses_cluster(steps: Iterable[Step]) -> list[str]:
    """Return the sorted opcodes that require a cluster: multicast copies and cluster barriers."""
    return sorted(
        {step.opcode for step in steps if "MULTICAST" in step.opcode.split(".") or step.mnemonic.startswith("UCGABAR")}
    )


def without_encodings(text: str) -> str:
    """Remove the columns that contain the two encoding words of each instruction."""
    lines = (_ENCODING.sub("", line) for line in text.splitlines() if not _UPPER.match(line))
    return "".join(f"{line}\n" for line in lines)
