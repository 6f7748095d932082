"""Control-flow graph of SASS with encodings, and the scoreboards that each instruction waits for.

An instruction on Hopper and Blackwell has 128 bits, printed as two 64-bit words. Bits 105-125 control scheduling: the
stall cycles (105-108), the yield flag (109), the scoreboard that is cleared when the result is available (110-112, 7:
none), the scoreboard that is cleared when the operands have been read (113-115, 7: none), and a mask of the six
scoreboards that must be clear before the instruction is issued (116-121). NVIDIA documents the disassemblers (CUDA
Binary Utilities), but not these bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeVar

from cudatma.errors import ArgumentError

from .sass import function_heading

#: Number of scoreboards per warp, and the value of a scoreboard field that names no scoreboard.
SCOREBOARDS = 6
_NO_SCOREBOARD = 7
#: First bits of the fields in the upper word.
_WRITE_AT, _READ_AT, _WAIT_AT = 110 - 64, 113 - 64, 116 - 64

_LABEL = re.compile(r"^(?P<name>[.$\w]+):\s*$")
_LOWER = re.compile(
    r"^\s*/\*(?P<address>[0-9a-fA-F]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);\s*/\*\s*0x[0-9a-fA-F]{16}\s*\*/\s*$"
)
_UPPER = re.compile(r"^\s*/\*\s*0x(?P<word>[0-9a-fA-F]{16})\s*\*/\s*$")
_TARGET = re.compile(r"`\((?P<label>[^)]+)\)|\b0x(?P<address>[0-9a-fA-F]+)\s*$")
_JUMP_TABLE = re.compile(r"BRANCH_TARGETS\s+([^\"]+)")
_WAITED = re.compile(r"SB(\d)\s*,\s*0x0\b|\{([\d,\s]+)\}")
_BARRIER = re.compile(r"\bB\d+\b")

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Step:
    """An encoded instruction.

    Attributes
    ----------
    predicate : str
        Guard predicate, or "".
    write_scoreboard : int or None
        Scoreboard that is clear once the result is available, or None.
    waits : int
        Mask of the scoreboards that are clear once the instruction has been issued.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    write_scoreboard: int | None
    waits: int

    @property
    def mnemonic(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(slots=True)
class Code:
    """Steps of a function in order of address, and the index of the step after each label."""

    function: str
    steps: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse_encoded(text: str) -> tuple[Code, ...]:
    """Return the functions of an encoded disassembly.

    ``text`` is the output of ``nvdisasm --print-code --print-instruction-encoding`` or ``cuobjdump --dump-sass``. Raise
    ArgumentError for instructions without encodings.
    """
    codes: list[Code] = []
    lines = iter(text.splitlines())
    for line in lines:
        if heading := function_heading(line):
            codes.append(Code(heading))
        elif codes and (label := _LABEL.match(line)):
            codes[-1].labels[label["name"]] = len(codes[-1].steps)
        elif part := _LOWER.match(line):
            if not codes:
                codes.append(Code(""))
            upper = _UPPER.match(next(lines, ""))
            if upper is None:
                raise ArgumentError("text", line.strip(), "two encoding words for each instruction", "is it cut off?")
            codes[-1].steps.append(_step(part, int(upper["word"], 16)))
        elif re.match(r"\s*/\*[0-9a-fA-F]{4,}\*/\s+\S", line):
            remedy = "disassemble with nvdisasm --print-code --print-instruction-encoding"
            raise ArgumentError("text", line.strip(), "instructions with their encodings", remedy)
    return tuple(codes)


def _step(part: re.Match[str], upper: int) -> Step:
    write = upper >> _WRITE_AT & 7
    waits = upper >> _WAIT_AT & (1 << SCOREBOARDS) - 1
    operands = part["operands"].strip()
    if part["opcode"].startswith("DEPBAR"):
        # DEPBAR waits for more than its mask: `DEPBAR.LE SB0, 0x0, {3,2}`. `SB0, 0x1` leaves one pending.
        for whole, listed in _WAITED.findall(operands):
            for scoreboard in [whole] if whole else listed.split(","):
                waits |= 1 << int(scoreboard)
    return Step(
        int(part["address"], 16),
        part["predicate"] or "",
        part["opcode"],
        operands,
        None if write == _NO_SCOREBOARD else write,
        waits,
    )


def successors(code: Code) -> list[tuple[int, ...]]:
    """Return, for each step, the indices of the steps that the same thread may issue next.

    The result is a superset of the real successors. A return continues after every call, and a jump without a target
    continues at every label.
    """
    by_address = {step.address: index for index, step in enumerate(code.steps)}
    after_calls = [index + 1 for index, step in enumerate(code.steps) if step.mnemonic == "CALL"]
    joins: dict[str, set[int]] = {}
    for step in code.steps:
        if step.mnemonic == "BSSY" and (barrier := _BARRIER.search(step.operands)):
            joins.setdefault(barrier[0], set()).update(_targets(step, code, by_address))
    following: list[tuple[int, ...]] = []
    for index, step in enumerate(code.steps):
        after = set(_after(index, step, code, by_address, after_calls, joins))
        following.append(tuple(sorted(other for other in after if other < len(code.steps))))
    return following


def states_before(
    code: Code, nothing: State, after: Callable[[Step, State], State], merge: Callable[[State, State], State]
) -> list[State]:
    """Return the state before each step by a forward data-flow analysis that runs to its fixed point.

    ``nothing`` is the state at the beginning of the code and of unreachable steps. ``merge`` joins the states of two
    paths. ``nothing`` must be its neutral element, and repeated merging must converge.
    """
    following = successors(code)
    before = [nothing] * len(code.steps)
    reached = [False] * len(code.steps)
    queue = [0] if code.steps else []
    while queue:
        index = heappop(queue)
        state = after(code.steps[index], before[index])
        for other in following[index]:
            merged = merge(before[other], state)
            if not reached[other] or merged != before[other]:
                reached[other], before[other] = True, merged
                if other not in queue:
                    heappush(queue, other)
    return before


def _after(
    index: int,
    step: Step,
    code: Code,
    by_address: dict[int, int],
    after_calls: list[int],
    joins: dict[str, set[int]],
) -> Iterator[int]:
    guarded = bool(step.predicate)
    match step.mnemonic:
        case "EXIT":
            pass
        case "RET":
            yield from after_calls
        case "BRA" | "BRX" | "BRXU" | "JMP" | "JMX" | "JMXU" | "CALL":
            yield from _targets(step, code, by_address) or code.labels.values()
            # `BRA.U UP0, `(x)` and `BRA.DIV UR4, `(x)` have their condition among the operands.
            guarded = guarded or (step.mnemonic == "BRA" and "," in _TARGET.sub("", step.operands))
        case "WARPSYNC":
            yield from _targets(step, code, by_address)
            yield index + 1
        case "BSYNC":
            # Threads continue at the target of their BSSY. In ptxas's layout, this is the instruction after the BSYNC.
            barrier = _BARRIER.search(step.operands)
            named = joins.get(barrier[0], set()) if barrier else set()
            yield from {index + 1} if not named or index + 1 in named else named
        case _:
            yield index + 1
    if guarded:
        yield index + 1


def _targets(step: Step, code: Code, by_address: dict[int, int]) -> list[int]:
    """Return the targets in the operands: a label, a jump table's labels, an address, or nothing."""
    if table := _JUMP_TABLE.search(step.operands):
        return [code.labels[name] for name in re.split(r"[,\s]+", table[1].strip()) if name in code.labels]
    if match := _TARGET.search(step.operands):
        if match["label"]:
            return [code.labels[match["label"]]] if match["label"] in code.labels else []
        address = int(match["address"], 16)
        return [by_address[address]] if address in by_address else []
    return []
