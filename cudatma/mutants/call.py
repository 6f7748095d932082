"""A launch as data."""

from __future__ import annotations

from collections.abc import Sequence
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
