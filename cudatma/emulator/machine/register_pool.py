"""Emulate setmaxnreg and a CTA's register pool.

Source: PTX ISA, "setmaxnreg" (a pool for each CTA; .inc blocks until the pool has enough registers), ".maxnreg",
".maxntid", ".minnctapersm".
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from math import prod

from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.types import LANES
from cudatma.emulator.ptx.writer import RUNTIME

#: Number of registers per SM, and the unit and the maximum of the number of registers per thread.
_SM_REGISTERS, _UNIT, _MAX_REGISTERS = 65536, 8, 256
_UNKNOWN = (
    "register_pool: the initial number of registers per thread is unknown, so the waits of setmaxnreg.inc cannot be "
    "checked; add __launch_bounds__ to the kernel, or pass registers= to the launch"
)
_IGNORED = "register_pool: ptxas ignores setmaxnreg in this kernel; see the ptxas log for the reason"


@dataclass(slots=True)
class RegisterPool:
    """Register pool of a CTA.

    ``start`` is the number of registers per thread when the kernel starts, and ``source`` states its origin. ``owned``
    maps each warp to its current number of registers per thread. ``freed`` and ``taken`` count the registers that .dec
    has returned and .inc has taken.
    """

    start: int
    source: str
    warps: int
    owned: dict[int, int] = field(default_factory=dict)
    freed: int = 0
    taken: int = 0
    waiters: list[Split] = field(default_factory=list)


@dataclass(slots=True)
class RegisterWait:
    """A wait of a warp at setmaxnreg.inc."""

    pool: RegisterPool
    at: int
    count: int
    owned: int
    may_time_out: bool = False

    def describe(self) -> str:
        more = (self.count - self.owned) * LANES
        return f"setmaxnreg.inc {self.count} ({more} more registers; {self.pool.freed - self.pool.taken} are free)"

    def arithmetic(self) -> str:
        """Return text that states the counts of initial, freed, taken and missing registers."""
        pool = self.pool
        return (
            f"setmaxnreg.inc {self.count} needs {self.count} - {self.owned} more registers per thread, "
            f"{(self.count - self.owned) * LANES} for the warp, but the CTA's pool contains {pool.freed - pool.taken}: "
            f"{pool.warps} warps started with {pool.start} per thread according to {pool.source} "
            f"({pool.start * LANES * pool.warps} in total), setmaxnreg.dec has freed {pool.freed}, "
            f"setmaxnreg.inc has taken {pool.taken}"
        )


def start_of(launch: Launch) -> tuple[int, str] | None:
    """Return the number of registers per thread when the kernel starts and its source, or None if it is unknown."""
    registers_per_thread = launch.setup.registers
    if registers_per_thread is not None:
        return _rounded(registers_per_thread), "the cubin"
    directives = launch.program.function.directives
    limits = []
    if "maxnreg" in directives:
        limits.append((_rounded(directives["maxnreg"][0]), ".maxnreg"))
    threads = directives.get("reqntid") or directives.get("maxntid")
    if threads:
        warps = -(-prod(threads) // LANES)
        ctas = max(1, directives.get("minnctapersm", (1,))[0])
        registers = _SM_REGISTERS // (max(1, warps) * LANES * ctas) // _UNIT * _UNIT
        limits.append((min(_MAX_REGISTERS, registers), "the launch bounds"))
    return min(limits, default=None)


def _rounded(registers: int) -> int:
    return -(-registers // _UNIT) * _UNIT


def set_registers(w: Warp, at: int, count: int, is_inc: bool) -> bool:
    """Execute setmaxnreg for a whole warp and return whether the warp must wait for registers."""
    launch, block = w.launch, w.block
    if not w.async_state.pop("waits_for_registers", False):
        w.events.registers_set(w, at, count, is_inc)
    pool: RegisterPool | None = block.register_pool
    if pool is None:
        start = start_of(launch)
        if start is None or not start[0]:
            reason = _UNKNOWN if start is None else _IGNORED
            if reason not in launch.unchecked:
                launch.unchecked.append(reason)
            return False
        pool = block.register_pool = RegisterPool(*start, block.warp_count)
    owned = pool.owned.get(w.index, pool.start)
    if not is_inc:
        if count < owned:
            pool.owned[w.index] = count
            pool.freed += (owned - count) * LANES
            launch.scheduler.wake(pool.waiters)
        return False
    more = (count - owned) * LANES
    if more > pool.freed - pool.taken:
        pool.waiters.append(w.split)
        w.async_state["waits_for_registers"] = True
        launch.scheduler.block(w.split, RegisterWait(pool, at, count, owned))
        return True
    if more > 0:
        pool.owned[w.index] = count
        pool.taken += more
    return False


RUNTIME["register_pool"] = sys.modules[__name__]
