"""A launch as data, and a mutant: one change of a synchronization, with the hazards that the emulator should report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.emulator import EmulatedModule, Report


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of ``EmulatedModule.launch``, without schedules and hazards.

    options: further keyword arguments. keep: objects that own memory which the arguments reference by address.
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
        """Launch the call. options: schedules, seed, replay, hazards, step_limit."""
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


#: Hazard kinds of common mistakes: a reader that did not wait, a slot that was refilled too early.
EARLY_READ = frozenset({"read_before_load", "wrong_parity", "exit_with_pending_load"})
REFILL = frozenset({"overwritten_while_read", "write_race"})
#: Ordinary accesses to shared memory, to global memory, and by lanes of one warp.
RACE = frozenset({"data_race", "global_race", "lane_race"})
HANG = frozenset({"deadlock", "byte_count"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of the PTX text, of the launch, or of both.

    operator: the kind of change, a key of OPERATORS. line: of the PTX, 0 for a change of the launch. expected: hazard
    kinds, one of which has to be reported. at: the instruction's index in its function. edits: (first character, end,
    new text) of each replaced part, in the order of the text.
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
        """``operator:line``, or the operator and text of a change of the launch."""
        return f"{self.operator}:{self.line}" if self.line else f"{self.operator}:{self.text}"

    def apply(self, ptx: str) -> str:
        """Return the mutated text. Lines keep their numbers."""
        pieces, done = [], 0
        for start, end, text in self.edits:
            lost = ptx.count("\n", start, end) - text.count("\n")
            pieces += [ptx[done:start], text, "\n" * lost]
            done = end
        return "".join([*pieces, ptx[done:]])

    def changed(self, call: Call) -> Call:
        """Return the launch of the mutant."""
        return call if self.change is None else self.change(call)
