"""Detect reads of unwritten registers, and accesses to registers of a wgmma in flight.

Accumulators and A fragments must not be accessed between a wgmma and its wgmma.wait_group.

Source: PTX ISA, "wgmma.fence", "wgmma.mma_async" (an access to the registers before the wait is undefined).
"""

from __future__ import annotations

from typing import Any

from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.flow import bit_set, registers_of
from cudatma.emulator.ptx.model import Instruction, Reg, Vec
from cudatma.emulator.ptx.types import Array, is_unwritten


class _State:
    """The wgmma groups of a warp, and the bit set of registers that each group uses."""

    def __init__(self) -> None:
        self.committed = 0
        self.waited = 0
        self.is_fenced = False
        self.has_open = False
        self.owned: list[tuple[int, int, int]] = []


class UnwrittenRegisters(Observer):
    """Hazard check for registers that a segment reads although no executed path has written them."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def segment_begins(self, split: Split, pc: int) -> None:
        for at, register in split.frame.program.unwritten.get(pc, ()):
            name = split.frame.program.function.register_names[register]
            message = f"{name} is read, but no path has written it"
            self._reporter.report("uninitialized_register", split.warp, at, message)


class Accumulators(Observer):
    """Hazard check for MMAs that accumulate into unwritten registers."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def mma_computed(self, w: Warp, at: int, name: str, addends: tuple[Array, ...]) -> None:
        if any(map(is_unwritten, addends)):
            message = f"{'an' if name == 'mma' else 'a'} {name} reads an accumulator before it is written"
            self._reporter.report("uninitialized_register", w, at, message)


class WgmmaRegisters(Observer):
    """Hazard check for accesses to the registers of wgmmas in flight."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._states: dict[int, _State] = {}
        self._operands: dict[int, tuple[int, int]] = {}

    def _state(self, w: Warp) -> _State:
        state = self._states.get(w.agent)
        if state is None:
            state = self._states[w.agent] = _State()
        return state

    def wgmma_issued(self, w: Warp, at: int, shared: tuple[Array, ...]) -> None:
        """Check that a fence covers the registers, and record that the wgmma uses them."""
        state = self._state(w)
        if not state.is_fenced:
            self._reporter.report("wgmma_missing_fence", w, at, "no wgmma.fence precedes this warp's first wgmma")
            state.is_fenced = True
        self._check_fenced(w, at)
        instruction = w.split.frame.program.instruction(at)
        known = self._operands.get(id(instruction))
        if known is None:
            fragment = instruction.operands[1]
            known = _bits(instruction.operands[0]), _bits(fragment) if isinstance(fragment, Vec) else 0
            self._operands[id(instruction)] = known
        accumulators, fragment_bits = known
        state.owned.append((state.committed, accumulators, fragment_bits))
        state.has_open = True
        w.launch.scheduler.is_polling = True  # Other warps can run while the wgmma is in flight.

    def _check_fenced(self, w: Warp, at: int) -> None:
        program = w.split.frame.program
        late = program.unfenced.get(at, 0)
        if late:
            name = program.function.register_names[late.bit_length() - 1]
            message = f"other instructions have written {name} and perhaps other registers, but no wgmma.fence follows"
            self._reporter.report("wgmma_missing_fence", w, at, message)

    def wgmma_fenced(self, w: Warp) -> None:
        self._state(w).is_fenced = True

    def wgmma_committed(self, w: Warp) -> None:
        state = self._state(w)
        state.committed += 1
        state.has_open = False

    def wgmma_waited(self, w: Warp, at: int, done: int, warps: list[Warp]) -> None:
        """Release the registers of completed groups."""
        state = self._state(w)
        if state.has_open:
            self._reporter.report("wgmma_uncommitted", w, at, "a wgmma was not committed to a group before this wait")
        state.waited = max(state.waited, done)
        state.owned = [entry for entry in state.owned if entry[0] >= state.waited]

    def segment_begins(self, split: Split, pc: int) -> None:
        """Check whether a segment accesses registers of a wgmma in flight."""
        state = self._states.get(split.warp.agent)
        if state is None or not state.owned:
            return
        owned = 0
        for _, accumulators, fragment in state.owned:
            owned |= accumulators | fragment
        program = split.frame.program
        if not program.touched[pc] & owned:
            return
        segment = program.flow.segments[pc]
        for at in range(segment.start, segment.stop):
            self._check_instruction(split, state, at, program.function.body[at])

    def _check_instruction(self, split: Split, state: _State, at: int, instruction: Instruction) -> None:
        if instruction.parts[0] == "wgmma":
            return
        if instruction.parts[0] == "mov" and _is_copy(instruction):
            source, target = instruction.operands[1], instruction.operands[0]
            if isinstance(source, Reg) and isinstance(target, Reg):
                self._copied(state, source.index, target.index)
                return
        reads, writes = split.frame.program.accesses(at)
        for _, accumulators, fragment in state.owned:
            if (reads | writes) & accumulators or writes & fragment:
                what = "an accumulator" if (reads | writes) & accumulators else "a fragment"
                warp = split.warp
                message = f"{what} of a wgmma is accessed without a wait for the wgmma"
                self._reporter.report("wgmma_registers", warp, at, message)
                return

    @staticmethod
    def _copied(state: _State, source: int, target: int) -> None:
        """Record that the copy of a register belongs to the same wgmma group as the register.

        Compilers insert such copies between wgmmas to rename registers.
        """
        for position, (group, accumulators, fragment) in enumerate(state.owned):
            keep = ~(1 << target)
            new_a, new_f = accumulators & keep, fragment & keep
            if accumulators >> source & 1:
                new_a |= 1 << target
            if fragment >> source & 1:
                new_f |= 1 << target
            state.owned[position] = (group, new_a, new_f)


def _is_copy(instruction: Instruction) -> bool:
    return len(instruction.operands) == 2 and instruction.guard is None


def _bits(operand: Any) -> int:
    return bit_set(registers_of(operand))
