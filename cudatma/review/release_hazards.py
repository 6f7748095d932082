"""Find releases of ring slots in SASS that may be issued before reads of the slot have ended.

A consumer reads a slot of a ring with LDS or LDSM, and releases the slot with SYNCS.ARRIVE (mbarrier.arrive). The SM
may issue the arrival while a read is still in flight, if the arrival's wait mask does not contain the read's
scoreboard. If stores of other warps delay the load unit, TMA may refill the slot before the read. The warp then
computes with the values of the next stage [observed on an H200].

A use of the value before the arrival in the source does not help, because ptxas moves arithmetic past the arrival. Two
remedies pass this check: release the slot one iteration later, or place fence.acq_rel.cta before the arrival, because
ptxas makes this fence wait for every scoreboard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .flow import states_before
from .sass import Code, Step

#: Reads of shared memory. Their results arrive in the order in which the warp issued the reads.
_READS = ("LDS", "LDSM")
#: The wait for a stage, and the MMA instructions that use its values.
_WAIT, _PRODUCTS = "SYNCS.PHASECHK", ("HGMMA", "QGMMA", "HMMA", "QMMA")


@dataclass(frozen=True, slots=True)
class ReleaseHazard:
    """An arrival that may be issued while a read of shared memory is in flight.

    ``arrive`` and ``load`` are byte offsets in the function.
    """

    function: str
    arrive: int
    arrive_opcode: str
    load: int
    load_opcode: str

    def __str__(self) -> str:
        return f"{self.arrive_opcode} at {self.arrive:#x} does not wait for {self.load_opcode} at {self.load:#x}"


#: Reads that may be in flight. Each key is the address of a read and whether the warp has waited for a stage since. The
#: value is a mask of scoreboards. If any of them is clear, the read has ended. The mask contains the scoreboards of the
#: read and of later reads, because reads end in order. (ptxas relies on this order and assigns a scoreboard only to the
#: last of several reads.)
Pending = Mapping[tuple[int, bool], int]


def release_hazards(code: Code, *, releases_one_stage_late: bool = False) -> tuple[ReleaseHazard, ...]:
    """Return the hazards in a function, by address of the arrival.

    A read counts as in flight if it may be in flight on any path. Arrivals that do not release a slot are also
    reported. Reads by wgmma and bulk copies are not checked, because other instructions wait for them.

    Set ``releases_one_stage_late`` if the kernel releases each slot in the middle of the next stage. If MMAs of that
    stage follow an arrival, reads after the wait for the stage belong to another slot and are not reported.
    """
    by_address = {step.address: step for step in code.steps}
    nothing: Pending = {}
    pending_before = states_before(code, nothing, _issue, _merge)
    hazards = []
    for index, (step, pending) in enumerate(zip(code.steps, pending_before, strict=True)):
        if step.opcode.startswith("SYNCS.ARRIVE"):
            only_older = releases_one_stage_late and _is_amid_products(code, index)
            loads = {load for load, is_older in _remaining(step, pending) if is_older or not only_older}
            for load in sorted(loads):
                opcode = by_address[load].opcode
                hazards.append(ReleaseHazard(code.function, step.address, step.opcode, load, opcode))
    return tuple(hazards)


def _is_amid_products(code: Code, index: int) -> bool:
    """Return whether MMAs follow before the wait for another stage or an unconditional branch."""
    for step in code.steps[index + 1 :]:
        if step.mnemonic in _PRODUCTS:
            return True
        if step.opcode.startswith(_WAIT) or (step.mnemonic in ("BRA", "EXIT") and not step.predicate):
            return False
    return False


def _merge(left: Pending, right: Pending) -> Pending:
    """Merge the states of two paths. A read is in flight if it is in flight on either path.

    After the merge, a clear scoreboard shows the end of the read only if it does so on both paths.
    """
    merged = dict(left)
    for load, scoreboards in right.items():
        merged[load] = merged.get(load, scoreboards) & scoreboards
    return merged


def _remaining(step: Step, pending: Pending) -> dict[tuple[int, bool], int]:
    """Return the reads in flight after the step's waits. A step waits even if its guard is false."""
    return {load: scoreboards for load, scoreboards in pending.items() if not scoreboards & step.waits}


def _older(pending: Pending) -> Pending:
    older: Pending = {}
    for (load, _), scoreboards in pending.items():
        older = _merge(older, {(load, True): scoreboards})
    return older


def _issue(step: Step, pending: Pending) -> Pending:
    """Return the reads in flight after the step. A scoreboard is clear when all instructions that use it have ended."""
    if step.opcode.startswith(_WAIT):
        return _older(_remaining(step, pending))
    # `@!PT LDS RZ, [RZ]`, which ptxas places before some copies and fences, never executes.
    if step.mnemonic not in _READS or step.predicate == "!PT":
        return _remaining(step, pending) if step.waits and pending else pending
    own = 0 if step.write_scoreboard is None else 1 << step.write_scoreboard
    # The warp may skip a guarded read, so its scoreboard does not show the end of earlier reads.
    later = 0 if step.predicate else own
    state = {load: scoreboards | later for load, scoreboards in _remaining(step, pending).items()}
    state[step.address, False] = own
    return state
