"""Operations over arrays and the ragged copy, small, for the sanitizers.

compute-sanitizer --tool racecheck python3 tests/build/sanitize_data_movement.py ragged
(or data_movement; memcheck, synccheck, ..)

Every array has a cudaMalloc of its own, so that memcheck knows where it ends; results are compared on the host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cudatma
from cudatma.kernels.data_movement.ragged_copy import RaggedCopy

ARRAYS, REPEATS = 1000, 3
RNG = np.random.default_rng(5)


def on_gpu(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def ragged() -> dict[str, bool]:
    """ARRAYS arrays of random shapes through one launch, REPEATS times; with a gap after some rows."""
    sources, buffers, results = [], [], []
    for _ in range(ARRAYS):
        rows, columns, gap = int(RNG.integers(0, 40)), 4 * int(RNG.integers(1, 24)), 4 * int(RNG.integers(0, 3))
        sources.append(RNG.integers(0, 100, (rows, columns)).astype(np.float32))
        buffers.append(on_gpu(np.full((rows, columns + gap), 77, np.float32)))
        results.append(buffers[-1][:, :columns])
    copy = RaggedCopy([on_gpu(source) for source in sources], results)
    for _ in range(REPEATS):
        copy.run()
    right = True
    for source, buffer in zip(sources, buffers, strict=True):
        found = buffer.get()
        right = right and (found[:, : source.shape[1]] == source).all() and (found[:, source.shape[1] :] == 77).all()
    return {"ragged_copy": bool(right)}


def data_movement() -> dict[str, bool]:
    """Each operation once, by TMA, on shapes that no tile divides."""
    source = RNG.integers(0, 1000, (300, 516)).astype(np.float32)
    x, wide = on_gpu(source), on_gpu(np.zeros((300, 520), np.float32))
    window = on_gpu(np.zeros((200, 400), np.float32))
    cudatma.copy(x, out=window, offset=(50, 100), shape=(200, 400), via="tma")
    turned = on_gpu(np.zeros((516, 300), np.float32))
    cudatma.transpose(x, out=turned, via="tma")
    sums = on_gpu(np.ones((300, 516), np.float32))
    cudatma.reduce_into(sums, x, "add")
    cudatma.copy(x, out=wide[:, :516], via="tma")
    copies = on_gpu(np.zeros((3, 300 * 516), np.float32))
    cudatma.broadcast(x.reshape(-1), 3, out=copies)
    return {
        "copy of a window": bool((window.get() == source[50:250, 100:500]).all()),
        "transpose": bool((turned.get() == source.T).all()),
        "reduce_into": bool((sums.get() == source + 1).all()),
        "copy into a window": bool((wide.get()[:, :516] == source).all() and (wide.get()[:, 516:] == 0).all()),
        "broadcast": bool((copies.get() == source.reshape(-1)).all()),
    }


def main() -> int:
    import cupy

    cupy.cuda.set_allocator(None)
    wanted = sys.argv[1:] or ["ragged", "data_movement"]
    answers = {
        name: right
        for part in wanted
        for name, right in {"ragged": ragged, "data_movement": data_movement}[part]().items()
    }
    for name, right in answers.items():
        print(f"{'right ' if right else 'WRONG '} {name}")
    return int(not all(answers.values()))


if __name__ == "__main__":
    sys.exit(main())
