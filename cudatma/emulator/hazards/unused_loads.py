"""Detect loads whose value some lanes never use, so that races with these loads have no effect.

Triton compiles ``tl.store(p, tl.load(p) + x)`` to a load in all threads of a program and a guarded store in one thread.
The store races with the loads of the other threads, but only the value in the storing thread matters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from cudatma.emulator.machine.program import Program
from cudatma.emulator.ptx.flow import registers_of

#: Instructions without any effect other than a result that depends on their operands.
_PURE = {
    *("mov", "add", "sub", "mul", "mad", "mul24", "mad24", "fma", "neg", "abs", "min", "max", "cvt", "selp", "slct"),
    *("and", "or", "xor", "not", "lop3", "shl", "shr", "shf", "prmt", "bfe", "bfi", "copysign"),
    *("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"),
}


@lru_cache(maxsize=1024)
def guarded_stores(program: Program) -> frozenset[int]:
    """Return the indices of stores to global memory that only some lanes execute."""
    body = enumerate(program.function.body)
    return frozenset(at for at, i in body if i.guard and i.parts[0] == "st" and "global" in i.parts)


@lru_cache(maxsize=4096)
def stores_of(program: Program, load: int) -> frozenset[int] | None:
    """Return the guarded stores that are the only uses of a load's value, or None if there are other uses.

    The function follows registers through the whole function body, regardless of the order of instructions.
    """
    accesses, body = program.flow.accesses, program.function.body
    if body[load].parts[0] != "ld":
        return None
    tainted, stores = set(accesses[load][0]), set[int]()
    size = -1
    while size != len(tainted):
        size = len(tainted)
        for at, (written, read) in enumerate(accesses):
            if at == load or tainted.isdisjoint(read):
                continue
            instruction = body[at]
            is_guard = instruction.guard is not None and instruction.guard[0] in tainted
            if at in guarded_stores(program) and not is_guard:
                if not tainted.isdisjoint(registers_of(instruction.operands[0])):
                    return None
                stores.add(at)
            elif instruction.parts[0] in _PURE and not is_guard:
                tainted.update(written)
            else:
                return None
    return frozenset(stores)


class UnusedLoads:
    """Races of loads whose values are used only by guarded stores.

    Threads are identified by agents and lanes (as bits).
    """

    def __init__(self) -> None:
        self._stored: dict[tuple[int, int], int] = {}
        self._waiting: dict[int, list[tuple[int, frozenset[int], Callable[[], None]]]] = {}

    def defer(self, agent: int, lanes: int, stores: frozenset[int], report: Callable[[], None]) -> None:
        """Defer the report of a race until one of the load's lanes executes one of the stores."""
        if any(self._stored.get((agent, store), 0) & lanes for store in stores):
            report()
        elif stores:
            self._waiting.setdefault(agent, []).append((lanes, stores, report))

    def stored(self, agent: int, at: int, lanes: int) -> None:
        """Record that lanes execute a guarded store, and report the deferred races that depend on it."""
        self._stored[agent, at] = self._stored.get((agent, at), 0) | lanes
        for race in self._waiting.pop(agent, ()):
            if at in race[1] and race[0] & lanes:
                race[2]()
            else:
                self._waiting.setdefault(agent, []).append(race)
