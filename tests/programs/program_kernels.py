"""Triton kernels for test_triton.py. Triton reads their source, so they are in a file that only it imports."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def total_kernel(x_ptr, total_ptr, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)))
    tl.store(total_ptr, tl.load(total_ptr) + part)  # the mistake: programs add to one element without an atomic


@triton.jit
def product_kernel(a_map, b_ptr, sizes, c_map, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    b_map = tl.make_tensor_descriptor(b_ptr, [sizes[0], sizes[1]], [sizes[1], 1], [BLOCK, BLOCK])
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, sizes[0], BLOCK):
        total = tl.dot(a_map.load([row, k]), b_map.load([k, column]), total)
    c_map.store([row, column], total.to(tl.float16))


@triton.jit
def square_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    rows, at = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, columns, BLOCK):
        x = tl.load(x_ptr + rows[:, None] * columns + k + at[None, :])
        total = tl.dot(x, tl.trans(x), total)
    tl.store(y_ptr + rows[:, None] * BLOCK + at[None, :], total)


@triton.jit
def fill_kernel(pointers_ptr, value, BLOCK: tl.constexpr):
    pointer = tl.load(pointers_ptr + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(pointer + tl.arange(0, BLOCK), value)
