"""A whole GEMM on wgmma, TMA, mbarriers and a ring that wraps, alone and with multicast in a cluster, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from probe_specs import WgmmaGemm
from ptx_of import probe

from cudatma.descriptor import TensorMap
from cudatma.emulator import Report


def gemm(spec: WgmmaGemm, m: int, n: int, k: int, **options: Any) -> tuple[Any, Any, Report]:
    """(result, reference in float64, report) of A (m, k) B (n, k)^T with random numbers."""
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.normal(size=(rows, k)).astype(np.float16) for rows in (m, n))
    d = np.full((m, n), np.nan, np.float32)
    boxes = ((a, (spec.loaded_m, 64), "128B"), (b, (spec.tile_n, 64), "128B"), (d, (64, spec.tile_n), "none"))
    maps = [TensorMap.from_array(x, box, swizzle=mode, encoder="codec") for x, box, mode in boxes]
    report = probe("wgmma_gemm", spec).launch(
        spec.entry,
        (n // spec.tile_n, m // spec.tile_m),
        spec.threads,
        (*maps, k // spec.tile_k),
        cluster=spec.cluster,
        shared_bytes=spec.smem_bytes,
        arrays=(a, b, d),
        **options,
    )
    return d, a.astype(np.float64) @ b.astype(np.float64).T, report


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("spec", "m", "n", "k"),
    [
        (WgmmaGemm(), 128, 128, 128),  # fewer tiles than stages
        (WgmmaGemm(), 128, 128, 640),  # the ring wraps twice
        (WgmmaGemm(1, 64, 3), 128, 128, 256),
        (WgmmaGemm(cluster=2), 128, 256, 640),
    ],
    ids=str,
)
def test_the_product_is_right_and_clean(spec: WgmmaGemm, m: int, n: int, k: int) -> None:
    found, wanted, report = gemm(spec, m, n, k, schedules=4)
    assert report.is_clean
    assert np.abs(found - wanted).max() < 1e-4
