"""A launch as data, and a mutant: one change of one synchronisation, and what the emulator is expected to say of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.emulator import EmulatedModule, Report


@dataclass(frozen=True, slots=True)
class Call:
    """What ``EmulatedModule.launch`` gets, besides how it is to be looked at. options: further keywords of it.

    keep: objects that own memory that the arguments name by address alone.
    """

    entry: str
    grid: int | Sequence[int]
    block: int | Sequence[int]
    args: tuple[Any, ...]
    cluster: int | Sequence[int] | None = None
    shared_bytes: int = 0
    arrays: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    keep: Any = None

    def run(self, module: EmulatedModule, **options: Any) -> Report:
        """Launch it. options: schedules, seed, replay, hazards, step_limit."""
        return module.launch(
            self.entry,
            self.grid,
            self.block,
            self.args,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            arrays=self.arrays,
            **dict(self.options),
            **options,
        )


#: What the usual mistakes are called: a reader that was not held back, a slot that was refilled too early.
EARLY_READ = frozenset({"read_before_load", "wrong_parity", "exit_with_pending_load"})
REFILL = frozenset({"overwritten_while_read", "write_race"})
#: Plain accesses of shared memory, of global memory, and of lanes of one warp.
RACE = frozenset({"data_race", "global_race", "lane_race"})
HANG = frozenset({"deadlock", "byte_count"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the PTX text, of the launch, or of both.

    operator: what kind of change, a key of OPERATORS. line: of the PTX, 0 for a change of the launch. expected: hazard
    kinds that tell it; one of them has to be reported. at: the instruction's index in its function. edits: (first
    character, end, new text) of each part that is replaced, in the order of the text.
    """

    operator: str
    line: int
    text: str
    description: str
    expected: frozenset[str]
    function: str = ""
    at: int = -1
    edits: tuple[tuple[int, int, str], ...] = ()
    change: Callable[[Call], Call] | None = None

    @property
    def name(self) -> str:
        """``operator:line`` and what distinguishes it from other mutants there."""
        return f"{self.operator}:{self.line}" if self.line else f"{self.operator}:{self.text}"

    def apply(self, ptx: str) -> str:
        """The mutated text. Lines keep their numbers."""
        pieces, done = [], 0
        for start, end, text in self.edits:
            lost = ptx.count("\n", start, end) - text.count("\n")
            pieces += [ptx[done:start], text, "\n" * lost]
            done = end
        return "".join([*pieces, ptx[done:]])

    def changed(self, call: Call) -> Call:
        """The launch of the mutant."""
        return call if self.change is None else self.change(call)
