"""Device memory for partial sums and for rows of activations. Each stream and each graph branch has a workspace.

CTAs that share a tile store fp32 partial sums and a flag in the workspace. Persistent CTAs of attention count tiles in
the first flag. Every kernel resets all flags to zero. Two launches that may run at the same time must not share a
workspace. A workspace belongs to a stream or to a graph branch, unless the caller passes a workspace. A capture uses
memory that was reserved outside of captures. Activations that TMA cannot load in place are first copied to a row buffer
(marlin/permute_columns.py), which grows to the largest batch that needs copying. marlin_moe() also stores its sorted
rows and its results in this buffer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cudatma import context
from cudatma.errors import ArgumentTypeError, LaunchError
from cudatma.kernels.schedule import FLAGS_PER_SM_BYTES, PARTIALS_PER_SM_BYTES
from cudatma.runtime import streams
from cudatma.runtime.device_memory import DeviceMemory

#: Memory for rows of activations is allocated in multiples of this number of bytes.
_ROWS_STEP_BYTES = 2 << 20


class Memory(Protocol):
    """Device memory that is freed with its Python object."""

    @property
    def pointer(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class ActivationRows:
    """Memory for copied activations of one launch at a time, allocated at its first use.

    A launch holds ``lock`` until both the kernel that writes the rows and the kernel that reads them are launched. A
    larger batch gets a new buffer of at least twice the size. Earlier buffers are kept, because a captured graph may
    contain their addresses.
    """

    __slots__ = ("_allocate", "_buffers", "lock")

    def __init__(self, allocate: Callable[[int], Memory]) -> None:
        self._allocate = allocate
        self._buffers: list[Memory] = []
        self.lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of the buffer in use, in bytes."""
        return self._buffers[-1].nbytes if self._buffers else 0

    @property
    def held_bytes(self) -> int:
        """Size of all buffers in bytes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def room(self, nbytes: int) -> int:
        """Return the address of at least ``nbytes`` bytes. Raises DriverError if memory runs out."""
        if nbytes > self.nbytes:
            room = max(nbytes, 2 * self.nbytes)
            self._buffers.append(self._allocate(-(-room // _ROWS_STEP_BYTES) * _ROWS_STEP_BYTES))
        return self._buffers[-1].pointer


class Workspace:
    """Device memory for the partial sums and flags of one launch at a time, 128.25 KiB per SM.

    Each stream and each graph branch has its own workspace. Pass ``workspace`` to use a different workspace. Keep the
    object alive while a captured graph uses it.

    Parameters
    ----------
    device : int, default 0
        Ordinal of the device.

    Attributes
    ----------
    flags_pointer, partials_pointer : int
        Device addresses of the flags and the partial sums.
    rows : ActivationRows
        Copies of activations that TMA cannot load in place, because the weight is in activation order, or because the
        pitch or the address is not a multiple of 16 bytes. The buffer grows to the largest batch that was copied.

    Raises
    ------
    ArgumentTypeError, LaunchError
        If ``device`` is not the ordinal of a device.
    DriverError
        If there is no driver, or if memory runs out.
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
            raise ArgumentTypeError("device", type(device).__name__, "an int (the ordinal of a device) or None")
        ordinal = context.current_device() if device is None else device
        memory = DeviceMemory(sum(workspace_sizes(ordinal)), ordinal)
        self._lay_out(ordinal, memory, ActivationRows(lambda nbytes: DeviceMemory(nbytes, ordinal)))
        memory.clear(0, self.flags_bytes)

    @classmethod
    def within(cls, memory: Memory, device: int, rows: ActivationRows | None = None) -> Workspace:
        """Create a workspace in existing memory whose flags are zero.

        Parameters
        ----------
        memory : Memory
            Device memory.
        device : int
            Ordinal of the memory's device.
        rows : ActivationRows, optional
            Copies of activations. Default: a new object.

        Returns
        -------
        Workspace
            A workspace that keeps the memory alive.
        """
        workspace = object.__new__(cls)
        workspace._lay_out(device, memory, rows or ActivationRows(lambda nbytes: DeviceMemory(nbytes, device)))
        return workspace

    def _lay_out(self, device: int, memory: Memory, rows: ActivationRows) -> None:
        """Place the flags before the partial sums.

        Workspaces of one device with the same address of partial sums then also have the same address of flags, so that
        a plan compares only the address of the partial sums.
        """
        self.device, self.rows, self._memory = device, rows, memory
        self.flags_bytes = workspace_sizes(device)[0]
        self.partials_bytes = memory.nbytes - self.flags_bytes
        self.flags_pointer, self.partials_pointer = memory.pointer, memory.pointer + self.flags_bytes

    @property
    def nbytes(self) -> int:
        """Device memory of the workspace in bytes, including rows."""
        return self._memory.nbytes + self.rows.held_bytes

    def require_room(self, partials_bytes: int, flags_bytes: int) -> None:
        """Raise LaunchError unless a launch's partial sums and flags fit.

        Parameters
        ----------
        partials_bytes, flags_bytes : int
            Bytes that the launch needs.
        """
        if partials_bytes > self.partials_bytes or flags_bytes > self.flags_bytes:
            raise LaunchError(
                "workspace",
                f"a workspace for {self.partials_bytes} bytes of partial sums and {self.flags_bytes} bytes of flags",
                f"large enough for {partials_bytes} bytes of partial sums and {flags_bytes} bytes of flags",
                "use a schedule with fewer CTAs",
            )


