"""Dataclasses for a launch and for a mutant of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cudatma.emulator import EmulatedModule, Report


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of ``EmulatedModule.launch`` except schedules and hazards.

    ``options`` contains further keyword arguments. ``keep`` refers to the owners of memory that is passed by address.
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
        """Launch the kernel. ``options`` may contain schedules, seed, replay, hazards and step_limit."""
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


#: Hazards of a reader that does not wait.
EARLY_READ = frozenset({"read_before_load", "wrong_parity", "exit_with_pending_load"})
REFILL = frozenset({"overwritten_while_read", "write_race"})
#: Races between ordinary accesses to shared memory, to global memory, or by the lanes of a warp.
RACE = frozenset({"data_race", "global_race", "lane_race"})
HANG = frozenset({"deadlock", "byte_count"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change to one synchronization in the PTX or the launch, and the hazards that it should cause.

    Parameters
    ----------
    operator : str
        Kind of change, a key of OPERATORS.
    line : int
        Line in the PTX, or 0 for a change of the launch.
    text : str
        Description of the change.
    expected : frozenset of str
        Hazard kinds, of which at least one must be reported.
    at : int
        Index of the instruction in the function.
    edits : tuple
        First character, end and new text of each replaced part, in the order of the text.
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
        """``operator:line``, or ``operator:text`` for a change of the launch."""
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
        """Return the launch with the mutant's changes."""
        return call if self.change is None else self.change(call)
