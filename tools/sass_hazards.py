"""Releases that overtake reads, found in SASS.

A consumer reads a slot of a ring with LDS or LDSM and gives it back with SYNCS.ARRIVE (mbarrier.arrive). ptxas may
issue the arrival while a read is still in flight: nothing in the arrival's wait mask names the read's scoreboard. While
stores of other warps hold the load unit up, TMA then refills the slot before the read has happened, and the warp
computes with the next stage's values [seen on an H200]. A use of the value in the source before the arrival is no cure,
for ptxas moves arithmetic over it. Releasing a slot only when the loop has come round is, as far as this check finds
nothing; so is fence.acq_rel.cta before the arrival, which ptxas lets wait for every scoreboard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .sass_flow import Code, Step, parse_encoded, states_before

#: Reads of shared memory whose results come back in the order in which a warp issued them.
_READS = ("LDS", "LDSM")
#: The wait for a stage, and what its slots' values go into.
_WAIT, _PRODUCTS = "SYNCS.PHASECHK", ("HGMMA", "QGMMA", "HMMA", "QMMA")


@dataclass(frozen=True, slots=True)
class ReleaseHazard:
    """An arrival that may be issued while a read of shared memory is in flight. Addresses are bytes in the function."""

    function: str
    arrive: int
    arrive_opcode: str
    load: int
    load_opcode: str

    def __str__(self) -> str:
        return f"{self.arrive_opcode} at {self.arrive:#x} does not wait for {self.load_opcode} at {self.load:#x}"


#: (address of a read that may be in flight, whether a stage was waited for since) -> mask of the scoreboards of which
#: each, once clear, says that it has ended: its own, and those of the reads issued after it, for reads end in order.
#: (ptxas counts on that: it gives a scoreboard to the last of several reads only.)
Pending = Mapping[tuple[int, bool], int]


def release_hazards(text: str, *, gives_back_previous: bool = False) -> tuple[ReleaseHazard, ...]:
    """All hazards in the functions of an encoded disassembly (see parse_encoded), by address of the arrival.

    A read counts as in flight if it may be so on one path. An arrival that gives no slot back is reported too where a
    read is in flight; a producer's has none. Reads by wgmma and by bulk copies are not looked at: other instructions
    wait for those. gives_back_previous: the kernel releases a slot in the middle of the next stage, as its config says;
    reads since the wait for that stage are of another slot, where its products are not over after the arrival.
    Raises ArgumentError for text without encodings.
    """
    return tuple(hazard for code in parse_encoded(text) for hazard in _of_function(code, gives_back_previous))


def _of_function(code: Code, gives_back_previous: bool) -> list[ReleaseHazard]:
    by_address = {step.address: step for step in code.steps}
    nothing: Pending = {}
    pending_before = states_before(code, nothing, _issue, _merge)
    hazards = []
    for index, (step, pending) in enumerate(zip(code.steps, pending_before, strict=True)):
        if step.opcode.startswith("SYNCS.ARRIVE"):
            only_older = gives_back_previous and _is_amid_products(code, index)
            found = {load for load, is_older in _waited(step, pending) if is_older or not only_older}
            for load in sorted(found):
                opcode = by_address[load].opcode
                hazards.append(ReleaseHazard(code.function, step.address, step.opcode, load, opcode))
    return hazards


def _is_amid_products(code: Code, index: int) -> bool:
    """Whether products follow before another stage is waited for, or the code goes elsewhere for good."""
    for step in code.steps[index + 1 :]:
        if step.mnemonic in _PRODUCTS:
            return True
        if step.opcode.startswith(_WAIT) or (step.mnemonic in ("BRA", "EXIT") and not step.predicate):
            return False
    return False


def _merge(left: Pending, right: Pending) -> Pending:
    """In flight on either path; ended by what ends it on both."""
    merged = dict(left)
    for load, scoreboards in right.items():
        merged[load] = merged.get(load, scoreboards) & scoreboards
    return merged


def _waited(step: Step, pending: Pending) -> dict[tuple[int, bool], int]:
    """What is still in flight when the step is issued. A wait holds whether or not the guard lets the step run."""
    return {load: scoreboards for load, scoreboards in pending.items() if not scoreboards & step.waits}


def _older(pending: Pending) -> Pending:
    older: Pending = {}
    for (load, _), scoreboards in pending.items():
        older = _merge(older, {(load, True): scoreboards})
    return older


def _issue(step: Step, pending: Pending) -> Pending:
    """What is in flight after the step. A scoreboard counts: it is clear when all that use it have ended."""
    if step.opcode.startswith(_WAIT):
        return _older(_waited(step, pending))
    # `@!PT LDS RZ, [RZ]`, which ptxas puts before some copies and fences, never runs.
    if step.mnemonic not in _READS or step.predicate == "!PT":
        return _waited(step, pending) if step.waits and pending else pending
    own = 0 if step.write_scoreboard is None else 1 << step.write_scoreboard
    # A read that its guard may switch off says nothing about those before it.
    later = 0 if step.predicate else own
    state = {load: scoreboards | later for load, scoreboards in _waited(step, pending).items()}
    state[step.address, False] = own
    return state