def workspace_sizes(device: int) -> tuple[int, int]:
    """Return the maximum sizes in bytes of the flags and of the partial sums of a launch on the device."""
    sm_count = context.device(device).sm_count
    return sm_count * FLAGS_PER_SM_BYTES, sm_count * PARTIALS_PER_SM_BYTES


def is_capturing(device: int, stream: int) -> bool:
    """Return whether a stream of a device is being captured into a graph.

    Raises the errors of context.is_capturing().
    """
    with context.using(device) as driver:
        return context.is_capturing(driver, stream)


def check_not_capturing(device: int, stream: int, allowed: str) -> None:
    """Raise LaunchError if ``stream`` is being captured into a graph."""
    if is_capturing(device, stream):
        remedy = "make this call once, or call MarlinLinear.warm_up(), before the capture"
        raise LaunchError("stream", "a stream under graph capture", allowed, remedy)


def check_workspace(workspace: object, device: int) -> Workspace:
    """Return a caller's workspace.

    Raises ArgumentTypeError for another type, and LaunchError for a workspace of another device.
    """
    if not isinstance(workspace, Workspace):
        raise ArgumentTypeError("workspace", type(workspace).__name__, "Workspace or None")
    if workspace.device != device:
        raise LaunchError(
            "workspace", f"a workspace on device {workspace.device}", f"on device {device} (the device of x)"
        )
    return workspace


#: Maximum number of streams per device that keep their workspaces. The driver does not report destroyed streams, so the
#: workspace of a stream is dropped after this number of other streams have been used.
_MAX_STREAMS = 32
#: Size of a slab, and minimum number of free bytes that are kept available outside of captures. The partial sums and
#: flags of a launch take at most 16.5 MiB on 132 SMs, so a slab has room for two launches. For small M, they take 1 to
#: 4 MiB.
_SLAB_BYTES, _MIN_LEFT_BYTES = 34 << 20, 20 << 20
#: Parts have only a few different sizes, so that a returned part fits the next graph. The size for partial sums is the
#: maximum of any launch, halved up to _MAX_HALVINGS times. The size for rows is a power of two up to _PART_STEP_BYTES,
#: and a multiple of _PART_STEP_BYTES beyond that.
_MAX_HALVINGS, _PART_STEP_BYTES = 6, 16 << 20


