"""Device memory that other processes of the same host map into theirs.

[CUDA driver API, cuIpcGetMemHandle, cuIpcOpenMemHandle]
"""

from __future__ import annotations

from cudatma import context
from cudatma.errors import check
from cudatma.pipeline import align_up
from cudatma.runtime.device_memory import DeviceMemory

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
