"""Device memory with the lifetime of a Python object, and device memory that other processes on the host can map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cudatma import context
from cudatma.errors import check
from cudatma.pipeline import align_up


class DeviceMemory:
    """Allocation of ``nbytes`` bytes on a device, which is freed with the object.

    The object must stay alive while a launch or a graph uses the memory. ``pointer`` is the address, which is 256-byte
    aligned. Raises DriverError if there is no driver or not enough memory, and LaunchError if the device does not
    exist. [CUDA driver API, cuMemAlloc]
    """

    __slots__ = ("__weakref__", "device", "nbytes", "pointer")

    def __init__(self, nbytes: int, device: int) -> None:
        self.pointer = 0
        self.nbytes, self.device = nbytes, device
        with context.using(device) as driver, context.outside_captures(driver):
            self.pointer = int(check(driver.cuMemAlloc(nbytes), "cuMemAlloc"))

    def write(self, data: bytes) -> None:
        """Copy bytes to the start of the memory, and wait until the copy has completed."""
        with self._stream() as (driver, stream):
            check(driver.cuMemcpyHtoDAsync(self.pointer, data, len(data), stream), "cuMemcpyHtoDAsync")

    def clear(self, offset: int, nbytes: int) -> None:
        """Set ``nbytes`` bytes at an offset to zero, and wait until they are written."""
        with self._stream() as (driver, stream):
            check(driver.cuMemsetD8Async(self.pointer + offset, 0, nbytes, stream), "cuMemsetD8Async")

    @contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """Yield the driver and a new stream, and synchronize the stream at the end.

        The default stream is not used, because it would wait for other streams, including streams that are being
        captured.
        """
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
            # The shutdown of the interpreter or the driver, which causes this error, also frees the memory.
            self.pointer = 0

    def __reduce__(self) -> Any:
        raise TypeError("device memory belongs to one process and cannot be pickled")


#: Minimum size of an allocation in bytes. The driver places smaller allocations in shared blocks of this size, and a
#: handle refers to a whole block.
_BLOCK_BYTES = 2 << 20


def shareable_memory(nbytes: int, device: int) -> DeviceMemory:
    """Return at least ``nbytes`` bytes of zeros that another process can open.

    Raises DriverError if the driver fails, and LaunchError if the device does not exist.
    """
    memory = DeviceMemory(align_up(nbytes, _BLOCK_BYTES), device)
    memory.clear(0, memory.nbytes)
    return memory


def memory_handle(memory: DeviceMemory) -> bytes:
    """Return the handle with which another process opens the memory.

    Raises DriverError if the driver fails.
    """
    with context.using(memory.device) as driver:
        handle = check(driver.cuIpcGetMemHandle(memory.pointer), "cuIpcGetMemHandle")
    return bytes(handle.reserved)


def open_memory(handle: bytes, device: int) -> int:
    """Map another process's memory, and return its address on ``device``.

    The mapping ends with close_memory(). Raises DriverError if the GPUs cannot access each other's memory.
    """
    with context.using(device) as driver, context.outside_captures(driver):
        ipc_handle = driver.CUipcMemHandle()
        ipc_handle.reserved = handle
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(check(driver.cuIpcOpenMemHandle(ipc_handle, int(flag)), "cuIpcOpenMemHandle"))


def close_memory(pointer: int, device: int) -> None:
    """Unmap another process's memory.

    Raises DriverError if the driver fails.
    """
    with context.using(device) as driver, context.outside_captures(driver):
        check(driver.cuIpcCloseMemHandle(pointer), "cuIpcCloseMemHandle")
