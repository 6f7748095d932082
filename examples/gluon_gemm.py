"""Run a warp-specialized Gluon GEMM for Hopper on the emulator, without a GPU.

    pip install triton
    python examples/gluon_gemm.py             # no hazards and a correct result
    python examples/gluon_gemm.py --broken    # the consumer releases a slot too early; the emulator reports the line

One producer warp loads tiles of A and B into a ring of slots with TMA. One consumer warpgroup multiplies them with
wgmma. Each slot has two mbarriers: "full" signals the consumer that TMA has filled the slot, and "empty" signals the
producer that the consumer has released it.
"""

from __future__ import annotations

import argparse

import numpy as np
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import cudatma

# Triton 3.9 renamed these functions.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BLOCK_M, BLOCK_N, BLOCK_K, SLOTS = 64, 64, 64, 2


@gluon.jit
def produce(a_desc, b_desc, a_slots, b_slots, full, empty, slots: gl.constexpr):
    row, column = gl.program_id(0) * a_desc.block_type.shape[0], gl.program_id(1) * b_desc.block_type.shape[1]
    for i in range(gl.cdiv(a_desc.shape[1], a_desc.block_type.shape[1])):
        slot, k = i % slots, i * a_desc.block_type.shape[1]
        mbarrier.wait(empty.index(slot), (i // slots & 1) ^ 1)
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, k], full.index(slot), a_slots.index(slot))
        tma_load(b_desc, [k, column], full.index(slot), b_slots.index(slot))


@gluon.jit
def consume(a_desc, c_desc, a_slots, b_slots, full, empty, slots: gl.constexpr, broken: gl.constexpr):
    shape: gl.constexpr = c_desc.block_type.shape
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, shape[1], 16]
    )
    total = gl.zeros(shape, gl.float32, layout)
    for i in range(gl.cdiv(a_desc.shape[1], a_desc.block_type.shape[1])):
        slot = i % slots
        mbarrier.wait(full.index(slot), i // slots & 1)
        total = warpgroup_mma(a_slots.index(slot), b_slots.index(slot), total, is_async=True)
        if broken:
            mbarrier.arrive(empty.index(slot), count=1)  # wgmma is still reading the slot
        total = warpgroup_mma_wait(0, deps=(total,))
        if not broken:
            mbarrier.arrive(empty.index(slot), count=1)
    tile = gl.allocate_shared_memory(c_desc.dtype, shape, c_desc.layout)
    tile.store(total.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [gl.program_id(0) * shape[0], gl.program_id(1) * shape[1]], tile)
    tma.store_wait(0)


@gluon.jit
def gemm_kernel(a_desc, b_desc, c_desc, slots: gl.constexpr, broken: gl.constexpr):
    a_slots = gl.allocate_shared_memory(a_desc.dtype, [slots] + a_desc.block_type.shape, a_desc.layout)
    b_slots = gl.allocate_shared_memory(b_desc.dtype, [slots] + b_desc.block_type.shape, b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(slots):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (consume, (a_desc, c_desc, a_slots, b_slots, full, empty, slots, broken)),
            (produce, (a_desc, b_desc, a_slots, b_slots, full, empty, slots)),
        ],
        [1],
        [24],
    )


def gemm(a: np.ndarray, b: np.ndarray, broken: bool = False) -> np.ndarray:
    """Return a @ b for fp16 matrices."""

    def describe(x: np.ndarray, block: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.float16))

    c = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    maps = describe(a, [BLOCK_M, BLOCK_K]), describe(b, [BLOCK_K, BLOCK_N]), describe(c, [BLOCK_M, BLOCK_N])
    grid = triton.cdiv(c.shape[0], BLOCK_M), triton.cdiv(c.shape[1], BLOCK_N)
    gemm_kernel[grid](*maps, SLOTS, broken, num_warps=4, maxnreg=128)
    return c


def main() -> int:
    """Run the kernel, print the emulator's report, and return 1 if there is a hazard or a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broken", action="store_true", help="release slots before wgmma has read them")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float16) for shape in ((128, 320), (320, 128)))
    with cudatma.emulate_launches(target="sm_90a", hazards="collect") as log:
        c = gemm(a, b, options.broken)
    error = np.abs(c - a.astype(np.float32) @ b.astype(np.float32)).max()
    print(f"{log}\nlargest error: {error:.4f}")
    return int(not log.is_clean or error > 0.1)


if __name__ == "__main__":
    raise SystemExit(main())
