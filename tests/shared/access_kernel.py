"""A kernel whose parameters select one legal or illegal TMA access. It runs on the emulator and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cudatma.descriptor import Im2colSpec, TensorMap

ACCESS = """
//% include "primitives/bulk_copy.cuh.j2"
//% include "primitives/bulk_group.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_im2col.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/tma_reduce.cuh.j2"
//% include "primitives/tma_store.cuh.j2"
using namespace cudatma;

enum What : u32 {
    LOAD, STORE, REDUCE_ADD, REDUCE_XOR, LOAD_3D, LOAD_IM2COL, LOAD_BESIDE, EXPECT, INIT, BULK_LOAD, BULK_STORE,
    STORE_IM2COL
};

// shift: bytes that the box begins behind its place. c0, c1: coordinates, or for the others what they count.
extern "C" __global__ void access(
    const __grid_constant__ TensorMap map, u8* memory, u32 what, int c0, int c1, u32 shift, u32 bytes) {
    extern __shared__ __align__(1024) u8 smem[];
    __shared__ __align__(8) u64 barrier;
    const u32 box = shared_address(smem) + shift, bar = shared_address(&barrier);
    const auto beside = (const TensorMap*)(((u64)memory + 63) / 64 * 64 + 16);
    if (threadIdx.x != 0) return;
    mbarrier_init(bar, what == INIT ? c0 : 1);
    fence_mbarrier_init();
    const bool boxes = what == LOAD || what == LOAD_3D || what == LOAD_IM2COL || what == LOAD_BESIDE;
    const bool loads = boxes || what == BULK_LOAD;
    if (loads) mbarrier_arrive_expect_tx(bar, bytes);
    if (what == EXPECT) mbarrier_expect_tx(bar, bytes);
    if (what == LOAD) cp_async_bulk_tensor_2d_load(box, &map, bar, c0, c1);
    if (what == STORE) cp_async_bulk_tensor_2d_store(&map, box, c0, c1);
    if (what == REDUCE_ADD) cp_reduce_async_bulk_tensor_2d_add(&map, box, c0, c1);
    if (what == REDUCE_XOR) cp_reduce_async_bulk_tensor_2d_xor(&map, box, c0, c1);
    if (what == LOAD_3D) cp_async_bulk_tensor_3d_load(box, &map, bar, c0, c1, 0);
    if (what == LOAD_IM2COL) cp_async_bulk_tensor_3d_im2col_load(box, &map, bar, c0, c1, 0, 0);
    if (what == LOAD_BESIDE) cp_async_bulk_tensor_2d_load(box, beside, bar, c0, c1);
    if (what == STORE_IM2COL) cp_async_bulk_tensor_3d_im2col_store(&map, box, c0, c1, 0);
    if (what == BULK_LOAD) cp_async_bulk_load(box, memory + c0, bytes, bar);
    if (what == BULK_STORE) cp_async_bulk_store(memory + c0, box, bytes);
    if (loads) mbarrier_wait_parity(bar, 0);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
}
"""
_ENUM = ACCESS.partition("enum What : u32 {")[2].partition("}")[0]
#: Names of ``enum What`` in order.
WHATS = [name.strip() for name in _ENUM.split(",")]
SHARED_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Access:
    """An access. ``rule`` is the rule that it violates, or "". ``detail`` is a part of the message."""

    name: str
    what: str
    rule: str = ""
    c0: int = 0
    c1: int = 0
    shift: int = 0
    bytes: int = 2048
    dtype: str = "float16"
    map: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


ACCESSES: tuple[Access, ...] = (
    Access("a_load", "LOAD"),
    Access("a_load_before_the_start", "LOAD", c0=-8, c1=-3),
    Access("a_swizzled_load", "LOAD", map={"swizzle": "128B"}, shift=1024),
    Access("a_small_part_of_a_swizzled_tile", "LOAD", map={"swizzle": "128B", "box": (4, 64)}, shift=512, bytes=512),
    Access("a_store", "STORE", c0=8, c1=1),
    Access("a_sum", "REDUCE_ADD"),
    Access("a_xor", "REDUCE_XOR", dtype="uint32", map={"box": (16, 32)}),
    Access("bulk_bytes_in", "BULK_LOAD", c0=16),
    Access("bulk_bytes_out", "BULK_STORE", c0=16, bytes=64),
    Access("coordinate", "LOAD", "coordinate_alignment", c0=3, detail="coordinate 0 is 3 with elements of 2 bytes"),
    Access("negative_unaligned", "LOAD", "coordinate_alignment", c0=-4, detail="coordinate 0 is -4"),
    Access("coordinate_of_a_store", "STORE", "coordinate_alignment", c0=12),
    Access("negative_store", "STORE", "negative_coordinate", c1=-1, detail="coordinate 1 is -1"),
    Access("negative_sum", "REDUCE_ADD", "negative_coordinate", c0=-8, detail="coordinate 0 is -8"),
    Access("shared", "LOAD", "shared_alignment", shift=64, detail="128-byte aligned"),
    Access("swizzle_128", "LOAD", "swizzle_alignment", shift=512, map={"swizzle": "128B"}, detail="swizzle 128B"),
    Access("swizzle_32", "LOAD", "swizzle_alignment", shift=128, map={"swizzle": "32B", "box": (16, 16)}, detail="256"),
    Access("rank", "LOAD_3D", "map_rank", detail="rank 2, but the instruction is for rank 3"),
    Access("mode", "LOAD_IM2COL", "map_mode", map={"rank": 3}, detail="the tensor map is tiled"),
    Access("beside_the_map", "LOAD_BESIDE", "map_alignment"),
    Access("xor_of_floats", "REDUCE_XOR", "reduce_type", detail="element format 6"),
    Access("xor_of_int64", "REDUCE_XOR", "reduce_type", dtype="int64", map={"box": (16, 16)}),
    Access("expected", "EXPECT", "expected_bytes", bytes=1 << 20, detail="at most 1048575"),
    Access("no_arrivals", "INIT", "barrier_count", c0=0, detail="mbarrier_init is 0"),
    Access("a_column_in_the_padding", "LOAD_IM2COL", c1=-1, map={"corners": (-1, 1)}),
    Access("a_stored_column", "STORE_IM2COL", c0=8, c1=2, map={"corners": (0, 0)}),
    Access(
        "before_the_box", "LOAD_IM2COL", "bounding_box", c1=-2, map={"corners": (-1, 1)}, detail="coordinate 1 is -2"
    ),
    Access(
        "behind_the_box", "LOAD_IM2COL", "bounding_box", c1=65, map={"corners": (-1, 1)}, detail="coordinate 1 is 65"
    ),
    Access("tiled_of_im2col", "LOAD_3D", "map_mode", map={"corners": (0, 0)}, detail="the tensor map is im2col"),
    Access("padded_store", "STORE_IM2COL", "padded_store", map={"corners": (-1, 0)}, detail="im2col map are -1 and 0"),
    Access("bulk_size", "BULK_LOAD", "bulk_bytes", bytes=24, detail="24 bytes"),
    Access("bulk_global", "BULK_STORE", "bulk_global", c0=8),
    Access("bulk_shared", "BULK_STORE", "bulk_shared", shift=8),
)


def operands(access: Access, encoder: str = "codec", place: Any = np.asarray) -> tuple[Any, ...]:
    """Return the kernel's arguments. ``place`` copies a host array to the device."""
    options = dict(access.map)
    if "corners" in options:
        tensor = place(np.zeros((2, 64, 64), access.dtype))
        pointer = tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data.ptr
        lower, upper = options["corners"]
        spec = Im2colSpec(
            dtype=access.dtype,
            dims=(64, 64, 2),
            strides_bytes=(128, 8192),
            address=pointer,
            lower_corner=(lower,),
            upper_corner=(upper,),
            channels_per_pixel=64,
            pixels_per_column=16,
        )
        tensor_map = TensorMap(spec, encoder=encoder, owner=tensor)
        return tensor_map, *_numbers(access, place)
    shape = (64, 64) if options.pop("rank", 2) == 2 else (2, 64, 64)
    box = options.pop("box", (16, 64) if len(shape) == 2 else (1, 16, 64))
    tensor = place(np.zeros(shape, access.dtype))
    tensor_map = TensorMap.from_array(tensor, box, encoder=encoder, **options)
    return tensor_map, *_numbers(access, place)


def _numbers(access: Access, place: Any) -> tuple[Any, ...]:
    memory = place(np.zeros(4096, np.uint8))
    return memory, WHATS.index(access.what), access.c0, access.c1, access.shift, access.bytes
