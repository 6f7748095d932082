"""malloc and free of kernels. Source: CUDA C++ Programming Guide, "Dynamic Global Memory Allocation"."""

from __future__ import annotations

import numpy as np

from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine.memory import address_of
from cudatma.emulator.machine.protocols import Launch

#: What cudaLimitMallocHeapSize is where nobody sets it.
HEAP_BYTES = 8 << 20
_ALIGN = 16


def allocate(launch: Launch, size: int) -> int:
    """The address of ``size`` fresh bytes, 0 where the heap is full."""
    if not 0 <= size <= HEAP_BYTES - sum(launch.heap.values()):
        return 0
    raw = np.full(max(size, 1) + _ALIGN, 0xA5, np.uint8)
    skip = -address_of(raw) % _ALIGN
    address = launch.memory.add(raw[skip : skip + max(size, 1)], "memory from malloc")
    launch.heap[address] = size
    return address


def release(launch: Launch, address: int) -> None:
    """Give back what allocate() gave. Raises TrapError for anything else than its addresses and 0."""
    if address:
        if launch.heap.pop(address, None) is None:
            raise TrapError(f"free of {address:#x}, which malloc has not given or free has taken")
        launch.memory.remove(address)
