"""Find writes in SASS to registers that a wgmma in flight uses.

HGMMA is asynchronous. Until WARPGROUP.DEPBAR has waited for its commit group, it may read the registers of operand A
and add to its accumulators. ptxas assigns different registers to the fragments of groups in flight within one iteration
of a loop, but not across iterations. The next iteration may therefore write weights to registers that a wgmma is still
reading. Results are then wrong and vary between runs (docs/design/marlin.md, "Traps"). ptxas prints no warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .flow import states_before
from .sass import Code, Step

_WGMMAS = ("HGMMA", "IGMMA", "QGMMA", "BGMMA")
#: Number of registers of operand A. For any type, 128 threads hold its 64 rows of 32 bytes.
_A_REGISTERS = 4
#: Columns and accumulator type in an opcode such as `HGMMA.64x128x16.F32`.
_SHAPE = re.compile(r"\.64x(?P<columns>\d+)x\d+(?P<half>\.F16\b)?")
#: Instructions without a result register.
_WITHOUT_RESULT = (
    *("ISETP", "FSETP", "DSETP", "HSETP2", "FCHK"),
    *("BAR", "WARPSYNC", "NANOSLEEP", "CALL", "RET", "BRX", "JMX"),
)
_PREDICATE = re.compile(r"U?P(?:\d|T)")
_REGISTER = re.compile(r"R(\d+)\b")
_ALLOWED = re.compile(r"0x([0-9a-f]+)$")
#: Opcodes whose result has several registers, and the number of registers.
_WIDTHS = (
    (re.compile(r"\.(128|MT?88\.4)\b|^[HIQD]MMA\b"), 4),
    (re.compile(r"\.(64|WIDE|F64|MT?88\.2)\b|^D(ADD|MUL|FMA)\b|^CS2R$"), 2),
)


@dataclass(frozen=True, slots=True)
class WgmmaHazard:
    """A write to a register of a wgmma that may be in flight. Addresses are byte offsets in the function.

    ``operand`` is ``"A"`` for the operand that the wgmma reads, or ``"D"`` for its accumulators.
    """

    function: str
    write: int
    write_opcode: str
    register: int
    wgmma: int
    wgmma_opcode: str
    operand: str

    def __str__(self) -> str:
        wgmma = f"{self.wgmma_opcode} at {self.wgmma:#x}"
        return f"{self.write_opcode} at {self.write:#x} writes R{self.register}, operand {self.operand} of {wgmma}"


#: Maps the address of a wgmma that may be in flight to the minimum number of groups committed since then, including its
#: own group. 0 means that its own group is still open. Groups end in order, so only the latest execution of an
#: instruction counts.
InFlight = Mapping[int, int]


def wgmma_hazards(code: Code) -> tuple[WgmmaHazard, ...]:
    """Return the hazards in a function, by address of the write.

    A wgmma counts as in flight if it may be in flight on any path. A wgmma may write the accumulators of another wgmma,
    because wgmmas run in order. Reads of accumulators are not checked.
    """
    wgmmas = {step.address: step for step in code.steps if step.mnemonic in _WGMMAS}
    if not wgmmas:
        return ()
    nothing: InFlight = {}
    hazards = []
    for step, in_flight in zip(code.steps, states_before(code, nothing, _issue, _merge), strict=True):
        written = registers_written(step)
        for address in sorted(in_flight) if written else ():
            wgmma = wgmmas[address]
            used = {"A": _fragment(wgmma), "D": () if step.mnemonic in _WGMMAS else registers_written(wgmma)}
            for operand, registers in used.items():
                if both := set(written) & set(registers):
                    at = (min(both), address, wgmma.opcode, operand)
                    hazards.append(WgmmaHazard(code.function, step.address, step.opcode, *at))
    return tuple(hazards)


def _merge(left: InFlight, right: InFlight) -> InFlight:
    """Merge the states of two paths.

    A wgmma is in flight if it is in flight on either path. The smaller number of committed groups is kept, because the
    wgmma then counts as in flight for longer.
    """
    merged = dict(left)
    for address, committed in right.items():
        merged[address] = min(merged.get(address, committed), committed)
    return merged


def _issue(step: Step, in_flight: InFlight) -> InFlight:
    """Return the wgmmas in flight after the step. Ignore waits and commits that have a guard."""
    if step.predicate == "!PT":
        return in_flight
    if step.mnemonic in _WGMMAS:
        # gsb0 marks the last wgmma of a group, and commits the earlier wgmmas too.
        commits = int("gsb0" in step.operands)
        certain = 0 if step.predicate else commits
        return {address: committed + certain for address, committed in in_flight.items()} | {step.address: commits}
    is_wait = step.opcode == "WARPGROUP.DEPBAR.LE" and not step.predicate
    if is_wait and (allowed := _ALLOWED.search(step.operands)):
        return {address: committed for address, committed in in_flight.items() if committed <= int(allowed[1], 16)}
    return in_flight


def registers_written(step: Step) -> range:
    """Return the general registers that a step may write.

    The result is conservative: an unknown instruction is assumed to write its first register.
    """
    operands = _operands(step)
    while operands and _PREDICATE.fullmatch(operands[0]):
        operands = operands[1:]
    first = _REGISTER.match(operands[0]) if operands else None
    if first is None or step.mnemonic in _WITHOUT_RESULT or step.predicate == "!PT":
        return range(0)
    return range(int(first[1]), int(first[1]) + _width(step))


def _width(step: Step) -> int:
    if step.mnemonic in _WGMMAS and (shape := _SHAPE.search(step.opcode)):
        return int(shape["columns"]) // (4 if shape["half"] else 2)
    return next((width for pattern, width in _WIDTHS if pattern.search(step.opcode)), 1)


def _fragment(wgmma: Step) -> range:
    """Return the registers of operand A, or an empty range if operand A is in shared memory."""
    first = _REGISTER.match(_operands(wgmma)[1])
    return range(int(first[1]), int(first[1]) + _A_REGISTERS) if first else range(0)


def _operands(step: Step) -> list[str]:
    return [operand.strip() for operand in step.operands.split(",")]
