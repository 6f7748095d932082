"""Device memory for partial sums and for rows of activations: one workspace for each stream and each graph's branch.

CTAs that share a tile leave fp32 partial sums and a flag there, persistent CTAs of attention count tiles in the first
flag; the kernel leaves all flags zero. Two launches that may run at the same time must not share a workspace. It
belongs to a stream or to a branch of a graph (stream_workspaces.py), or the caller passes it in. Activations that TMA
cannot load as they lie are copied to rows there first (marlin/permute_columns.py), whose memory grows to the largest
batch that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from cudatma import context
from cudatma.errors import ArgumentTypeError, LaunchError
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES
from cudatma.runtime.device_memory import DeviceMemory

#: Memory for rows of activations is allocated in multiples of this.
_ROWS_STEP_BYTES = 2 << 20


class Memory(Protocol):
    """Device memory that lives as long as its object."""

    @property
    def pointer(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class ActivationRows:
    """Memory for arranged activations, of one launch at a time; nothing until it is asked for.

    lock: held from before the launch that writes the rows until after the one that reads them: no other thread of the
    same stream may launch between them. A larger batch gets a new buffer of at least twice the size; earlier buffers
    stay, since a captured graph may hold their address: together they are smaller than the last.
    """

    __slots__ = ("_allocate", "_buffers", "lock")

    def __init__(self, allocate: Callable[[int], Memory]) -> None:
        self._allocate = allocate
        self._buffers: list[Memory] = []
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer in use."""
        return self._buffers[-1].nbytes if self._buffers else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def room(self, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes. Raises DriverError (no memory)."""
        if nbytes > self.nbytes:
            wanted = max(nbytes, 2 * self.nbytes)
            self._buffers.append(self._allocate(-(-wanted // _ROWS_STEP_BYTES) * _ROWS_STEP_BYTES))
        return self._buffers[-1].pointer


class MarlinWorkspace:
    """Partial sums and flags for one launch at a time on a device; 128.25 KiB for each SM.

    rows: copies of activations that TMA cannot load as they lie (act-order, pitches and addresses off 16 bytes); grows
    to the largest batch of them.
    flags_pointer, partials_pointer: device addresses. Made for each stream and each branch of a graph,
    or by the caller, who then passes ``workspace=``. Freed with the object; keep it while a captured graph uses it.
    Raises DriverError (no memory, no driver), LaunchError (no such device), ArgumentTypeError.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "device",
        "flags_bytes",
        "flags_pointer",
        "partials_bytes",
        "partials_pointer",
        "rows",
    )

    def __init__(self, device: int | None = None) -> None:
        if device is not None and type(device) is not int:
            raise ArgumentTypeError("device", type(device).__name__, "a device's ordinal, or None")
        ordinal = context.current_device() if device is None else device
        memory = DeviceMemory(sum(workspace_sizes(ordinal)), ordinal)
        self._lay_out(ordinal, memory, ActivationRows(lambda nbytes: DeviceMemory(nbytes, ordinal)))
        memory.clear(0, self.flags_bytes)

    @classmethod
    def within(cls, memory: Memory, device: int, rows: ActivationRows | None = None) -> MarlinWorkspace:
        """A workspace in memory of the device whose flags are zero already. rows: its own unless given."""
        made = object.__new__(cls)
        made._lay_out(device, memory, rows or ActivationRows(lambda nbytes: DeviceMemory(nbytes, device)))
        return made

    def _lay_out(self, device: int, memory: Memory, rows: ActivationRows) -> None:
        """Flags come first: workspaces of one device whose partial sums are at the same address have their flags at the
        same address, too, and a plan compares the address of the partial sums only."""
        self.device, self.rows, self._memory = device, rows, memory
        self.flags_bytes = workspace_sizes(device)[0]
        self.partials_bytes = memory.nbytes - self.flags_bytes
        self.flags_pointer, self.partials_pointer = memory.pointer, memory.pointer + self.flags_bytes

    @property
    def nbytes(self) -> int:
        """Device memory that it takes, including rows."""
        return self._memory.nbytes + self.rows.held_bytes

    def require_room(self, partials_bytes: int, flags_bytes: int) -> None:
        """Raise LaunchError unless a launch's partial sums and flags fit."""
        if partials_bytes > self.partials_bytes or flags_bytes > self.flags_bytes:
            raise LaunchError(
                "workspace",
                f"{self.partials_bytes} + {self.flags_bytes} bytes",
                f"{partials_bytes} + {flags_bytes} bytes",
                "the schedule runs more CTAs than a workspace is made for",
            )


def workspace_sizes(device: int) -> tuple[int, int]:
    """Bytes of (flags, partial sums) that hold those of any launch on the device."""
    sm_count = context.device(device).sm_count
    return sm_count * FLAGS_PER_SM_BYTES, sm_count * PARTIALS_PER_SM_BYTES


def is_capturing(device: int, stream: int) -> bool:
    """Whether ``stream`` of a device is being captured into a graph. Raises as context.is_capturing()."""
    with context.using(device) as driver:
        return context.is_capturing(driver, stream)


def refuse_in_capture(device: int, stream: int, allowed: str) -> None:
    """Raise LaunchError while ``stream`` is being captured into a graph."""
    if is_capturing(device, stream):
        remedy = "run this GEMM once before the capture, or call MarlinLinear.warm_up()"
        raise LaunchError("stream", "a stream under graph capture", allowed, remedy)


def check_workspace(workspace: object, device: int) -> MarlinWorkspace:
    """A caller's workspace; ArgumentTypeError or LaunchError if it is none or of another device."""
    if not isinstance(workspace, MarlinWorkspace):
        raise ArgumentTypeError("workspace", type(workspace).__name__, "MarlinWorkspace or None")
    if workspace.device != device:
        raise LaunchError("workspace", f"device {workspace.device}", f"device {device}, where x is")
    return workspace
