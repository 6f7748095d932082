"""Device memory for partial sums: one fixed size a card, one for each stream, never grown.

Blocks that share a tile leave fp32 partial sums and a flag there; the kernel leaves all flags zero behind. Two launches
that may run at the same time must not share a workspace, so it belongs to a (device, stream) pair or is passed in.
"""

from __future__ import annotations

import threading
from typing import Any

from cudatma import context
from cudatma.errors import ArgumentTypeError, LaunchError, check
from cudatma.kernels.marlin.problem import Schedule
from cudatma.kernels.marlin.stage import StagedTile

#: Most fp32 partial sums that the blocks of one multiprocessor leave: a tile of 128 tokens x 256 channels.
_PARTIALS_PER_SM_BYTES = 128 * 256 * 4
#: Room for the flags of one multiprocessor's blocks: up to 4 blocks of 16 warp tiles.
_FLAGS_PER_SM_BYTES = 4 * 16 * 4


class MarlinWorkspace:
    """Partial sums and flags for one launch at a time on a device; 128.25 KiB for each multiprocessor.

    flags_pointer, partials_pointer: device addresses. Made by marlin_gemm for each stream, or by the caller, who then
    passes ``workspace=``. Freed with the object; keep it while a captured graph uses it.
    Raises DriverError (no memory, no driver), LaunchError (no such device), ArgumentTypeError.
    """

    __slots__ = (
        "__weakref__",
        "_pointer",
        "device",
        "flags_bytes",
        "flags_pointer",
        "partials_bytes",
        "partials_pointer",
    )

    def __init__(self, device: int | None = None) -> None:
        self._pointer = 0
        if device is not None and type(device) is not int:
            raise ArgumentTypeError("device", type(device).__name__, "a device's ordinal, or None")
        self.device = context.current_device() if device is None else device
        processors = context.device(self.device).multiprocessors
        self.partials_bytes, self.flags_bytes = processors * _PARTIALS_PER_SM_BYTES, processors * _FLAGS_PER_SM_BYTES
        with context.using(self.device) as driver, context.outside_captures(driver):
            size = self.partials_bytes + self.flags_bytes
            self._pointer = int(check(driver.cuMemAlloc(size), "cuMemAlloc"))
            self.partials_pointer, self.flags_pointer = self._pointer, self._pointer + self.partials_bytes
            self._clear(driver)

    def _clear(self, driver: Any) -> None:
        """Zero the flags, on a stream of its own: the default stream waits for others, captured ones among them."""
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = check(driver.cuStreamCreate(flags), "cuStreamCreate")
        try:
            check(driver.cuMemsetD8Async(self.flags_pointer, 0, self.flags_bytes, stream), "cuMemsetD8Async")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        finally:
            check(driver.cuStreamDestroy(stream), "cuStreamDestroy")

    def __del__(self) -> None:
        if getattr(self, "_pointer", 0) and not context.forked:
            try:
                with context.using(self.device) as driver, context.outside_captures(driver):
                    driver.cuMemFree(self._pointer)
            except Exception:
                # The interpreter or the driver is shutting down, which frees the memory as well.
                self._pointer = 0

    def require_room(self, spec: StagedTile, schedule: Schedule) -> None:
        """Raise LaunchError unless a launch's partial sums and flags fit."""
        partials = schedule.partial_blocks * spec.partial_bytes
        flags = schedule.partial_blocks * spec.warp_tiles * 4
        if partials > self.partials_bytes or flags > self.flags_bytes:
            raise LaunchError(
                "workspace",
                f"{self.partials_bytes} + {self.flags_bytes} bytes",
                f"{partials} + {flags} bytes",
                "the schedule runs more blocks than a workspace is made for",
            )


_lock = threading.Lock()
_by_stream: dict[tuple[int, int], MarlinWorkspace] = {}


def stream_workspace(device: int, stream: int) -> MarlinWorkspace:
    """The workspace of a stream, made at its first use.

    Raises LaunchError where that would be inside a graph capture: run once before, or call MarlinLinear.warm_up().
    """
    known = _by_stream.get((device, stream))
    if known is None:
        with _lock:
            known = _by_stream.get((device, stream))
            if known is None:
                refuse_in_capture(device, stream, "a stream that has its workspace, or workspace=")
                known = _by_stream[(device, stream)] = MarlinWorkspace(device)
    return known


def release_workspaces() -> None:
    """Forget the workspaces of all streams; their memory is freed once no plan holds them."""
    with _lock:
        _by_stream.clear()


def refuse_in_capture(device: int, stream: int, allowed: str) -> None:
    """Raise LaunchError while ``stream`` is being captured into a graph. [CUDA driver API, cuStreamIsCapturing]"""
    with context.using(device) as driver:
        status = check(driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
    if int(status) != 0:
        remedy = "run this GEMM once on this stream before the capture, or call MarlinLinear.warm_up()"
        raise LaunchError("stream", "a stream under graph capture", allowed, remedy)


def check_workspace(workspace: object, device: int) -> MarlinWorkspace:
    """A caller's workspace; ArgumentTypeError or LaunchError if it is none or of another device."""
    if not isinstance(workspace, MarlinWorkspace):
        raise ArgumentTypeError("workspace", type(workspace).__name__, "MarlinWorkspace or None")
    if workspace.device != device:
        raise LaunchError("workspace", f"device {workspace.device}", f"device {device}, where x is")
    return workspace
