"""Properties of the emulated device."""

from __future__ import annotations

from cudatma.target import Target

#: Number of SMs. The number is small so that each CTA of a persistent kernel processes several tiles.
SM_COUNT = 4
TOTAL_BYTES = 80 << 30
WARP_SIZE = 32
MAX_THREADS = 1024
#: Maximum number of bytes of static and dynamic shared memory per CTA without an opt-in.
SHARED_BYTES = 48 << 10
REGISTERS = 65536


def device_name(target: Target) -> str:
    """Return the name of the emulated device."""
    return f"cudatma emulator ({target.name})"


def device_attributes(target: Target) -> dict[str, int]:
    """Return the attributes of the emulated device. The keys are their names without CU_DEVICE_ATTRIBUTE_."""
    major, minor = target.compute_capability
    return {
        "COMPUTE_CAPABILITY_MAJOR": major,
        "COMPUTE_CAPABILITY_MINOR": minor,
        "MULTIPROCESSOR_COUNT": SM_COUNT,
        "WARP_SIZE": WARP_SIZE,
        "MAX_THREADS_PER_BLOCK": MAX_THREADS,
        "MAX_THREADS_PER_MULTIPROCESSOR": target.max_threads_per_sm,
        **dict(zip(("MAX_BLOCK_DIM_X", "MAX_BLOCK_DIM_Y", "MAX_BLOCK_DIM_Z"), (MAX_THREADS, 1024, 64), strict=True)),
        **dict(zip(("MAX_GRID_DIM_X", "MAX_GRID_DIM_Y", "MAX_GRID_DIM_Z"), (2**31 - 1, 65535, 65535), strict=True)),
        "MAX_REGISTERS_PER_BLOCK": REGISTERS,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": REGISTERS,
        "MAX_SHARED_MEMORY_PER_BLOCK": SHARED_BYTES,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": target.smem_per_block_bytes,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": target.smem_per_sm_bytes,
        "UNIFIED_ADDRESSING": 1,
        "MANAGED_MEMORY": 1,
        "CONCURRENT_MANAGED_ACCESS": 1,
        "MEMORY_POOLS_SUPPORTED": 0,
        "COOPERATIVE_LAUNCH": 1,
        "CLUSTER_LAUNCH": int(target.has("cluster")),
        "TENSOR_MAP_ACCESS_SUPPORTED": int(target.has("tma")),
        "INTEGRATED": 0,
    }
