"""Registers of a wgmma in flight that something else writes, found in SASS.

HGMMA goes on after it was issued: until WARPGROUP.DEPBAR has waited for its commit group it reads operand A's
registers and adds to its accumulators. ptxas keeps the fragments of groups in flight apart within the body of a loop,
not across its end: the next iteration's weights may go into registers that a wgmma still reads. Results are then wrong,
and differ from run to run (docs/design/marlin.md, "Traps"); ptxas says nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .sass_flow import Code, Step, parse_encoded, states_before

_WGMMAS = ("HGMMA", "IGMMA", "QGMMA", "BGMMA")
#: Operand A of any type is 64 rows of 32 bytes, in the registers of 128 threads.
_A_REGISTERS = 4
#: `HGMMA.64x128x16.F32`: columns of the result, and how it is added up.
_SHAPE = re.compile(r"\.64x(?P<columns>\d+)x\d+(?P<half>\.F16\b)?")
#: Their first register, where they name one, is read.
_WITHOUT_RESULT = (
    *("ISETP", "FSETP", "DSETP", "HSETP2", "FCHK"),
    *("BAR", "WARPSYNC", "NANOSLEEP", "CALL", "RET", "BRX", "JMX"),
)
_PREDICATE = re.compile(r"U?P(?:\d|T)")
_REGISTER = re.compile(r"R(\d+)\b")
_ALLOWED = re.compile(r"0x([0-9a-f]+)$")
#: What the opcode of a result of more than one register looks like, and how many they are.
_WIDTHS = (
    (re.compile(r"\.(128|MT?88\.4)\b|^[HIQD]MMA\b"), 4),
    (re.compile(r"\.(64|WIDE|F64|MT?88\.2)\b|^D(ADD|MUL|FMA)\b|^CS2R$"), 2),
)


@dataclass(frozen=True, slots=True)
class WgmmaHazard:
    """A write to a register of a wgmma that may be in flight. Addresses are bytes in the function.

    operand: ``"A"``, which the wgmma reads, or ``"D"``, its accumulators.
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


#: Address of a wgmma that may be in flight -> how many groups were at least committed since, its own included; 0: its
#: own is still open. As groups end in order, only the youngest run of an instruction counts.
InFlight = Mapping[int, int]


def wgmma_hazards(text: str) -> tuple[WgmmaHazard, ...]:
    """All hazards in the functions of an encoded disassembly (see parse_encoded), by address of the write.

    A wgmma counts as in flight if it may be so on one path. One wgmma may write another's accumulators, for they run in
    order. Of a write that is at fault for several registers of a wgmma's operand the first is named. Reads of
    accumulators are not looked at. Raises ArgumentError for text without encodings.
    """
    return tuple(hazard for code in parse_encoded(text) for hazard in _of_function(code))


def _of_function(code: Code) -> list[WgmmaHazard]:
    wgmmas = {step.address: step for step in code.steps if step.mnemonic in _WGMMAS}
    if not wgmmas:
        return []
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
    return hazards


def _merge(left: InFlight, right: InFlight) -> InFlight:
    """In flight on either path, and as young as on either."""
    merged = dict(left)
    for address, committed in right.items():
        merged[address] = min(merged.get(address, committed), committed)
    return merged


def _issue(step: Step, in_flight: InFlight) -> InFlight:
    """What is in flight after the step. Under a guard neither a wait nor a commit is sure."""
    if step.predicate == "!PT":
        return in_flight
    if step.mnemonic in _WGMMAS:
        # gsb0 marks a group's last: it commits those before it too.
        commits = int("gsb0" in step.operands)
        surely = 0 if step.predicate else commits
        return {address: committed + surely for address, committed in in_flight.items()} | {step.address: commits}
    is_wait = step.opcode == "WARPGROUP.DEPBAR.LE" and not step.predicate
    if is_wait and (allowed := _ALLOWED.search(step.operands)):
        return {address: committed for address, committed in in_flight.items() if committed <= int(allowed[1], 16)}
    return in_flight


def registers_written(step: Step) -> range:
    """The general registers that a step may write; empty where there are none. Rather too many than too few: what is
    not known writes the first register that it names."""
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
    return next((width for looks, width in _WIDTHS if looks.search(step.opcode)), 1)


def _fragment(wgmma: Step) -> range:
    """Operand A's registers; empty where it comes from shared memory."""
    first = _REGISTER.match(_operands(wgmma)[1])
    return range(int(first[1]), int(first[1]) + _A_REGISTERS) if first else range(0)


def _operands(step: Step) -> list[str]:
    return [operand.strip() for operand in step.operands.split(",")]
