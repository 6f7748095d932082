"""Devices, their primary contexts, and process-wide state. A forked child starts with new state.

cudatma works in the primary context of each device, as CuPy, torch and the CUDA runtime do, and retains this context
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
    """A GPU with its ordinal, compute capability, opt-in shared memory limit per thread block, and number of SMs."""

    ordinal: int
    compute_capability: tuple[int, int]
    smem_per_block_bytes: int
    sm_count: int


class Cache(dict[Any, _Part]):
    """Thread-safe cache of the newest ``limit`` values by key."""

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def put(self, key: Any, value: _Part) -> None:
        """Store a value. If the cache is full, discard the older half of the values first."""
        if len(self) >= self.limit:
            for old in list(self)[: max(1, self.limit // 2)]:
                self.pop(old, None)
        self[key] = value


class Runtime:
    """State of the process: kernels, calls, plans, workspaces and tuning tables.

    Each module stores its part under a key on first use. A forked child starts with a new Runtime. Tests can use a
    separate Runtime: ``with using_runtime(Runtime()): ...``. All methods are thread-safe.
    """

    def __init__(self) -> None:
        self.parts: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def part(self, key: Any, make: Callable[[], _Part] | None = None) -> _Part:
        """Return the part with this key, and create it with ``make`` if it is missing.

        If ``make`` is None, the key must be a class, and its constructor creates the part.
        """
        part: _Part | None = self.parts.get(key)
        if part is None:
            with self._lock:
                part = self.parts.get(key)
                if part is None:
                    part = self.parts[key] = (make or key)()
        return part


def runtime() -> Runtime:
    """Return the current Runtime."""
    return in_use


@contextlib.contextmanager
def using_runtime(other: Runtime) -> Iterator[Runtime]:
    """Use another Runtime in all threads until the block ends."""
    global in_use
    previous, in_use = in_use, other
    try:
        yield other
    finally:
        in_use = previous


@contextlib.contextmanager
def using_other_devices() -> Iterator[None]:
    """Use empty tables of devices and contexts inside a ``with`` block."""
    global _initialized
    initialized, devices, contexts = _initialized, dict(_devices), dict(_contexts)
    _initialized = False
    _devices.clear()
    _contexts.clear()
    try:
        yield
    finally:
        _initialized = initialized
        for mapping, previous in ((_devices, devices), (_contexts, contexts)):
            mapping.clear()
            mapping.update(previous)


#: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT in cuda.h.
_STREAM_CAPTURE_IMPLICIT = 906
_lock = threading.Lock()
_devices: dict[int, Device] = {}
_contexts: dict[int, Any] = {}
#: Whether this process has called initialize(), and whether it was forked from a process that had done so.
_initialized = False
forked = False
#: Maps each object to the function that renews its locks and handles in a forked child.
_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_Renewed = TypeVar("_Renewed")
#: The current Runtime. The hot path reads this variable directly.
in_use = Runtime()


def _note_fork() -> None:
    global _lock, forked, _initialized, in_use
    _lock = threading.Lock()  # a thread of the parent may have held the old lock
    forked = forked or _initialized
    _initialized = False
    in_use = Runtime()
    _devices.clear()
    _contexts.clear()
    for renewed, renew in list(_renewals.items()):
        renew(renewed)


os.register_at_fork(after_in_child=_note_fork)


def after_fork(renewed: _Renewed, renew: Callable[[_Renewed], None]) -> None:
    """Register ``renew``, which replaces the locks and handles of an object in each forked child.

    ``renew`` is called only while the object is alive.
    """
    _renewals[renewed] = renew


def require_no_fork() -> None:
    """Raise LaunchError if the process was forked after CUDA was initialized, because no context survives a fork."""
    if forked:
        raise LaunchError(
            "process",
            f"process {os.getpid()}, which was forked later",
            "forked before CUDA is initialized",
            "start workers with multiprocessing.get_context('spawn'), or fork before the first launch",
        )


def initialize() -> Any:
    """Initialize CUDA (cuInit) and return the driver module of cuda.bindings.

    Raises DriverError if there is no driver, and LaunchError after a fork.
    """
    global _initialized
    require_no_fork()
    from cuda.bindings import driver

    if not _initialized:
        try:
            check(driver.cuInit(0), "cuInit")
        except RuntimeError as error:
            if not isinstance(error, DriverError):
                no_driver("cuInit", error)
            if error.code == int(driver.CUresult.CUDA_ERROR_NOT_INITIALIZED):
                # cuInit returns this code in a process that was forked after another library had initialized the
                # driver.
                detail = f"{error.detail}; start this process with 'spawn' if it was forked after CUDA was initialized"
                raise DriverError("cuInit", error.code, detail) from error
            raise
        _initialized = True
    return driver


def device(ordinal: int) -> Device:
    """Return the GPU with this ordinal.

    Raises LaunchError if the ordinal is invalid, and DriverError if there is no driver.
    """
    known = _devices.get(ordinal)
    if known is not None:
        return known
    driver = initialize()
    count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
    if not 0 <= ordinal < count:
        raise LaunchError(
            "device",
            ordinal,
            f"0 to {count - 1}" if count else "the ordinal of a CUDA device (there is no CUDA device)",
        )
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
    """Return the primary context (CUcontext) of a device. The process retains each context once."""
    context = _contexts.get(ordinal)
    if context is None:
        device(ordinal)
        driver = initialize()
        with _lock:
            context = _contexts.get(ordinal)
            if context is None:
                handle = check(driver.cuDeviceGet(ordinal), "cuDeviceGet")
                context = check(driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")
                _contexts[ordinal] = context
    return context


def current_device() -> int:
    """Return the device ordinal of the calling thread's current context, or 0 if the thread has none."""
    driver = initialize()
    if int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
        return 0
    return int(check(driver.cuCtxGetDevice(), "cuCtxGetDevice"))


@contextlib.contextmanager
def using(ordinal: int) -> Iterator[Any]:
    """Make a device's primary context current inside a ``with`` block, and yield the driver of cuda.bindings.

    The previous context becomes current again at the end of the block. A thread without a context keeps the primary
    context, as with the CUDA runtime.
    """
    driver, primary = initialize(), primary_context(ordinal)
    current = int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent"))
    if current == int(primary):
        yield driver
    elif current == 0:
        check(driver.cuCtxSetCurrent(primary), "cuCtxSetCurrent")
        yield driver
    else:
        check(driver.cuCtxPushCurrent(primary), "cuCtxPushCurrent")
        try:
            yield driver
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextlib.contextmanager
def outside_captures(driver: Any) -> Iterator[None]:
    """Allow driver calls that allocate, free or load during a graph capture by this or another thread.

    In the default capture mode, these calls would invalidate every capture in progress. [CUDA driver API,
    cuThreadExchangeStreamCaptureMode]
    """
    call = "cuThreadExchangeStreamCaptureMode"
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), call)
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(previous), call)


def is_capturing(driver: Any, stream: int) -> bool:
    """Return whether a stream of the current context is being captured into a graph.

    Raises LaunchError for the legacy default stream while another stream is capturing, because a launch on that stream
    would invalidate the capture. Raises DriverError for any other failure. [CUDA driver API, cuStreamIsCapturing]
    """
    result = driver.cuStreamIsCapturing(stream)
    if int(result[0]) == _STREAM_CAPTURE_IMPLICIT:
        got, allowed = "the legacy default stream while another stream is capturing a graph", "the capturing stream"
        raise LaunchError("stream", got, allowed, "call the function before the capture begins")
    return int(check(result, "cuStreamIsCapturing")) != 0
