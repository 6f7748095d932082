"""Identities of CUDA streams, captures of streams into graphs, lifetimes of graphs, and waits between streams.

A handle does not identify a stream: the driver reuses the handle of a destroyed stream, and ``CU_STREAM_PER_THREAD`` is
a different stream in each thread. Source: CUDA driver API, "Stream Management", "Graph Management".
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo
from cudatma.errors import DriverError, LaunchError, check

#: CU_STREAM_LEGACY and CU_STREAM_PER_THREAD in cuda.h. Handle 0 means one of them.
_LEGACY, _PER_THREAD = 1, 2
#: The stream that cuda.bindings uses for handle 0. All launches go through cuda.bindings.
_ZERO = _PER_THREAD if os.environ.get("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "0") not in ("", "0") else _LEGACY
#: Identity of the legacy default stream. The driver's stream ids are nonnegative, and thread numbers are less than this
#: value.
_LEGACY_IDENTITY = -1
#: CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC and CU_GRAPH_USER_OBJECT_MOVE in cuda.h.
_ACTIVE, _NO_DESTRUCTOR_SYNC, _MOVE = 1, 1, 1
#: Number of bytes to allocate for a sem_t, which has 32 bytes on 64-bit Linux.
_SEMAPHORE_BYTES = 64

_thread_numbers = itertools.count(_LEGACY_IDENTITY - 1, -1)
#: Identities of per-thread default streams whose threads have exited. The owner of their resources removes them.
ended_threads: deque[int] = deque()


class _Life:
    """An object in a thread's local storage whose destructor records the end of the thread."""

    __slots__ = ("_note", "number")

    def __init__(self) -> None:
        self.number, self._note = next(_thread_numbers), ended_threads.append

    def __del__(self) -> None:
        self._note(self.number)


class _Thread(threading.local):
    """State of a thread.

    Attributes
    ----------
    life : _Life or None
        Object that holds the identity of the thread's default stream.
    status : tuple or None
        The int into which the driver writes the capture status, and a reference to this int.
    """

    life: _Life | None = None
    status: tuple[Any, Any] | None = None

    def _renew(self) -> None:
        self.status = None


_thread = _Thread()
# In a forked child, _prepare() runs and raises an error, because the driver must not be called there.
context.after_fork(_thread, _Thread._renew)


def identity(device: int, stream: int) -> int | None:
    """Return the identity of a stream in the process, or None while the stream is captured into a graph.

    Identities are never reused. The function makes two driver calls, or none for the legacy default stream, which
    cannot be captured. Raises DriverError if a call fails. [CUDA driver API, cuStreamGetId, cuStreamIsCapturing]
    """
    if stream <= _PER_THREAD:
        return _of_this_thread(device) if (stream or _ZERO) == _PER_THREAD else _LEGACY_IDENTITY
    status, at = _thread.status or _prepare()
    if _is_capturing(stream, at):
        return _query_again(device, stream)
    if status.value:
        return None
    code, number = _get_id(stream)
    return _query_again(device, stream) if code else number


def _prepare() -> tuple[Any, Any]:
    global _is_capturing, _get_id
    # cuStreamIsCapturing comes from libcuda, because cuda.bindings converts the result to an enum, which takes longer
    # than the call.
    _is_capturing, _get_id = _libcuda().cuStreamIsCapturing, context.initialize().cuStreamGetId
    status = ctypes.c_int()
    _thread.status = status, ctypes.byref(status)
    return _thread.status


#: cuStreamIsCapturing from libcuda and cuStreamGetId from cuda.bindings, which _prepare() sets.
_is_capturing: Any = None
_get_id: Any = None


@lru_cache(maxsize=1)
def _libcuda() -> Any:
    context.initialize()
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuStreamIsCapturing.argtypes = (pointer,)
    # Version 2 does not need to return dependencies, and version 3 needs CUDA 12.3.
    library.cuStreamGetCaptureInfo_v2.argtypes = (pointer,) * 6
    library.cuCtxGetCurrent.argtypes = (pointer,)
    library.cuUserObjectCreate.argtypes = (pointer, pointer, pointer, number, number)
    library.cuGraphRetainUserObject.argtypes = (pointer, pointer, number, number)
    library.cuUserObjectRelease.argtypes = (pointer, number)
    return library


def _query_again(device: int, stream: int) -> int | None:
    """Repeat the query in the device's context, or raise the driver's error. This function is not on the hot path."""
    with context.using(device) as driver:
        capturing = context.is_capturing(driver, stream)
        number = int(check(driver.cuStreamGetId(stream), "cuStreamGetId"))
    return None if capturing else number


def _of_this_thread(device: int) -> int | None:
    # The handle denotes the thread's stream in the current context, which must be the device's context.
    status, at = _thread.status or _prepare()
    current, primary = ctypes.c_void_p(), int(context.primary_context(device))
    if _libcuda().cuCtxGetCurrent(ctypes.addressof(current)) or current.value != primary:
        with context.using(device):
            _require(_is_capturing(_PER_THREAD, at), "cuStreamIsCapturing")
    else:
        _require(_is_capturing(_PER_THREAD, at), "cuStreamIsCapturing")
    return None if status.value else _thread_number()


