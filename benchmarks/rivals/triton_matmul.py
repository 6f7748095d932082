"""A persistent matrix product in Triton: tiles of A, B and the result move through tensor descriptors, that is by TMA.

Each program computes tiles number pid, pid + programs, pid + 2 programs and so on. Tiles are numbered in groups of
``GROUP`` rows of tiles, column after column within a group, so that neighbors share operands in L2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gemm_products import Operands

#: (block_m, block_n, block_k, stages, warps, rows of tiles in a group, whether the loops over tiles and K are one).
CONFIGURATIONS = (
    (128, 256, 64, 3, 8, 8, False),
    (128, 256, 64, 3, 8, 8, True),
    (256, 128, 64, 3, 8, 4, True),
    (128, 128, 64, 4, 8, 8, True),
    (128, 128, 64, 4, 4, 8, False),
    (64, 256, 64, 4, 4, 8, False),
    (64, 128, 64, 5, 4, 8, False),
    (64, 64, 128, 4, 4, 8, False),
)


@triton.jit  # type: ignore[untyped-decorator]
def persistent_matmul(  # type: ignore[no-untyped-def]
    a_tiles,
    b_tiles,
    out_tiles,
    m,
    n,
    k,
    programs,
    A_IS_ROW_MAJOR: tl.constexpr,  # noqa: N803
    B_IS_ROW_MAJOR: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    FLATTEN: tl.constexpr,  # noqa: N803
):
    down, across = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    k_steps = tl.cdiv(k, BLOCK_K)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=FLATTEN):
        group = tile // (GROUP * across)
        height = tl.minimum(down - group * GROUP, GROUP)
        place = tile - group * GROUP * across
        row = (group * GROUP + place % height) * BLOCK_M
        column = (place // height) * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(k_steps):
            k0 = step * BLOCK_K
            left = a_tiles.load([row, k0]) if A_IS_ROW_MAJOR else a_tiles.load([k0, row]).T
            right = b_tiles.load([k0, column]) if B_IS_ROW_MAJOR else b_tiles.load([column, k0]).T
            sums = tl.dot(left, right, sums)
        out_tiles.store([row, column], sums.to(out_tiles.dtype))


def variants(operands: Operands, out: Any) -> dict[str, Callable[[int], object]]:
    """One candidate a configuration, without tiles that are twice as high as the result."""
    import torch

    found: dict[str, Callable[[int], object]] = {}
    programs = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 3
    for configuration in CONFIGURATIONS:
        block_m, block_n, block_k, stages, warps, _, is_flat = configuration
        if block_m > 64 and block_m >= 2 * operands.product.m:
            continue
        name = f"{block_m} x {block_n} x {block_k}, {stages} stages, {warps} warps{', one loop' if is_flat else ''}"
        found[name] = partial(_launch, operands, out, programs, configuration)
    return found


def _launch(operands: Operands, out: Any, programs: int, configuration: tuple[Any, ...], index: int) -> None:
    block_m, block_n, block_k, stages, warps, group, is_flat = configuration
    product, (a, b) = operands.product, operands.pair(index)
    is_a_row_major, is_b_row_major = (letter == "R" for letter in product.layout)
    tiles = -(-product.m // block_m) * -(-product.n // block_n)
    persistent_matmul[(min(programs, tiles),)](
        _tiles(a, block_m, block_k, is_a_row_major),
        _tiles(b, block_k, block_n, is_b_row_major),
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        *(product.m, product.n, product.k, min(programs, tiles)),
        *(is_a_row_major, is_b_row_major, block_m, block_n, block_k, group, is_flat),
        num_stages=stages,
        num_warps=warps,
    )


def _tiles(matrix: Any, rows: int, columns: int, is_row_major: bool) -> Any:
    """The descriptor of a matrix whose tiles are rows x columns; of its transpose where it is column-major."""
    if is_row_major:
        return TensorDescriptor.from_tensor(matrix, [rows, columns])
    return TensorDescriptor.from_tensor(matrix.T, [columns, rows])
