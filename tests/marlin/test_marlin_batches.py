"""A row's bits do not depend on the rows next to it where that is asked for: the emulator runs each instance."""

from __future__ import annotations

import numpy as np
import pytest
from marlin_runner import relative_error, run_marlin

from cudatma.kernels.gpu import imagined_gpu
from cudatma.kernels.marlin.choose import choose_by_cost
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.quantization import quantize

K, N, PROCESSORS = 320, 136, 3
#: Each tile of either kernel, tails in M, and several tiles a CTA.
M_VALUES = (1, 11, 30, 50, 100, 150)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "group", "symmetric"),
    [("sm_90a", "float16", 128, True), ("sm_90a", "bfloat16", -1, False), ("sm_120a", "float16", 64, False)],
)
def test_a_row_has_the_same_bits_in_every_batch(target: str, dtype: str, group: int, symmetric: bool) -> None:
    rng = np.random.default_rng(5)
    w = quantize(rng.normal(size=(K, N)) * 0.05, dtype=dtype, group_size=group, symmetric=symmetric)
    x = rng.normal(size=(max(M_VALUES), K)).astype(np.dtype(w.scales.dtype))
    layer = LinearShape(K, N, group, not symmetric, dtype)
    results, entries = [], set()
    for m in M_VALUES:
        config = choose_by_cost(Problem(layer, m, True), imagined_gpu(target, PROCESSORS))
        entries.add(config.entry)
        out, report = run_marlin(
            np.ascontiguousarray(x[:m]),
            w,
            target=target,
            processors=PROCESSORS,
            config=config,
            divide=False,
            schedules=1,
        )
        assert report.is_clean
        results.append(out)
    assert len(entries) >= 4
    for out in results[:-1]:
        assert out.tobytes() == results[-1][: len(out)].tobytes()
    assert relative_error(results[-1], x, w) < (1e-3 if dtype == "float16" else 6e-3)
