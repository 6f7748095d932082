"""Devices and their primary contexts, and what a fork does to them.

cudatma works in each device's primary context, the one that CuPy, torch and the CUDA runtime use, and keeps it retained
for the life of the process. Source: CUDA driver API, "Primary Context Management" and "Context Management".
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from cudatma.errors import DriverError, LaunchError, check, no_driver

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU: ordinal, compute capability, opt-in limit of shared memory per thread block, number of SMs."""

    ordinal: int
    compute_capability: tuple[int, int]
    smem_per_block_bytes: int
    sm_count: int


class Cache(dict[Any, _Part]):
    """The newest values by their keys, at most ``limit`` of them. Read without a lock; safe from many threads."""

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def put(self, key: Any, value: _Part) -> None:
        """Keep a value. Drops the older half if there are ``limit`` already."""
        if len(self) >= self.limit:
            for old in list(self)[: max(1, self.limit // 2)]:
                self.pop(old, None)
        self[key] = value


class Runtime:
    """The state that lives as long as the process: kernels, calls, plans, workspaces and choice tables.

    Each module keeps its part under a key of its own, made at its first use. A forked child starts with a new Runtime.
    Tests run in one of their own: ``with using_runtime(Runtime()): ...``. Safe from many threads.
    """

    def __init__(self) -> None:
        self.parts: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def part(self, key: Any, make: Callable[[], _Part] | None = None) -> _Part:
        """Return the part under a key. ``make`` makes it if it is missing; by default the key is its class."""
        found: _Part | None = self.parts.get(key)
        if found is None:
            with self._lock:
                found = self.parts.get(key)
                if found is None:
                    found = self.parts[key] = (make or key)()
        return found


def runtime() -> Runtime:
    """Return the Runtime in use."""
    return in_use


@contextlib.contextmanager
def using_runtime(other: Runtime) -> Iterator[Runtime]:
    """Use another Runtime, in all threads, until the block ends."""
    global in_use
    previous, in_use = in_use, other
    try:
        yield other
    finally:
        in_use = previous


#: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT of cuda.h.
_STREAM_CAPTURE_IMPLICIT = 906
_lock = threading.Lock()
_devices: dict[int, Device] = {}
_contexts: dict[int, Any] = {}
#: Whether this process has called cuInit through us, and whether it is the fork of one that had.
_initialised = False
forked = False
#: What must be renewed in a forked child, by the object's identity.
_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_Renewed = TypeVar("_Renewed")
#: The Runtime in use, which the hot path reads here.
in_use = Runtime()


def _note_fork() -> None:
    global _lock, forked, _initialised, in_use
    _lock = threading.Lock()  # another thread of the parent may have held it
    forked = forked or _initialised
    _initialised = False
    in_use = Runtime()
    _devices.clear()
    _contexts.clear()
    for renewed, renew in list(_renewals.items()):
        renew(renewed)


os.register_at_fork(after_in_child=_note_fork)


def after_fork(renewed: _Renewed, renew: Callable[[_Renewed], None]) -> None:
    """Call ``renew(renewed)`` in each forked child for as long as the object lives: for its locks and handles."""
    _renewals[renewed] = renew


def require_no_fork() -> None:
    """Raise LaunchError in a process that was forked from one that had initialised CUDA: no context survives that."""
    if forked:
        raise LaunchError(
            "process",
            f"{os.getpid()}, forked from a process that had used CUDA",
            "a process that initialises CUDA itself",
            "start workers with multiprocessing.get_context('spawn'), or fork before the first launch",
        )


def initialise() -> Any:
    """cuda.bindings' driver module after cuInit. Raises DriverError without a driver, LaunchError after a fork."""
    global _initialised
    require_no_fork()
    from cuda.bindings import driver

    if not _initialised:
        try:
            check(driver.cuInit(0), "cuInit")
        except RuntimeError as error:
            if not isinstance(error, DriverError):
                no_driver("cuInit", error)
            if error.code == int(driver.CUresult.CUDA_ERROR_NOT_INITIALIZED):
                # What the driver answers in the fork of a process in which another library had initialised it.
                detail = f"{error.detail}; if this process was forked after CUDA was used, start it with 'spawn'"
                raise DriverError("cuInit", error.code, detail) from error
            raise
        _initialised = True
    return driver


def device(ordinal: int) -> Device:
    """The GPU with this ordinal. Raises LaunchError for an invalid ordinal, DriverError without a driver."""
    known = _devices.get(ordinal)
    if known is not None:
        return known
    driver = initialise()
    count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
    if not 0 <= ordinal < count:
        raise LaunchError("device", ordinal, f"0..{count - 1}" if count else "none: there is no CUDA device")
    handle = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
    names = driver.CUdevice_attribute
    major, minor, smem, processors = (
        int(check(driver.cuDeviceGetAttribute(name, handle), "cuDeviceGetAttribute"))
        for name in (
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    return _devices.setdefault(ordinal, Device(ordinal, (major, minor), smem, processors))


def primary_context(ordinal: int) -> Any:
    """The device's primary context (CUcontext), retained once."""
    context = _contexts.get(ordinal)
    if context is None:
        device(ordinal)
        driver = initialise()
        with _lock:
            context = _contexts.get(ordinal)
            if context is None:
                handle = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
                context = check(driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
                _contexts[ordinal] = context
    return context


def current_device() -> int:
    """Ordinal of the calling thread's current context, 0 if it has none."""
    driver = initialise()
    if int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
        return 0
    return int(check(driver.cuCtxGetDevice(), "cuCtxGetDevice"))


@contextlib.contextmanager
def using(ordinal: int) -> Iterator[Any]:
    """Run a block with the device's primary context current; yields cuda.bindings' driver module.

    A thread that has no context keeps this one, as with the CUDA runtime; any other comes back afterwards.
    """
    driver, wanted = initialise(), primary_context(ordinal)
    current = int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent"))
    if current == int(wanted):
        yield driver
    elif current == 0:
        check(driver.cuCtxSetCurrent(wanted), "cuCtxSetCurrent")
        yield driver
    else:
        check(driver.cuCtxPushCurrent(wanted), "cuCtxPushCurrent")
        try:
            yield driver
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextlib.contextmanager
def outside_captures(driver: Any) -> Iterator[None]:
    """Run driver calls that allocate, free or load although this or another thread may be capturing a graph.

    [CUDA driver API, cuThreadExchangeStreamCaptureMode] In the default mode such a call spoils every open capture.
    """
    call = "cuThreadExchangeStreamCaptureMode"
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), call)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(previous), call)


def is_capturing(driver: Any, stream: int) -> bool:
    """Whether a stream is being captured into a graph. The current context is the stream's.

    Raises LaunchError for the legacy default stream while another stream captures: the driver does not answer then, and
    a launch would spoil the capture. Raises DriverError. [CUDA driver API, cuStreamIsCapturing]
    """
    result = driver.cuStreamIsCapturing(stream)
    if int(result[0]) == _STREAM_CAPTURE_IMPLICIT:
        got, allowed = "the legacy default stream while another stream captures a graph", "the stream that captures"
        raise LaunchError("stream", got, allowed, "or make the call before the capture begins")
    return int(check(result, "cuStreamIsCapturing")) != 0
