"""Triton and Gluon kernels for tests. A program that uses them imports this module, because jit reads its file."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Triton 3.9 renamed these functions.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@triton.jit
def softmax(y_ptr, x_ptr, columns, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * columns + offsets, numerator / tl.sum(numerator, axis=0), mask=offsets < columns)


@gluon.jit
def double_tiles(x_desc, y_desc):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(0) * x_desc.block_type.shape[0]
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, x_desc.block_type.nbytes)
    load_tile(x_desc, [row, 0], full, tile)
    mbarrier.wait(full, phase=0)
    x = tile.load(layout)
    tile.store(x + x)
    fence_async_shared()
    store_tile(y_desc, [row, 0], tile)
    tma.store_wait(0)
    mbarrier.invalidate(full)
