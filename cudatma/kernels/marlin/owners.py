"""Who owns which workspace: streams, and the branches of captured graphs.

A capture takes memory that was reserved outside of captures. Nothing here is on the path of a repeated call but one
look-up by the stream's identity.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cudatma import context, streams
from cudatma.device_memory import DeviceMemory
from cudatma.kernels.marlin.workspace import ActivationRows, MarlinWorkspace, workspace_sizes

#: Streams of a device that keep their workspaces, those that were used last. There is no asking whether a stream has
#: been destroyed, so the workspace of one that has goes when so many others have come.
_MOST_STREAMS = 32
#: A slab of the reserve, and how much of one is left at least outside of captures. The partial sums and flags of any
#: launch take 16.5 MiB on 132 multiprocessors, those of a few tokens 1 to 4 MiB.
_SLAB_BYTES, _LEAST_BYTES = 32 << 20, 20 << 20
_ALIGNMENT = 256
#: Partial sums of a graph's branch are made in multiples of this.
_PARTIALS_STEP_BYTES = 256 << 10


class _Part:
    """A part of a slab, all zeros when it is taken, of nobody else. Keeps the slab."""

    __slots__ = ("_slab", "nbytes", "pointer")

    def __init__(self, slab: DeviceMemory, offset: int, nbytes: int) -> None:
        self._slab, self.pointer, self.nbytes = slab, slab.pointer + offset, nbytes


class _Reserve:
    """A device's slab, from which captures take parts, front to back. A slab is freed with the last of its parts.

    Safe from many threads.
    """

    def __init__(self, device: int, was_spent: Callable[[], None]) -> None:
        """was_spent: called when less than the least is left."""
        self._device, self._was_spent, self._lock = device, was_spent, threading.Lock()
        self._slab: DeviceMemory | None = None
        self._used = 0

    @property
    def left_bytes(self) -> int:
        return 0 if self._slab is None else self._slab.nbytes - self._used

    def refill(self, beside: int = 0) -> _Part | None:
        """Another slab where too little is left, outside of captures. Raises DriverError.

        beside: bytes that the caller will allocate: they come with the slab, in one allocation; None where there is no
        new slab.
        """
        with self._lock:
            if self.left_bytes >= _LEAST_BYTES:
                return None
            return self._cut(self._begin(_SLAB_BYTES + beside), beside)

    def take(self, nbytes: int) -> _Part:
        """Part of the slab. Where it has no room it is allocated, in the relaxed capture mode, which leaves captures as
        they are. Raises DriverError."""
        nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if nbytes > _LEAST_BYTES:
                return _Part(self._zeroed(nbytes), 0, nbytes)
            slab = self._slab
            if slab is None or nbytes > self.left_bytes:
                slab = self._begin(_SLAB_BYTES)
            part = self._cut(slab, nbytes)
            if self.left_bytes < _LEAST_BYTES:
                self._was_spent()
            return part

    def _begin(self, nbytes: int) -> DeviceMemory:
        self._slab, self._used = self._zeroed(nbytes), 0
        return self._slab

    def _cut(self, slab: DeviceMemory, nbytes: int) -> _Part:
        part = _Part(slab, self._used, nbytes)
        self._used += nbytes
        return part

    def _zeroed(self, nbytes: int) -> DeviceMemory:
        memory = DeviceMemory(nbytes, self._device)
        memory.clear(0, nbytes)
        return memory


class _Branch:
    """What the launches of one stream in one capture share: they are in order in the graph, too.

    Partial sums are as large as the launches need them. A launch that needs more gets a workspace of its own and leaves
    it to those after it; the graph holds the addresses of all.
    """

    def __init__(self, device: int, reserve: _Reserve, life: streams.GraphLife) -> None:
        self._device, self._reserve, self.life = device, reserve, life
        self._rows = ActivationRows(reserve.take)
        self._spaces: list[MarlinWorkspace] = []

    @property
    def nbytes(self) -> int:
        sums = sum(space.partials_bytes + space.flags_bytes for space in self._spaces)
        return sums + self._rows.held_bytes

    def workspace(self, partials_bytes: int | None) -> MarlinWorkspace:
        """One with room for so many bytes of partial sums; None: for any launch."""
        flags, most = workspace_sizes(self._device)
        wanted = most if partials_bytes is None else partials_bytes
        last = self._spaces[-1].partials_bytes if self._spaces else -1
        if wanted > last:
            wanted = min(most, max(-(-wanted // _PARTIALS_STEP_BYTES) * _PARTIALS_STEP_BYTES, 2 * last))
            memory = self._reserve.take(flags + wanted)
            self._spaces.append(MarlinWorkspace.within(memory, self._device, self._rows))
        return self._spaces[-1]


@dataclass(frozen=True, slots=True)
class WorkspaceBytes:
    """Device memory that marlin_gemm keeps on a device.

    streams: of each stream that has a workspace. graphs: of each branch of a graph that has one. reserved: ready for
    captures to come. Workspaces that callers made are not counted.
    """

    streams: tuple[int, ...]
    graphs: tuple[int, ...]
    reserved: int

    @property
    def total(self) -> int:
        return sum(self.streams) + sum(self.graphs) + self.reserved


class Owners:
    """All workspaces of streams and graphs. Safe from many threads; empty after a fork."""

    def __init__(self) -> None:
        self._renew()
        context.after_fork(self, Owners._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        #: (device, stream's identity) -> workspace, read without the lock; what is missing is looked for in _recent.
        #: Emptied when a stream is added, so that streams that are still used come by and show it, and when the reserve
        #: has to be refilled.
        self.ready: dict[tuple[int, int | None], MarlinWorkspace] = {}
        #: The same, all of them, those used last at the end.
        self._recent: OrderedDict[tuple[int, int], MarlinWorkspace] = OrderedDict()
        #: (device, capture, stream's identity) -> what that branch of a graph holds.
        self._branches: dict[tuple[int, int, int], _Branch] = {}
        self._reserves: dict[int, _Reserve] = {}

    def find(self, device: int, stream: int, partials_bytes: int | None) -> MarlinWorkspace:
        """As stream_workspace(), for what is not ready."""
        identity = streams.identity(device, stream)
        if identity is not None:
            return self._of_stream(device, identity)
        capture = streams.capture_of(device, stream)
        if capture is None:  # another thread has just ended it
            return self.find(device, stream, partials_bytes)
        with self._lock:
            key = (device, capture.number, capture.stream)
            if key not in self._branches:
                self._branches[key] = _Branch(device, self._reserve(device), streams.GraphLife(capture.graph))
            return self._branches[key].workspace(partials_bytes)

    def _of_stream(self, device: int, identity: int) -> MarlinWorkspace:
        gone: list[object] = []  # freed without the lock: cuMemFree waits for the device
        with self._lock:
            self._sweep(gone)
            key, reserve = (device, identity), self._reserve(device)
            space = self._recent.pop(key, None)
            if space is None:
                others = [other for other in self._recent if other[0] == device]
                gone += [self._recent.pop(other) for other in others[: max(0, len(others) + 1 - _MOST_STREAMS)]]
                self.ready.clear()
                memory = reserve.refill(sum(workspace_sizes(device)))
                space = MarlinWorkspace(device) if memory is None else MarlinWorkspace.within(memory, device)
            reserve.refill()
            self._recent[key] = self.ready[key] = space
            return space

    def _reserve(self, device: int) -> _Reserve:
        if device not in self._reserves:
            self._reserves[device] = _Reserve(device, self.ready.clear)
        return self._reserves[device]

    def _sweep(self, gone: list[object]) -> None:
        """Drop what belongs to threads and graphs that have ended."""
        while streams.ended_threads:
            number = streams.ended_threads.popleft()
            for key in [key for key in self._recent if key[1] == number]:
                self.ready.pop(key, None)
                gone.append(self._recent.pop(key))
        for branch in [key for key, known in self._branches.items() if known.life.has_ended()]:
            gone.append(self._branches.pop(branch))

    def count(self, device: int) -> WorkspaceBytes:
        gone: list[object] = []
        with self._lock:
            self._sweep(gone)
            kept = tuple([space.nbytes for key, space in self._recent.items() if key[0] == device])
            graphs = tuple([branch.nbytes for key, branch in self._branches.items() if key[0] == device])
            reserve = self._reserves.get(device)
            return WorkspaceBytes(kept, graphs, 0 if reserve is None else reserve.left_bytes)

    def release(self) -> None:
        gone: list[object] = []
        with self._lock:
            self._sweep(gone)
            gone += [*self._recent.values(), *self._reserves.values()]
            self.ready.clear()
            self._recent.clear()
            self._reserves.clear()


OWNERS = Owners()


def stream_workspace(device: int, stream: int, partials_bytes: int | None = None) -> MarlinWorkspace:
    """The workspace for a launch on a stream, by its handle; made at its first use.

    A stream has one. While the stream is being captured it is the one of the graph's branch, with room for
    ``partials_bytes`` (None: for any launch); it goes when the graph and all that was instantiated from it are gone.
    Raises DriverError (no memory), LaunchError (a capture that was invalidated).
    """
    known = OWNERS.ready.get((device, streams.identity(device, stream)))
    return OWNERS.find(device, stream, partials_bytes) if known is None else known


def workspace_bytes(device: int = 0) -> WorkspaceBytes:
    """What the workspaces of a device's streams and graphs take, and what is reserved for graphs to come.

    Memory of graphs that are gone is freed first.
    """
    return OWNERS.count(device)


def release_workspaces() -> None:
    """Forget the workspaces of all streams and the memory reserved for captures; free that of graphs that are gone.

    What another thread launches with is freed behind its launch. Graphs that still are keep theirs.
    """
    OWNERS.release()
