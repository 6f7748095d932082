"""Run a Triton kernel on the emulator, without a GPU and with NumPy arrays instead of torch tensors.

    pip install triton
    python examples/triton_kernel.py             # no hazards and a correct result
    python examples/triton_kernel.py --broken    # adds without an atomic; the emulator reports the line

Each program sums the rows of a tile of the matrix and adds the sums to the result. All programs in a row of tiles add
to the same elements, so the additions must be atomic.
"""

from __future__ import annotations

import argparse

import numpy as np
import triton
import triton.language as tl

import cudatma


@triton.jit
def row_sums(x_ptr, sums_ptr, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ATOMIC: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.load(x_ptr + rows[:, None] * columns + offsets[None, :], mask=offsets[None, :] < columns, other=0.0)
    sums = tl.sum(tile, axis=1)
    if ATOMIC:
        tl.atomic_add(sums_ptr + rows, sums)
    else:
        tl.store(sums_ptr + rows, tl.load(sums_ptr + rows) + sums)


def main() -> int:
    """Run the kernel, print the emulator's report, and return 1 if there is a hazard or a wrong result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broken", action="store_true", help="add with a load and a store")
    options = parser.parse_args()
    x = np.random.default_rng(0).random((32, 200), dtype=np.float32)
    sums = np.zeros(32, np.float32)
    with cudatma.emulate_launches(hazards="collect") as log:
        row_sums[2, triton.cdiv(200, 64)](x, sums, 200, ROWS=16, COLUMNS=64, ATOMIC=not options.broken)
    error = np.abs(sums - x.sum(1)).max()
    print(f"{log}\nlargest error: {error:.4f}")
    return int(not log.is_clean or error > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
