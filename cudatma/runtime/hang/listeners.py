"""Host side of a debug kernel on a GPU or the emulator.

The host writes the panel before a launch and reads the records after the launch. On a GPU, the records are in pinned
host memory, so that the host can read them even if the context is lost. The other data is in device memory. Source:
CUDA driver API, cuModuleGetGlobal, cuMemHostAlloc, cuMemHostGetDevicePointer, cuStreamSynchronize.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cudatma import context
from cudatma.errors import DriverError, HazardError, LaunchError, check
from cudatma.mbarrier_bits import is_verified
from cudatma.runtime.hang import records as shared
from cudatma.runtime.hang.report import Names, hang_of


class Listener:
    """Host side of a debug kernel (a CUmodule) on a device. The kernel's launches run one at a time.

    Like the module, the memory of a Listener is never freed.
    """

    def __init__(self, module: Any, names: Names, device: int) -> None:
        self._names, self._device = names, device
        self._lock = threading.Lock()
        self._notes, self._notes_bytes = 0, 0
        self._panel_host = ctypes.create_string_buffer(shared.PANEL_BYTES)
        with context.using(device) as driver, context.outside_captures(driver):
            variable = check(driver.cuModuleGetGlobal(module, shared.PANEL_NAME.encode()), "cuModuleGetGlobal")
            self._panel, size = int(variable[0]), int(variable[1])
            if size != shared.PANEL_BYTES:
                got = f"{size} bytes of {shared.PANEL_NAME}"
                raise LaunchError(
                    "kernel",
                    got,
                    f"compiled with {shared.PANEL_BYTES} bytes of {shared.PANEL_NAME}",
                    "recompile the kernel",
                )
            size = shared.CAPACITY * shared.RECORD.itemsize
            flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
            host = int(check(driver.cuMemHostAlloc(size, flags), "cuMemHostAlloc"))
            pointer = check(driver.cuMemHostGetDevicePointer(host, 0), "cuMemHostGetDevicePointer")
            self._records_device = int(pointer)
        raw = (ctypes.c_uint8 * size).from_address(host)
        self._records: np.ndarray[Any, Any] = np.ctypeslib.as_array(raw).view(shared.RECORD)

    def run(self, launch: Callable[[], None], blocks: int, stream: int) -> None:
        """Launch a grid of ``blocks`` CTAs on a stream of the current context and wait until the grid ends.

        Raises PipelineHang if the kernel recorded waits, LaunchError during a graph capture, and DriverError if the
        driver fails.
        """
        driver = context.initialize()
        _refuse_capture(driver, stream, self._names.entry)
        with self._lock:
            self._prepare(driver, blocks, stream)
            launch()
            failure: DriverError | None = None
            reserved = 0
            try:
                check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
                reserved = self._reserved(driver)
            except DriverError as error:  # the records can still be read
                failure = error
            known = is_verified(context.device(self._device).compute_capability)
            hang = hang_of(
                self._records, self._names, verified=known, where=f"device {self._device}", reserved=reserved
            )
        if hang is not None:
            raise hang from failure
        if failure is not None:
            raise failure

    def _prepare(self, driver: Any, blocks: int, stream: int) -> None:
        """Clear the records and notes and write the panel in stream order, while no kernel uses them."""
        check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        self._records.view(np.uint8)[...] = 0
        needed = max(8, shared.notes_bytes(blocks))
        if needed > self._notes_bytes:
            if self._notes:
                check(driver.cuMemFree(self._notes), "cuMemFree")
                self._notes, self._notes_bytes = 0, 0
            self._notes = int(check(driver.cuMemAlloc(needed), "cuMemAlloc"))
            self._notes_bytes = needed
        self._panel_host.raw = shared.panel_bytes(self._records_device, self._notes, blocks)
        source = ctypes.addressof(self._panel_host)
        check(driver.cuMemsetD8Async(self._notes, 0, needed, stream), "cuMemsetD8Async")
        check(driver.cuMemcpyHtoDAsync(self._panel, source, shared.PANEL_BYTES, stream), "cuMemcpyHtoDAsync")

    def _reserved(self, driver: Any) -> int:
        """Return the number of records that the launch reserved."""
        host = ctypes.addressof(self._panel_host)
        check(driver.cuMemcpyDtoH(host, self._panel, shared.PANEL_BYTES), "cuMemcpyDtoH")
        return shared.reserved_records(self._panel_host.raw)


def _refuse_capture(driver: Any, stream: int, entry: str) -> None:
    """Raise LaunchError during a graph capture, because a debug launch synchronizes with its stream."""
    if context.is_capturing(driver, stream):
        allowed = f"outside a graph capture for {entry}, which was compiled with debug=True"
        remedy = "capture a kernel compiled without debug=True, because a debug launch waits for the kernel"
        raise LaunchError("stream", "a stream under graph capture", allowed, remedy)


class ListeningModule:
    """An EmulatedModule with the host side of its debug kernels.

    launch() has the arguments of EmulatedModule.launch() and also raises PipelineHang. Hazards that occur after the
    kernel was aborted are not reported. A debug launch is never programmatic.
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
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Any:
        """Launch on the emulator, and return the Report. A PipelineHang leaves the arrays unchanged."""
        del programmatic
        blocks = math.prod(grid) if isinstance(grid, Iterable) else int(grid)
        records = np.zeros(shared.CAPACITY, shared.RECORD)
        notes = np.zeros(max(8, shared.notes_bytes(blocks)), np.uint8)
        panel = shared.panel_bytes(records.ctypes.data, notes.ctypes.data, blocks)
        self.module.globals[shared.PANEL_NAME] = np.frombuffer(panel, np.uint8)

        def listen(schedules_done: int, steps: int) -> None:
            if progress is not None:
                progress(schedules_done, steps)
            if steps:
                return  # a schedule is running
            reserved = shared.reserved_records(self.module.globals[shared.PANEL_NAME].tobytes())
            hang = hang_of(records, self._names, verified=True, where="the emulator", reserved=reserved)
            if hang is not None:
                raise hang

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
            raise HazardError(str(report), report.hazards, report)
        return report
