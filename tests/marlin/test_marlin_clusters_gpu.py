"""Clusters that divide K, on a GPU: right, the same bits a thousand times, nothing written outside, in chains
of dependent launches too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from marlin_builders import skinny, wgmma
from marlin_operands import (
    activations,
    bits,
    compare,
    differences,
    is_poison,
    make_bias,
    make_weight,
    poisoned,
    serve_with,
    to_float64,
)
from this_gpu import TARGET, cupy

from cudatma import marlin_gemm
from cudatma.kernels.marlin.config import MarlinConfig

pytestmark = pytest.mark.gpu

if not TARGET.has_wgmma:
    pytest.skip(f"{TARGET.name} has no wgmma", allow_module_level=True)


def thin(**fields: Any) -> MarlinConfig:
    return skinny(stages=3, **fields)


def wide(**fields: Any) -> MarlinConfig:
    return wgmma(stages=3, **{"mmas_per_commit": 1, "commits_in_flight": 3} | fields)


#: Config, rows, K, N: parts of K that are even or not, columns of N or rows of M for each CTA, for some, for one.
CASES: dict[str, tuple[MarlinConfig, int, int, int]] = {
    "skinny_2": (thin(tile_m=8, tile_n=128, tile_k=256, slice_k=2, cluster_k=2), 5, 4096, 392),
    "skinny_3_uneven": (thin(tile_m=16, tile_n=96, tile_k=128, slice_k=2, cluster_k=3), 27, 1416, 1000),
    "skinny_8_one_column": (thin(tile_m=8, tile_n=32, tile_k=128, slice_k=2, cluster_k=8), 1, 3080, 64),
    "skinny_5_odd": (thin(tile_m=32, tile_n=160, tile_k=128, slice_k=2, cluster_k=5), 29, 2000, 800),
    "skinny_4_deep_box": (
        thin(tile_m=8, tile_n=64, tile_k=512, slice_k=4, cluster_k=4, deep_box=True),
        8,
        8192,
        1280,
    ),
    "wgmma_2": (wide(tile_m=64, tile_k=128, cluster_k=2, warpgroups=2), 61, 2048, 300),
    "wgmma_3_depths": (wide(tile_m=40, tile_k=256, cluster_k=3, slice_k=2), 75, 2824, 520),
    "wgmma_4_stack": (wide(tile_m=72, tile_k=128, cluster_k=4, tile_n=128), 140, 1160, 1000),
    "wgmma_8_few_tokens": (wide(tile_m=24, tile_k=128, cluster_k=8), 17, 3080, 136),
    "wgmma_6_wide": (
        wide(tile_m=128, tile_k=64, cluster_k=6, warpgroups=2, mmas_per_commit=2, commits_in_flight=1),
        250,
        1536,
        264,
    ),
    "wgmma_4_registers": (
        wide(tile_m=96, tile_k=128, cluster_k=4, warpgroups=2, tile_n=256, consumer_registers=232),
        96,
        4096,
        512,
    ),
}


def use(monkeypatch: pytest.MonkeyPatch, config: MarlinConfig) -> None:
    serve_with(monkeypatch, lambda *_: config)


@pytest.mark.parametrize("name", CASES)
def test_products_are_right_and_stay_within_bounds(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config, rows, k, n = CASES[name]
    use(monkeypatch, config)
    weight, bias = make_weight(k, n), make_bias(n, "float16")
    x, buffer = activations((rows, k), "float16"), poisoned((rows + 2, n + 8), "float16")
    marlin_gemm(x, weight.packed, out=buffer[:rows, :n], bias=bias)
    problem = compare(buffer[:rows, :n], to_float64(x) @ weight.dense + to_float64(bias)).problem("float16")
    assert not problem, problem
    assert is_poison(bits(buffer)[:rows, n:])
    assert is_poison(bits(buffer)[rows:])


@pytest.mark.parametrize("name", ["skinny_3_uneven", "skinny_8_one_column", "wgmma_3_depths", "wgmma_8_few_tokens"])
def test_a_thousand_runs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The test covers ordinary launches, and chains of dependent launches, whose CTAs wait while the previous launch is
    still running."""
    config, rows, k, n = CASES[name]
    use(monkeypatch, config)
    weight, x = make_weight(k, n), activations((rows, k), "float16")
    first = marlin_gemm(x, weight.packed)
    out, wrong = cupy.empty_like(first), cupy.zeros((), np.int64)
    for programmatic in (False, True):
        for _ in range(500):
            marlin_gemm(x, weight.packed, out=out, programmatic=programmatic)
            wrong += differences(out, first)
    assert int(wrong) == 0


@pytest.mark.parametrize("m", [1, 7, 16, 17, 40, 64, 100, 250, 500])
@pytest.mark.parametrize(("k", "n"), [(4096, 1024), (8192, 256), (2048, 2048), (1000, 136), (20000, 64), (130, 2000)])
def test_what_the_cost_model_chooses_for_a_small_n(k: int, n: int, m: int) -> None:
    weight, x = make_weight(k, n), activations((m, k), "float16")
    out = poisoned((m, n), "float16")
    marlin_gemm(x, weight.packed, out=out)
    problem = compare(out, to_float64(x) @ weight.dense).problem("float16")
    assert not problem, problem
