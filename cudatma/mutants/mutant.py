"""Data classes for a launch and for a mutant, which changes one synchronization and has expected hazards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.emulator import EmulatedModule, Report


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of ``EmulatedModule.launch`` except schedules and hazards.

    options: further keyword arguments. keep: objects that own the memory to which address arguments refer.
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
        """Launch the call. ``options`` may be schedules, seed, replay, hazards and step_limit."""
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


#: Hazard kinds of two common mistakes: a reader does not wait, or a slot is refilled too early.
EARLY_READ = frozenset({"read_before_load", "wrong_parity", "exit_with_pending_load"})
REFILL = frozenset({"overwritten_while_read", "write_race"})
#: Races between ordinary accesses to shared memory, to global memory, and by the lanes of one warp.
RACE = frozenset({"data_race", "global_race", "lane_race"})
HANG = frozenset({"deadlock", "byte_count"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change to the PTX text, to the launch, or to both.

    operator: the kind of change, a key of OPERATORS. line: line in the PTX, or 0 for a change to the launch. expected:
    hazard kinds, one of which must be reported. at: index of the instruction in the function. edits: (first character,
    end, new text) of each replaced part, in the order of the text.
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
        """``operator:line``, or the operator and text for a change to the launch."""
        return f"{self.operator}:{self.line}" if self.line else f"{self.operator}:{self.text}"

    def apply(self, ptx: str) -> str:
        """Return the mutated text. Line numbers do not change."""
        pieces, done = [], 0
        for start, end, text in self.edits:
            lost = ptx.count("\n", start, end) - text.count("\n")
            pieces += [ptx[done:start], text, "\n" * lost]
            done = end
        return "".join([*pieces, ptx[done:]])

    def changed(self, call: Call) -> Call:
        """Return the mutant's launch."""
        return call if self.change is None else self.change(call)
