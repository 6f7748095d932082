"""A debug kernel on the emulator: the same records, read by the same code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cudatma.errors import HazardError
from cudatma.runtime.hang import records as shared
from cudatma.runtime.hang.names import Names
from cudatma.runtime.hang.report import hang_of


class ListeningModule:
    """An emulated module whose kernels were rendered with debug=True, with what a host does for them.

    module: an ``EmulatedModule``. launch() takes what its launch() takes and raises PipelineHang besides; what a kernel
    does after it was ended is no hazard. A debug launch is never a programmatic one; what says that it is is ignored.
    """

    def __init__(self, module: Any, names: Names) -> None:
        self.module, self._names = module, names

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any] = (),
        *,
        arrays: Sequence[Any] = (),
        hazards: str = "raise",
        programmatic: bool = False,
        produced_by_previous: Sequence[Any] = (),
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> Any:
        """Run it, get an emulator's Report. After a PipelineHang the arrays hold what they held before."""
        del programmatic
        blocks = math.prod(grid) if isinstance(grid, Iterable) else int(grid)
        records = np.zeros(shared.CAPACITY, shared.RECORD)
        notes = np.zeros(max(8, shared.notes_bytes(blocks)), np.uint8)
        panel = shared.panel_bytes(records.ctypes.data, notes.ctypes.data, blocks)
        self.module.globals[shared.PANEL_NAME] = np.frombuffer(panel, np.uint8)

        def listen(schedules_done: int) -> None:
            taken = shared.taken_of(self.module.globals[shared.PANEL_NAME].tobytes())
            hang = hang_of(records, self._names, verified=True, where="the emulator", taken=taken)
            if hang is not None:
                raise hang
            if progress is not None:
                progress(schedules_done)

        report = self.module.launch(
            name,
            grid,
            block,
            args,
            arrays=(*arrays, *produced_by_previous, records.view(np.uint8), notes),
            hazards="collect" if hazards == "raise" else hazards,
            progress=listen,
            **options,
        )
        if hazards == "raise" and report.hazards:
            raise HazardError(str(report), report.hazards)
        return report