def _thread_number() -> int:
    if _thread.life is None:
        _thread.life = _Life()
    return _thread.life.number


@dataclass(frozen=True, slots=True)
class Capture:
    """A graph capture in progress.

    Work on two streams of one capture may become concurrent branches of the graph.

    Attributes
    ----------
    number : int
        Number of the capture, which is unique in the process.
    graph : int
        Address of the CUgraph.
    stream : int
        Identity of the capturing stream within the capture.
    """

    number: int
    graph: int
    stream: int


def capture_of(device: int, stream: int) -> Capture | None:
    """Return the capture in progress on a stream, or None if there is none.

    Raises LaunchError if the capture has been invalidated, and DriverError if the driver fails. [CUDA driver API,
    cuStreamGetCaptureInfo]
    """
    stream = stream or _ZERO
    if stream == _LEGACY:
        return None
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    with context.using(device):
        places = [ctypes.addressof(place) for place in (status, number, graph)]
        code = _libcuda().cuStreamGetCaptureInfo_v2(stream, *places, None, None)
        _require(code, "cuStreamGetCaptureInfo")
        if not status.value:
            return None
        if status.value != _ACTIVE:
            got, remedy = (
                "a stream whose capture has been invalidated",
                "end the capture, and repeat it without the call that invalidated it",
            )
            raise LaunchError("stream", got, "a stream without an invalidated capture", remedy)
        # For a capturing stream, cuStreamGetId fails with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (H200, driver 580.159).
        # Within one capture, however, the handle identifies the stream.
        return Capture(number.value, graph.value or 0, _thread_number() if stream == _PER_THREAD else stream)


def _require(code: int, call: str) -> None:
    if code:
        raise DriverError(call, code, f"CUresult {code}")


@lru_cache(maxsize=1)
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.calloc.restype, library.calloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_size_t)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    library.sem_trywait.argtypes = (ctypes.c_void_p,)
    return library


class GraphLife:
    """Detector for the end of a graph, its executables and all of their launches.

    The graph owns a user object, whose destructor runs in a driver thread that may neither call CUDA nor wait for
    Python. The destructor is therefore sem_post() from the C library, and has_ended() polls the semaphore. [CUDA C++
    Programming Guide, CUDA User Objects; CUDA driver API, cuGraphRetainUserObject]
    """

    __slots__ = ("_semaphore",)

    def __init__(self, graph: int) -> None:
        """Watch a CUgraph during its capture or later.

        Raises DriverError if the driver fails.
        """
        library, libc = _libcuda(), _libc()
        # The C library allocates the semaphore, because the graph may outlive the interpreter.
        self._semaphore = libc.calloc(1, _SEMAPHORE_BYTES)
        libc.sem_init(self._semaphore, 0, 0)
        user_object = ctypes.c_void_p()
        destructor = ctypes.cast(libc.sem_post, ctypes.c_void_p)
        code = library.cuUserObjectCreate(
            ctypes.addressof(user_object), self._semaphore, destructor, 1, _NO_DESTRUCTOR_SYNC
        )
        _require(code, "cuUserObjectCreate")
        code = library.cuGraphRetainUserObject(graph, user_object, 1, _MOVE)
        if code:
            library.cuUserObjectRelease(user_object, 1)
        _require(code, "cuGraphRetainUserObject")

    def has_ended(self) -> bool:
        """Return whether the graph and everything created from it have been destroyed.

        Two threads must not call this method at the same time.
        """
        if self._semaphore and _libc().sem_trywait(self._semaphore) == 0:
            _libc().free(self._semaphore)
            self._semaphore = None
        return not self._semaphore


def order_after_producers(stream: int, device: int, *arrays: ArrayInfo | None) -> None:
    """Make a stream wait for the work queued by the producers of arrays. The host does not wait.

    Only arrays that name the stream of their producer cause a wait; CuPy arrays and torch tensors do not. No wait is
    added if the two streams are not in the same capture, because the wait would merge the captures. [CUDA Array
    Interface 3, Synchronization]
    """
    for array in arrays:
        if array is not None and array.producer is not None:
            order_after(stream, array.producer, device)


def order_after(stream: int, producer: int, device: int) -> None:
    """Make a stream wait for one producer's stream, as order_after_producers() does."""
    stream, producer = stream or _ZERO, producer or _ZERO
    if stream == producer or _capture_number(device, stream) != _capture_number(device, producer):
        return
    with context.using(device) as driver:
        event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        try:
            check(driver.cuEventRecord(event, producer), "cuEventRecord")
            check(driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")
        finally:
            # The driver destroys the event when it is complete. [CUDA driver API, cuEventDestroy]
            check(driver.cuEventDestroy(event), "cuEventDestroy")


def wait_for_producers(device: int, *arrays: ArrayInfo) -> None:
    """Make the host wait for the producers of arrays, so that any stream can use the arrays.

    The function does not wait for a stream that is being captured.
    """
    for producer in {array.producer for array in arrays if array.producer is not None}:
        with context.using(device) as driver, context.outside_captures(driver):
            if _capture_number(device, producer) is None:
                check(driver.cuStreamSynchronize(producer or _ZERO), "cuStreamSynchronize")


def _capture_number(device: int, stream: int) -> int | None:
    capture = capture_of(device, stream)
    return None if capture is None else capture.number