def _rows_bytes(nbytes: int) -> int:
    return min(1 << (nbytes - 1).bit_length(), -(-nbytes // _PART_STEP_BYTES) * _PART_STEP_BYTES)


class _Slab:
    """Device memory that is divided into parts from front to back.

    A returned part is reused as a whole and for the same purpose. Its flags are zero, because kernels reset flags.
    ``left`` is the number of bytes that were never divided into parts, and ``used_bytes`` is the size of all parts in
    use.
    """

    __slots__ = ("_memory", "back", "left", "nbytes", "used_bytes")

    def __init__(self, nbytes: int, device: int) -> None:
        self._memory, self.nbytes = DeviceMemory(nbytes, device), nbytes
        self.left = self.used_bytes = 0
        #: Maps (size, whether the part is for rows) to the addresses of returned parts. Storing the parts themselves
        #: would create a cycle that keeps the slab alive.
        self.back: dict[tuple[int, bool], list[int]] = {}
        self.wipe()

    def wipe(self) -> None:
        """Discard all parts. No part may be in use."""
        if self.left < self.nbytes:
            self._memory.clear(0, self.nbytes - self.left)
            self.left = self.nbytes
            self.back.clear()

    def part(self, nbytes: int, for_rows: bool) -> _Part:
        """Reuse a part that was handed back, or allocate a new one.

        The caller must ensure that enough memory is left.
        """
        self.used_bytes += nbytes
        if back := self.back.get((nbytes, for_rows)):
            return _Part(self, back.pop(), nbytes, for_rows)
        self.left -= nbytes
        return _Part(self, self._memory.pointer + self.nbytes - self.left - nbytes, nbytes, for_rows)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a slab with one user. The part keeps the slab alive.

    The part begins with zeros for flags unless it is for rows.
    """

    slab: _Slab
    pointer: int
    nbytes: int
    for_rows: bool


class _Reserve:
    """The slabs of a device, from which captures take parts.

    Slabs are freed outside of captures. All methods are thread-safe.
    """

    def __init__(self, device: int, on_low: Callable[[], None]) -> None:
        """Create an empty reserve. ``on_low`` is called when less than _MIN_LEFT_BYTES is left."""
        self._device, self._on_low, self._lock = device, on_low, threading.Lock()
        self._slabs: list[_Slab] = []

    @property
    def ready_bytes(self) -> int:
        """Number of unused bytes in all slabs."""
        with self._lock:
            return sum(slab.nbytes - slab.used_bytes for slab in self._slabs)

    def trim(self, min_left_bytes: int) -> list[_Slab]:
        """Remove and return the slabs without a part in use.

        One of these slabs is kept if less than ``min_left_bytes`` would otherwise be left. The caller frees the slabs
        without holding a lock and outside of captures, because cuMemFree waits for the device.
        """
        with self._lock:
            unused = (slab for slab in self._slabs if not slab.used_bytes)
            idle = sorted(unused, key=lambda slab: (slab.nbytes, -slab.left))
            self._slabs = [slab for slab in self._slabs if slab.used_bytes]
            if idle and not self._has_left(min_left_bytes):
                idle[0].wipe()
                self._slabs.append(idle.pop(0))
            return idle

    def refill(self) -> list[_Slab]:
        """Trim the slabs, and add a slab if too little memory is left.

        Call this method outside of captures. Raises DriverError.
        """
        idle = self.trim(_MIN_LEFT_BYTES)
        with self._lock:
            if not self._has_left(_MIN_LEFT_BYTES):
                self._slabs.append(_Slab(_SLAB_BYTES, self._device))
        return idle

    def take(self, nbytes: int, parts: list[_Part], for_rows: bool) -> _Part:
        """Take a part and append it to ``parts``.

        If no slab has room, a slab is cleared or allocated, in relaxed capture mode, which does not affect other
        captures. Raises DriverError.
        """
        with self._lock:
            fitting = [slab for slab in self._slabs if slab.back.get((nbytes, for_rows))]
            fitting += [slab for slab in self._slabs if slab.left >= nbytes]
            if not fitting:
                fitting = [slab for slab in self._slabs if not slab.used_bytes and slab.nbytes >= nbytes]
                if not fitting:
                    fitting = [_Slab(max(_SLAB_BYTES, nbytes), self._device)]
                    self._slabs += fitting
                fitting[0].wipe()
            parts.append(fitting[0].part(nbytes, for_rows))
            if not self._has_left(_MIN_LEFT_BYTES):
                self._on_low()
            return parts[-1]

    def put_back(self, parts: list[_Part]) -> None:
        """Put back the parts of a destroyed graph. No kernel may still be writing to the parts."""
        with self._lock:
            for part in parts:
                part.slab.used_bytes -= part.nbytes
                part.slab.back.setdefault((part.nbytes, part.for_rows), []).append(part.pointer)

    def _has_left(self, nbytes: int) -> bool:
        return any(slab.left >= nbytes for slab in self._slabs) or not nbytes


class _Branch:
    """The workspace of one stream's launches in one capture. In the graph, these launches also run in order.

    A launch that needs more partial sums than fit in the workspace gets a new workspace of at least twice the size,
    which later launches also use. The graph contains the addresses of all of these workspaces.
    """

    def __init__(self, device: int, reserve: _Reserve, life: streams.GraphLife | None) -> None:
        """Create a branch without memory.

        ``life`` is the lifetime object of the graph, or None for a workspace that all graphs of the stream share.
        """
        self._device, self._reserve, self.life = device, reserve, life
        self.parts: list[_Part] = []
        parts = self.parts  # Not self, because a cycle would keep the slabs alive.
        self._rows = ActivationRows(lambda nbytes: reserve.take(_rows_bytes(nbytes), parts, for_rows=True))
        self._space: Workspace | None = None

    def workspace(self, partials_bytes: int | None) -> Workspace:
        """Return a workspace with room for ``partials_bytes`` of partial sums, or for any launch if None."""
        flags, max_bytes = workspace_sizes(self._device)
        min_bytes = max_bytes if partials_bytes is None else partials_bytes
        if self._space is None or min_bytes > self._space.partials_bytes:
            halves = (max_bytes >> k for k in range(_MAX_HALVINGS + 1))
            room = min((nbytes for nbytes in halves if nbytes >= min_bytes), default=max_bytes)
            part = self._reserve.take(flags + room, self.parts, for_rows=False)
            self._space = Workspace.within(part, self._device, self._rows)
        return self._space


@dataclass(frozen=True, slots=True)
class WorkspaceBytes:
    """Sizes of the workspaces on a device. Workspaces that callers created are not included.

    Parameters
    ----------
    streams : tuple of int
        Bytes of each stream's workspace.
    graphs : tuple of int
        Workspace size of each graph branch in bytes.
    reserved : int
        Bytes reserved for future captures, including parts of destroyed graphs.
    """

    streams: tuple[int, ...]
    graphs: tuple[int, ...]
    reserved: int

    @property
    def total(self) -> int:
        """Total size in bytes."""
        return sum(self.streams) + sum(self.graphs) + self.reserved


class Owners:
    """All workspaces of the streams and graphs of a Runtime. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Maps (device, identity of the stream) to a workspace. The lock is not required for reading. A workspace that
        #: is missing here may be in _recent. The map is cleared when a stream is added, to find out which streams are
        #: still in use, and when the reserve must be refilled.
        self.ready: dict[tuple[int, int | None], Workspace] = {}
        #: All workspaces of streams, with the most recently used at the end.
        self._recent: OrderedDict[tuple[int, int], Workspace] = OrderedDict()
        #: Maps (device, capture, identity of the stream) to a branch of a graph.
        self._branches: dict[tuple[int, int, int], _Branch] = {}
        self._reserves: dict[int, _Reserve] = {}
        #: Whether all graphs that are captured on a stream share a workspace.
        self.shares_captures = False

    def find(self, device: int, stream: int, partials_bytes: int | None) -> Workspace:
        """Return the workspace of a stream that is not in ``ready``."""
        identity = streams.identity(device, stream)
        if identity is not None:
            return self._stream_space(device, identity)
        capture = streams.capture_of(device, stream)
        if capture is None:  # Another thread has just ended this capture.
            return self.find(device, stream, partials_bytes)
        with self._lock:
            shared = self.shares_captures
            key = (device, 0 if shared else capture.number, capture.stream)
            if key not in self._branches:
                self._sweep_graphs()
                life = None if shared else streams.GraphLife(capture.graph)
                self._branches[key] = _Branch(device, self._reserve(device), life)
            return self._branches[key].workspace(partials_bytes)

    def _stream_space(self, device: int, identity: int) -> Workspace:
        freed: list[object] = []  # Freed after the lock is released, because cuMemFree waits.
        with self._lock:
            self._sweep(freed)
            key, reserve = (device, identity), self._reserve(device)
            space = self._recent.pop(key, None)
            if space is None:
                held = [held for held in self._recent if held[0] == device]
                freed += [self._recent.pop(old) for old in held[: max(0, len(held) + 1 - _MAX_STREAMS)]]
                self.ready.clear()
                space = Workspace(device)
            freed += reserve.refill()
            self._recent[key] = self.ready[key] = space
            return space

    def _reserve(self, device: int) -> _Reserve:
        if device not in self._reserves:
            self._reserves[device] = _Reserve(device, self.ready.clear)
        return self._reserves[device]

    def _sweep(self, freed: list[object]) -> None:
        """Drop the workspaces of threads that have exited and of graphs that have been freed."""
        while streams.ended_threads:
            number = streams.ended_threads.popleft()
            for key in [key for key in self._recent if key[1] == number]:
                self.ready.pop(key, None)
                freed.append(self._recent.pop(key))
        self._sweep_graphs()

    def _sweep_graphs(self) -> None:
        """Put back the parts of destroyed graphs. The method frees no memory and may run during capture."""
        for key in [key for key, branch in self._branches.items() if branch.life and branch.life.has_ended()]:
            self._reserves[key[0]].put_back(self._branches.pop(key).parts)

    def count(self, device: int) -> WorkspaceBytes:
        freed: list[object] = []
        with self._lock:
            self._sweep(freed)
            kept = tuple([space.nbytes for key, space in self._recent.items() if key[0] == device])
            branches = [branch for key, branch in self._branches.items() if key[0] == device]
            graphs = tuple([sum(part.nbytes for part in branch.parts) for branch in branches])
            reserve = self._reserve(device)
            freed += reserve.trim(_MIN_LEFT_BYTES if kept else 0)
            return WorkspaceBytes(kept, graphs, reserve.ready_bytes)

    def release(self) -> None:
        freed: list[object] = []
        with self._lock:
            self._sweep(freed)
            freed += self._recent.values()
            for reserve in self._reserves.values():
                freed += reserve.trim(0)
            self.ready.clear()
            self._recent.clear()


def owners() -> Owners:
    """Return the workspaces of the Runtime in use."""
    return context.runtime().part(Owners)


def stream_workspace(device: int, stream: int, partials_bytes: int | None = None) -> Workspace:
    """Return the workspace for a launch on the stream with this handle, and create it at its first use.

    Each stream has its own workspace. During capture, each branch of the graph has its own workspace, with room for
    ``partials_bytes`` or, if ``partials_bytes`` is None, for any launch. That workspace is freed when the graph and all
    its instances have been destroyed. Raises DriverError if memory runs out, and LaunchError if the capture was
    invalidated.
    """
    held = owners()
    known = held.ready.get((device, streams.identity(device, stream)))
    return held.find(device, stream, partials_bytes) if known is None else known


def share_captured_workspaces() -> None:
    """Share one workspace among all graphs captured on a stream for the rest of the process.

    Notes
    -----
    Call this function only if no two of these graphs run at the same time. An engine that captures a graph for each
    batch size then needs one workspace instead of hundreds.
    """
    owners().shares_captures = True


def workspace_bytes(device: int = 0) -> WorkspaceBytes:
    """Return the sizes of the workspaces of streams and graphs, and of the reserve for future graphs.

    Slabs that only destroyed graphs used are freed first, except for one in the reserve.

    Parameters
    ----------
    device : int, default 0
        Ordinal of the device.

    Returns
    -------
    WorkspaceBytes
        The sizes in bytes.
    """
    return owners().count(device)


def release_workspaces() -> None:
    """Free the workspaces of all streams, the memory of destroyed graphs, and the reserve for captures.

    Notes
    -----
    The workspace of a running launch is freed after the launch. Slabs that existing graphs use are not freed.
    """
    owners().release()
