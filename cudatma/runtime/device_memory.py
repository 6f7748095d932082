"""Device memory: an allocation that lives as long as its object, and memory that other processes of the host map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cudatma import context
from cudatma.errors import check
from cudatma.pipeline import align_up


class DeviceMemory:
    """``nbytes`` bytes on a device, from the driver. Freed with the object; keep it while a launch or a graph uses it.

    pointer: the address, aligned to 256 bytes. Raises DriverError (no memory, no driver), LaunchError (no such device).
    [CUDA driver API, cuMemAlloc]
    """

    __slots__ = ("__weakref__", "device", "nbytes", "pointer")

    def __init__(self, nbytes: int, device: int) -> None:
        self.pointer = 0
        self.nbytes, self.device = nbytes, device
        with context.using(device) as driver, context.outside_captures(driver):
            self.pointer = int(check(driver.cuMemAlloc(nbytes), "cuMemAlloc"))

    def write(self, data: bytes) -> None:
        """Copy bytes to its beginning and wait until they are there."""
        with self._stream() as (driver, stream):
            check(driver.cuMemcpyHtoDAsync(self.pointer, data, len(data), stream), "cuMemcpyHtoDAsync")

    def clear(self, offset: int, nbytes: int) -> None:
        """Zero ``nbytes`` bytes from an offset on and wait until they are."""
        with self._stream() as (driver, stream):
            check(driver.cuMemsetD8Async(self.pointer + offset, 0, nbytes, stream), "cuMemsetD8Async")

    @contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """(driver, a stream of its own), waited for in the end: the default stream waits for other streams, captured
        ones among them."""
        with context.using(self.device) as driver, context.outside_captures(driver):
            stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
            try:
                yield driver, stream
                check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
            finally:
                check(driver.cuStreamDestroy(stream), "cuStreamDestroy")

    def __del__(self) -> None:
        try:
            if self.pointer and not context.forked:
                with context.using(self.device) as driver, context.outside_captures(driver):
                    driver.cuMemFree(self.pointer)
        except Exception:
            # The interpreter or the driver is shutting down, which frees the memory as well.
            self.pointer = 0

    def __reduce__(self) -> Any:
        raise TypeError("device memory belongs to its process and cannot be pickled")


#: The driver cuts smaller allocations out of such blocks, and a handle names a whole block.
_BLOCK_BYTES = 2 << 20


def shareable_memory(nbytes: int, device: int) -> DeviceMemory:
    """At least ``nbytes`` zeros, which a handle can name. Raises DriverError, LaunchError."""
    memory = DeviceMemory(align_up(nbytes, _BLOCK_BYTES), device)
    memory.clear(0, memory.nbytes)
    return memory


def memory_handle(memory: DeviceMemory) -> bytes:
    """What another process opens the memory by. Raises DriverError."""
    with context.using(memory.device) as driver:
        handle = check(driver.cuIpcGetMemHandle(memory.pointer), "cuIpcGetMemHandle")
    return bytes(handle.reserved)


def open_memory(handle: bytes, device: int) -> int:
    """The address at which ``device`` reaches another process's memory, until close_memory().

    Raises DriverError where the GPUs cannot reach each other's memory.
    """
    with context.using(device) as driver, context.outside_captures(driver):
        named = driver.CUipcMemHandle()
        named.reserved = handle
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(check(driver.cuIpcOpenMemHandle(named, int(flag)), "cuIpcOpenMemHandle"))


def close_memory(pointer: int, device: int) -> None:
    """Unmap it. Raises DriverError."""
    with context.using(device) as driver, context.outside_captures(driver):
        check(driver.cuIpcCloseMemHandle(pointer), "cuIpcCloseMemHandle")
